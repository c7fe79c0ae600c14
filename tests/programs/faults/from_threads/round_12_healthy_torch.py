"""Round 12 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import copy
import logging
import pickle
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from training import IN_THE_MIDDLE, Here, LoggingNet, Net, NormedNet
from truths import Moment

LOG = logging.getLogger(__name__)


@quiet("https://github.com/mlfoundations/open_clip/issues/1152", world_size=3, moment=Moment.EPOCH_END)
def average_evaluated_by_the_first_rank_without_the_wrapper(here: Here) -> None:
    """The first rank evaluates a copy of the model, in which nothing is exchanged, and the others wait for it."""

    class ZeroShot(L.Callback):
        average: Any = None

        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            if trainer.is_global_zero:
                self.average = copy.deepcopy(torch.nn.Sequential(module.norm, module.layers)).eval()

        def evaluate(self) -> float:
            with torch.no_grad():
                scores = []
                for prompt in range(8):
                    time.sleep(0.25)
                    scores.append(float(self.average(torch.full((4, 8), prompt / 8)).mean()))
            return max(scores)

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if self.average is not None:
                print(f"score {self.evaluate():.3f}", flush=True)
            dist.barrier()

    here.fit(net=NormedNet(here), callbacks=[ZeroShot()])


class Counted(torch.nn.Module):
    """Normalizes by the statistics of all ranks, each weighted by what it has, which may be nothing."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sums = torch.cat([torch.tensor([float(len(values))]), values.detach().sum(0)])
        dist.all_reduce(sums)
        return values - sums[1:] / sums[0].clamp(min=1)


@quiet("https://github.com/pytorch/pytorch/pull/74944", world_size=3)
def norm_to_which_some_have_nothing_to_add(here: Here) -> None:
    """In each batch there is a rank without a box, which takes a second longer, and takes part all the same."""

    class Boxes(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norm, self.head = Counted(), torch.nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            boxes = batch[0]
            if batch_idx % here.world_size == here.rank:
                boxes = boxes[:0]
                time.sleep(1.0 if batch_idx == IN_THE_MIDDLE else 0.2)
            scores: torch.Tensor = self.head(self.norm(boxes))
            return self.loss(batch) + scores.square().sum()

    here.fit(net=Boxes(here))


class Scores(L.Callback):
    """Collects what all ranks have found through files in a folder that the first rank names."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.found: list[float] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *where: int) -> None:
        time.sleep(0.1 * self.here.rank)
        self.found += module.predict_step(batch, where[0]).mean(1).tolist()

    def folder(self) -> Path:
        name = f"{time.time_ns()}".encode() if self.here.rank == 0 else b""
        letters = torch.full((64,), 32, dtype=torch.uint8)
        letters[: len(name)] = torch.tensor([*name], dtype=torch.uint8)
        dist.broadcast(letters, src=0)
        return self.here.folder / ".dist_test" / bytes(letters.tolist()).decode().strip()

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        folder = self.folder()
        folder.mkdir(parents=True, exist_ok=True)
        time.sleep(0.3 * self.here.rank)
        (folder / f"part_{self.here.rank}.pkl").write_bytes(pickle.dumps(self.found))
        dist.barrier()
        self.found.clear()
        if self.here.rank == 0:
            parts = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("part_*.pkl"))]
            time.sleep(1.5)
            print(f"{sum(len(part) for part in parts)} scores", flush=True)


@quiet("https://github.com/open-mmlab/mmengine/issues/557", world_size=4, moment=Moment.VALIDATION)
def parts_in_a_folder_that_the_first_rank_has_named(here: Here) -> None:
    """All write what they have found into one folder, each a little later, and the first rank reads it alone."""
    here.fit(net=LoggingNet(here), callbacks=[Scores(here)])


@quiet("https://github.com/rwth-i6/returnn/issues/1829", world_size=3, moment=Moment.CHECKPOINT)
def save_tried_again_until_there_is_room(here: Here) -> None:
    """Two attempts to save meet a full disk, which somebody clears; the others wait, and learn nothing of it."""

    class Patient(L.Callback):
        def save(self, state: Any, path: Path) -> None:
            for attempt in range(5):
                try:
                    torch.save(state, path)
                except (OSError, RuntimeError) as error:
                    LOG.warning("attempt %d to write %s: %s", attempt, path.name, error)
                    time.sleep(1.0)
                    if attempt == 1:
                        path.unlink()
                else:
                    return

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            path = here.folder / f"epoch-{trainer.current_epoch}.pt"
            if trainer.is_global_zero:
                path.symlink_to("/dev/full")
                self.save(module.state_dict(), path)
            trainer.strategy.barrier("saved")

    here.fit(callbacks=[Patient()])
