"""Round 16 after public threads: plain PyTorch that looks odd, and of which nothing is to be said."""

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from threads import quiet
from training import IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment


class Quantized(Net):
    """All ranks replace their codes where any of them has one that is no longer used."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.register_buffer("codes", torch.rand(2, 8))
        self.codes: torch.Tensor

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_mine = batch_idx % self.here.world_size == self.here.rank and batch_idx % 2 == 1
        is_expired = torch.tensor(float(is_mine), device=self.device)
        dist.all_reduce(is_expired, op=dist.ReduceOp.MAX)
        if is_expired:
            self.codes[0] = batch[0][0]
            dist.broadcast(self.codes, src=0)
        return self.loss(batch)


@quiet("https://github.com/espnet/espnet/pull/6284", world_size=3)
def codes_replaced_where_any_rank_has_to(here: Here) -> None:
    """Now this rank has a code that has expired and now that one; all hear of it, and get those of the first rank."""
    here.fit(net=Quantized(here))


class Slow:
    """Takes half a second to be unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        time.sleep(0.5)


class Gathered(L.Callback):
    """Gathers what was found in validation on the first rank."""

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        everyones: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object([Slow(trainer.global_rank)], everyones)
        if everyones is not None:
            print(f"found by {[found[0].number for found in everyones]}", flush=True)


@quiet("https://github.com/pytorch/pytorch/pull/150815", world_size=3, moment=Moment.VALIDATION)
def results_that_are_soon_unpickled(here: Here) -> None:
    """The first rank takes a second and a half to unpickle what all have found; others wait in their next step."""
    here.fit(net=LoggingNet(here), callbacks=[Gathered()])


class LocalSteps(Net):
    """Each rank makes steps by itself and leaves some out; weights are averaged after so many batches, not steps."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def average(self) -> None:
        weights = torch.nn.utils.parameters_to_vector(self.layers.parameters()).detach()
        dist.all_reduce(weights)
        torch.nn.utils.vector_to_parameters(weights / self.here.world_size, self.layers.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % self.here.world_size != self.here.rank:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            strategy: Any = self.trainer.strategy
            with strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
            optimizer.step()
            time.sleep(0.2 * self.here.rank)
        if batch_idx % IN_THE_MIDDLE == IN_THE_MIDDLE - 1:
            self.average()
        return None


@quiet("https://github.com/meta-pytorch/torchft/pull/47", world_size=2)
def averages_after_so_many_batches(here: Here) -> None:
    """Ranks make other steps, and one is slower in each; they meet to average after every third batch."""
    here.fit(net=LocalSteps(here))


class Agreed(Net):
    """Makes as many updates from a batch as the rank that has the fewest parts to learn from."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch[0].split(1 + (batch_idx + self.here.rank) % 4)
        fewest = torch.tensor(len(parts) if (batch_idx + self.here.rank) % 4 else 0, device=self.device)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        optimizer: Any = self.optimizers()
        for part in parts[: int(fewest)]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(part))
            optimizer.step()
        return None


@quiet("https://github.com/ray-project/ray/pull/66030", world_size=3)
def updates_that_all_learners_have_data_for(here: Here) -> None:
    """Ranks have other numbers of parts, and often one has none; they agree on the fewest, so that none waits."""
    here.fit(net=Agreed(here))
