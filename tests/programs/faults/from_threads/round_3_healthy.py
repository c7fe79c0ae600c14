"""More trainings of public threads that look odd and of which nothing is to be said."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH_SIZE, BATCHES, Here, MeetingNet, Net, NormedNet, first_tensor, rows
from truths import Moment, healthy


@healthy(
    {Moment.EPOCH_END: (2,)},
    source="https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#stochastic-weight-averaging",
)
def epoch_that_is_added_for_averaged_weights(here: Here) -> None:
    """Weight averaging runs one more epoch, without an optimizer, for the statistics of batch norm."""

    here.fit(net=NormedNet(here), callbacks=[StochasticWeightAveraging(swa_lrs=0.001, swa_epoch_start=1)], max_epochs=3)


@healthy({Moment.VALIDATION: (3,)}, source="https://github.com/dmlc/dgl/pull/3169")
def index_that_rank_zero_fills_with_a_loader_of_its_own(here: Here) -> None:
    """After each validation rank 0 reads the gallery for half a second, with workers of its own."""

    class Retrieval(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                for batch in DataLoader(TensorDataset(torch.rand(32, 8)), batch_size=8, num_workers=2):
                    time.sleep(0.1)
                    self.loss(batch)

    here.fit(net=Retrieval(here), data=(rows(here), rows(here, batches=2)))


@healthy({Moment.VALIDATION: (2,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/18487")
def loaders_made_anew_for_each_half_of_an_epoch(here: Here) -> None:
    """Loaders are reloaded after each epoch, validation comes in the midst of it, and has two loaders of their own."""

    class Reloaded(MeetingNet):
        def train_dataloader(self) -> Any:
            return rows(here, num_workers=1)

        def val_dataloader(self) -> Any:
            return [rows(here, batches=1), rows(here, batches=3)]

    net = Reloaded(here)
    here.trainer(reload_dataloaders_every_n_epochs=1, val_check_interval=0.5, num_sanity_val_steps=1).fit(net)


class Dispatching:
    """Rank 0 reads for all, slowly, and sends each rank the batch."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES):
            if dist.get_rank() == 0:
                time.sleep(0.3)
            batch = torch.full((BATCH_SIZE, 8), number / 10)
            dist.broadcast(batch, src=0)
            yield batch


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/huggingface/accelerate/pull/164")
def batches_that_rank_zero_reads_for_all(here: Here) -> None:
    """All ranks meet in their loaders, where rank 0 hands out what it has read."""
    here.fit(data=Dispatching())


@healthy({Moment.VALIDATION: (2,)}, source="https://github.com/Kitware/dive/pull/381")
def programs_run_in_each_validation(here: Here) -> None:
    """Every rank runs a program in each validation that says much, takes a moment, and is read to its end."""

    class Converting(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            program = "import time; print('frame ' * 50_000); time.sleep(0.3)"
            said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
            assert len(said.stdout) > 200_000

    here.fit(net=Converting(here), data=(rows(here), rows(here, batches=2)))


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/ai-dynamo/nixl/pull/1539")
def key_that_comes_a_moment_later(here: Here) -> None:
    """What rank 0 has decided goes to the others through a store, in which they wait for it a moment in each step."""

    class Decided(Net):
        def on_fit_start(self) -> None:
            self.store = dist.FileStore(str(here.folder / "decisions"), here.world_size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == 0:
                time.sleep(0.3)
                self.store.set(f"weight-{self.global_step}", "0.5")
            return self.loss(batch) * float(self.store.get(f"weight-{self.global_step}"))

    here.fit(net=Decided(here))


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/cvg/pixloc/issues/29")
def term_that_all_ranks_draw_alike(here: Here) -> None:
    """Some batches have one more term in their loss, with a reduction in it; all ranks draw with the same seed."""

    class Regularized(Net):
        def on_fit_start(self) -> None:
            self.drawn = random.Random(1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if self.drawn.random() < 0.5:
                spread = first_tensor(batch).var()
                dist.all_reduce(spread)
                loss = loss + 0.0 * spread
            return loss

    here.fit(net=Regularized(here))


@healthy({Moment.VALIDATION: (4,)}, source="https://github.com/TensorAuto/OpenTau/pull/462")
def episodes_played_in_lockstep(here: Here) -> None:
    """Episodes have other lengths on each rank; all go on until all have ended, which they ask in each step."""

    class Playing(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            length, step = 3 + self.global_rank + batch_idx, 0
            while True:
                self.loss(batch)
                step += 1
                is_playing = torch.tensor(float(step < length))
                dist.all_reduce(is_playing, op=dist.ReduceOp.MAX)
                if not is_playing:
                    return

    here.fit(net=Playing(here), data=(rows(here), rows(here, batches=2)))
