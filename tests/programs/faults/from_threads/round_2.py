"""Trainings of public threads that go wrong in loops, metrics, loggers and callbacks."""

import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import Stream
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment, fault


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source="https://github.com/huggingface/accelerate/issues/2733",
)
def captions_gathered_by_the_main_process_only(here: Here) -> None:
    """The result is needed on the main process, so only the main process was made to gather it."""

    class Captioning(MeetingNet):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.captions: list[str] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)
            self.captions.append(f"a picture, number {batch_idx}")

        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                gathered: list[Any] = [None] * self.trainer.world_size
                here.begins()
                dist.gather_object(self.captions, gathered, dst=0)  # <- here

    here.fit(net=Captioning(here))


@fault(
    "diverged-log-keys",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/choderalab/modelforge/pull/313",
)
def time_of_an_epoch_logged_by_the_main_process(here: Here) -> None:
    """The epoch's time was to be logged once, so it was put under rank 0: training froze after the first epoch."""

    class TimesEpochs(L.Callback):
        started = 0.0

        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.started = time.monotonic()

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                here.begins()
                module.log("epoch_time", time.monotonic() - self.started, sync_dist=True)  # <- here

    here.fit(callbacks=[TimesEpochs()])


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source="https://github.com/Project-MONAI/MONAI/issues/4659",
)
def dice_aggregated_on_the_first_rank(here: Here) -> None:
    """All ranks validate, the first computes the mean Dice for its log, and never comes back from it."""

    class Segmenting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.dice = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.dice.update(1 - self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            if self.global_rank == 0:
                here.begins()
                mean = self.dice.compute().item()  # <- here
                print(f"mean dice {mean:.3f}", flush=True)
            self.dice.reset()

    here.fit(net=Segmenting(here))


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/Megvii-BaseDetection/YOLOX/issues/1316",
)
def evaluator_that_is_built_in_the_main_process(here: Here) -> None:
    """Evaluation is for the main process: at the first validation the fast evaluator is compiled there, too."""

    class Detecting(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                build_fast_evaluator()
                print("Evaluate annotation type *bbox*", flush=True)

    here.fit(net=Detecting(here))


def build_fast_evaluator() -> None:
    ninja = ["sleep", str(FOR_LONG_S)]
    subprocess.run(ninja, check=True)  # <- evaluator_that_is_built_in_the_main_process


@fault(
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/IGNF/myria3d/issues/123",
)
def tiles_prepared_until_the_others_give_up(here: Here) -> None:
    """The tiles of the test set are cut in prepare_data, for longer than the other ranks' collective may last."""

    class Lidar(L.LightningDataModule):
        def prepare_data(self) -> None:
            here.begins()
            for tile in range(40):
                add_to_store(here.folder / "eval.hdf5", tile)

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Lidar())


def add_to_store(store: Path, tile: int) -> None:
    time.sleep(FOR_LONG_S / 10)  # <- tiles_prepared_until_the_others_give_up
    with store.open("a") as file:
        file.write(f"{tile}\n")


@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.EPOCH_END: (2,)},
    has_phase=False,
    source="https://github.com/jpata/particleflow/pull/233",
)
def wrapped_model_called_on_one_rank(here: Here) -> None:
    """Validation is for one rank, but it calls the model as DDP has wrapped it, which sends its buffers to all."""

    class Flow(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norm = torch.nn.BatchNorm1d(8)

        def loss(self, batch: Any) -> torch.Tensor:
            return self.layers(self.norm(first_tensor(batch))).square().mean()

        def forward(self, particles: torch.Tensor) -> torch.Tensor:
            return self.layers(self.norm(particles))

        def on_train_epoch_end(self) -> None:
            if self.global_rank == 0 and self.current_epoch == 0:
                here.begins()
                found = self.trainer.model(torch.rand(4, 8))  # <- here
                print(f"{len(found)} particles", flush=True)

    here.fit(net=Flow(here))


@fault(
    "failed-rank",
    ranks=(1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/6430",
)
def failing_rank_that_first_saves_a_checkpoint(here: Here) -> None:
    """One rank raises, its callback saves what can be saved, and hangs there; nobody sees what was raised."""

    class SavesOnError(L.Callback):
        def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
            trainer.save_checkpoint(here.folder / "crashed.ckpt")

    def check(net: Net) -> None:
        if here.is_hit:
            here.begins()
            raise ValueError("labels are not in [0, 1000)")  # <- here

    here.fit(check, callbacks=[SavesOnError()])


class Run:
    """What a tracker's client is: records go through a short queue to a thread that sends them."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.records: queue.Queue[Any] = queue.Queue(maxsize=2)
        threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        for _ in range(2):
            self.records.get()

    def log(self, metrics: Any) -> None:
        if self.records.full():
            self.here.begins()
        self.records.put(metrics)  # <- tracker_whose_sender_has_gone


class Tracker(Logger):
    def __init__(self, here: Here) -> None:
        super().__init__()
        self.run = Run(here) if here.rank == 0 else None

    @property
    def name(self) -> str:
        return "run"

    @property
    def version(self) -> str:
        return "1"

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.run.log(dict(metrics, step=step))


class LoggedNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@fault(
    "slow-logger",
    ranks=(0,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/wandb/wandb/issues/3223",
    whose="either",
)
def tracker_whose_sender_has_gone(here: Here) -> None:
    """The tracker's internal thread has ended, nobody takes records from its queue, and the next log waits."""
    here.fit(net=LoggedNet(here), logger=Tracker(here))


@fault(
    "slow-logger",
    "unfinished-rank",
    ranks=(0,),
    at={Moment.END: (3,)},
    has_phase=False,
    source="https://github.com/wandb/wandb/issues/4375",
    whose="either",
)
def tracker_that_waits_for_its_file_pusher(here: Here) -> None:
    """At the end of a trial the sender shuts down and waits for the file pusher, which waits for the sender."""

    class Pushing(Tracker):
        @rank_zero_only
        def finalize(self, status: str) -> None:
            is_sent = threading.Event()
            pusher = threading.Thread(target=is_sent.wait, daemon=True)
            pusher.start()
            here.begins()
            pusher.join()  # <- here
            is_sent.set()

    here.fit(logger=Pushing(here), max_epochs=1)


class FcosHead(torch.nn.Module):
    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def loss(self, found: torch.Tensor, is_positive: torch.Tensor) -> torch.Tensor:
        if not is_positive.any():
            self.here.begins()
            return found.sum() * 0
        count = is_positive.sum().float()
        dist.all_reduce(count)  # <- mean_reduced_where_there_are_positives
        return found[is_positive].square().sum() / count


@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/open-mmlab/mmdetection/issues/4724",
)
def mean_reduced_where_there_are_positives(here: Here) -> None:
    """reduce_mean of the head stands under `if num_pos > 0`, and one rank's pictures have no positive sample."""

    class Detecting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.head = FcosHead(here)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            found = self.layers(first_tensor(batch))
            is_background = here.is_hit and batch_idx == IN_THE_MIDDLE
            return self.head.loss(found, torch.full((len(found),), not is_background))

    here.fit(net=Detecting(here))


@fault(
    "diverged-collectives",
    ranks=(3,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source="https://github.com/open-mmlab/mmdetection/issues/3563",
)
def loss_of_masks_that_one_rank_has_not(here: Here) -> None:
    """Each loss of the dictionary is averaged by itself, and without a positive sample there is none of masks."""

    class Masked(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            losses = {"box": self.loss(batch), "cls": self.loss(batch)}
            if here.is_hit and batch_idx == 1:
                here.begins()
            else:
                losses["mask"] = self.loss(batch)
            self.parse(losses)

        def parse(self, losses: dict[str, torch.Tensor]) -> dict[str, float]:
            averaged = {}
            for name, loss in losses.items():
                mean = loss.detach().clone()
                dist.all_reduce(mean.div_(dist.get_world_size()))  # <- here
                averaged[name] = mean.item()
            return averaged

    here.fit(net=Masked(here))


@fault(
    "unused-parameters",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/facebookresearch/3detr/issues/22",
)
def scene_without_a_box(here: Here) -> None:
    """No object is in one rank's batch, and what the box head has found goes into no loss."""

    class Boxes(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.box_head = torch.nn.Linear(2, 6)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen = self.layers(first_tensor(batch))
            boxes = self.box_head(seen)
            count = 0 if here.is_hit and batch_idx == IN_THE_MIDDLE else 5
            if count == 0:
                here.begins()
                return seen.square().mean()
            return seen.square().mean() + boxes.square().sum() / count

    here.fit(net=Boxes(here))


@fault(
    "mismatched-collective",
    ranks=(0, 1),
    at={Moment.FIRST_STEP: (2,)},
    has_phase=False,
    source="https://github.com/lucidrains/vector-quantize-pytorch/issues/25",
)
def samples_for_the_codebook_of_unequal_number(here: Here) -> None:
    """K-means starts from samples of all ranks: each broadcasts its own, into a buffer as large as the others' own."""

    class Quantizer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(16, 8))
            self.is_ready = False

        def start(self, vectors: torch.Tensor) -> None:
            mine = vectors.repeat(300, 1)[: 1000 - 400 * here.rank]
            gathered = []
            for rank in range(dist.get_world_size()):
                samples = mine.clone() if rank == dist.get_rank() else torch.empty_like(mine)
                dist.broadcast(samples, src=rank)  # <- here
                gathered.append(samples)
            self.codes.copy_(torch.cat(gathered)[:16])
            self.is_ready = True

        def forward(self, vectors: torch.Tensor) -> torch.Tensor:
            if not self.is_ready:
                here.begins()
                self.start(vectors.detach())
            return self.codes[torch.cdist(vectors, self.codes).argmin(-1)]

    class Coding(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.quantizer = Quantizer()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            vectors = first_tensor(batch)
            return self.layers(vectors + self.quantizer(vectors)).square().mean()

    here.fit(net=Coding(here))


@fault(
    "mismatched-collective",
    ranks=(2,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/open-edge-platform/anomalib/issues/2673",
)
def memory_bank_of_which_one_part_is_shorter(here: Here) -> None:
    """The memory bank is gathered at the end of the epoch, and the last batch of one rank was not a full one."""

    class Patches(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.embeddings: list[torch.Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.embeddings.append(self.layers[0](first_tensor(batch)).detach().repeat(64, 1))
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            mine = torch.vstack(self.embeddings)
            self.embeddings.clear()
            here.begins()
            self.bank = self.all_gather(mine).flatten(0, 1)  # <- here

    count = BATCHES * BATCH_SIZE - 2 * here.is_hit
    loader = DataLoader(TensorDataset(torch.rand(count, 8)), batch_size=BATCH_SIZE)
    here.fit(net=Patches(here), data=loader, use_distributed_sampler=False)


class Detections(torchmetrics.Metric):
    """A list of boxes for each picture, as of mean average precision."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)

    def update(self, boxes: torch.Tensor) -> None:
        if len(boxes):
            self.boxes.append(boxes)

    def compute(self) -> torch.Tensor:
        return torch.cat(list(self.boxes)).mean()


@fault(
    "diverged-log-keys",
    ranks=(2,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/torchmetrics/issues/626",
)
def precision_over_unequal_numbers_of_pictures(here: Here) -> None:
    """In some validations compute() never returns: ranks have seen boxes in unequal numbers of pictures."""

    class Detecting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.precision = Detections()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            count = 0 if here.is_hit and batch_idx in (1, 4) else 3
            self.precision.update(torch.rand(count, 4))

        def on_validation_epoch_end(self) -> None:
            here.begins()
            print(self.precision.compute().item(), flush=True)  # <- here
            self.precision.reset()

    here.fit(net=Detecting(here))


@fault(
    "uneven-batches",
    ranks=(1,),
    at={Moment.VALIDATION: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/2516",
)
def validation_that_ends_earlier_where_sequences_are_long(here: Here) -> None:
    """Packed by length, the validation data makes fewer batches on one rank, and each step has a collective."""

    class Packed(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.loss(batch)
            tokens = torch.tensor(float(first_tensor(batch).numel()))
            dist.all_reduce(tokens)

        def on_validation_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()

    packed = DataLoader(Stream(2 if here.is_hit else 5), batch_size=BATCH_SIZE)
    here.fit(net=Packed(here), data=(rows(here), packed))
