"""Round 12 after public threads: what users of Lightning do that looks odd, and of which nothing is to be said."""

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_12_lightning import LIGHTNING
from lightning.fabric.utilities.throughput import measure_flops
from samples import in_order
from threads import quiet
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, Net, rows
from truths import Moment


@quiet(f"{LIGHTNING}/pull/18848", world_size=3, moment=Moment.START)
def operations_counted_in_a_backward_pass_of_the_first_rank(here: Here) -> None:
    """The first rank calls a part of the model and goes back through it, which exchanges nothing."""

    class Measured(LoggingNet):
        def on_train_start(self) -> None:
            if self.trainer.is_global_zero:
                values = torch.rand(BATCH_SIZE, 8)
                count = measure_flops(self.layers, lambda: self.layers(values), lambda result: result.sum())
                time.sleep(1.5)
                print(f"{count} operations", flush=True)
                self.zero_grad()

    here.fit(net=Measured(here))


class Spiked(Dataset[torch.Tensor]):
    """Rows of which those of one batch of one rank are very large."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_large = rank == 1 and turn // BATCH_SIZE == IN_THE_MIDDLE
        return torch.linspace(0.1, 0.8, 8) * (1000.0 if is_large else 1.0)


@quiet(f"{LIGHTNING}/issues/16084", world_size=3)
def norm_logged_where_it_was_clipped(here: Here) -> None:
    """The norm of what DDP has averaged is the same on all ranks, and so all of them log it, in one step of many."""

    class Clipped(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 100.0)
            if norm > 100.0:
                time.sleep(0.5 * self.global_rank)
                self.log("clipped", norm, on_step=True, on_epoch=True, sync_dist=True)

    here.fit(net=Clipped(here), data=in_order(here, Spiked(here)))


@quiet(f"{LIGHTNING}/issues/8395", world_size=2)
def trials_that_fail_on_all_ranks(here: Here) -> None:
    """Each trial has a Trainer of its own; all ranks agree that the first one diverges, and go on to the next."""

    class Trial(Net):
        def __init__(self, here: Here, rate: float) -> None:
            super().__init__(here)
            self.rate = rate

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            mean: Any = self.trainer.strategy.reduce(loss.detach().clone())
            if not torch.isfinite(mean) or (batch_idx == IN_THE_MIDDLE and self.rate > 1):
                raise FloatingPointError(f"the rate {self.rate} is too high")
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    for rate in (1e3, 0.01, 0.001):
        try:
            here.trainer(max_epochs=2).fit(Trial(here, rate), rows(here))
        except FloatingPointError as error:
            print(f"next trial: {error}", flush=True)


class Positions(L.LightningDataModule):
    """Puts how many batches each rank has read into the checkpoint, for which all ranks tell one another."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.read = 0

    def train_dataloader(self) -> Any:
        return rows(self.here)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.read += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.7 * self.here.rank)
        positions: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(positions, self.read)
        return {"read": positions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["read"][self.here.rank]


@quiet(f"{LIGHTNING}/issues/14241", world_size=3, moment=Moment.CHECKPOINT)
def positions_gathered_while_a_checkpoint_is_put_together(here: Here) -> None:
    """Ranks exchange objects within a save, some of them later, and each continues from its own."""
    path = here.folder / "first.ckpt"
    trainer = here.trainer(max_epochs=1)
    trainer.fit(LoggingNet(here), Positions(here))
    trainer.save_checkpoint(path)
    here.trainer(max_epochs=2).fit(LoggingNet(here), Positions(here), ckpt_path=path)
