"""Round 20 after public threads: what users of sharded models report, of groups, stages, samples and workers."""

import os
import signal
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import Shares, sharded
from samples import in_order
from threads import goes_wrong
from training import BATCH_SIZE, Here, Net, first_tensor, rows
from truths import Moment


def clip_(parameters: Iterable[torch.nn.Parameter], limit: float) -> torch.Tensor:
    """Scales gradients, of which each rank has its own, so that the norm over all ranks is within the limit."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)  # <- norm_of_an_expert_that_had_nothing_to_do
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient.mul_((limit / norm).clamp(max=1.0))
    return norm


class Local(Net):
    """Each rank has an expert of its own, for rows that begin with a positive number."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.expert = torch.nn.Linear(8, 8)

    def routed(self, batch: torch.Tensor) -> torch.Tensor:
        hit = batch[:, 0] > 0
        if not hit.any():
            return batch
        return torch.where(hit[:, None], self.expert(batch), batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.routed(first_tensor(batch)))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip_(self.expert.parameters(), 1.0)


class Elsewhere(Shares):
    """In one batch no row is for the expert."""

    def unusual(self, number: int) -> torch.Tensor:
        return -self.usual(number)


@sharded(
    "https://github.com/NVIDIA/Model-Optimizer/pull/1621",
    "diverged-collectives",
    ranks=(3,),
    world_size=4,
)
def norm_of_an_expert_that_had_nothing_to_do(here: Here) -> None:
    """One rank has no gradient of its expert and returns early, and the others sum up the norm of all experts."""
    here.fit(net=Local(here), data=in_order(here, Elsewhere(here)))


class Incomplete(Shares):
    """In one batch, a row has no answers."""

    def unusual(self, number: int) -> torch.Tensor:
        return self.usual(number) * (number != 2)


class Redistributed(Net):
    """Deals out the rows of all ranks anew before each step, or leaves them where they are if a rank cannot."""

    def gathered(self, batch: torch.Tensor) -> list[torch.Tensor]:
        if not batch.any(dim=1).all():
            raise ValueError("a group is incomplete")
        everything = [torch.empty_like(batch) for _ in range(self.trainer.world_size)]
        dist.all_gather(everything, batch)
        return everything

    def redistributed(self, batch: torch.Tensor) -> torch.Tensor:
        failed, mine = torch.tensor(0), batch
        try:
            mine = torch.stack(self.gathered(batch))[:, self.global_rank % BATCH_SIZE]
        except ValueError as reason:  # <- group_that_is_incomplete_on_one_rank
            print(f"Rank {self.global_rank} cannot redistribute: {reason}", flush=True)
            failed += 1
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        return batch if failed else mine

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.redistributed(first_tensor(batch)))


@sharded("https://github.com/areal-project/AReaL/pull/1563", "diverged-collectives")
def group_that_is_incomplete_on_one_rank(here: Here) -> None:
    """One rank raises before all ranks gather, catches that, and asks whether any has failed, as nobody else does."""
    here.fit(net=Redistributed(here), data=in_order(here, Incomplete(here)))


class Growing(Shares):
    """Its worker says which process it is, and keeps what nobody collects."""

    def usual(self, number: int) -> torch.Tensor:
        (self.here.folder / f"worker-{self.here.rank}").write_text(str(os.getpid()))
        return super().usual(number)

    def unusual(self, number: int) -> torch.Tensor:
        return self.usual(number)


class Full(L.Callback):
    """Does what the kernel does when a host has no memory left: it kills a worker of the loader."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            os.kill(int((self.here.folder / f"worker-{self.here.rank}").read_text()), signal.SIGKILL)


@sharded(
    "https://github.com/facebookresearch/dinov3/issues/150",
    "worker-died",
    ranks=(3,),
    world_size=4,
    has_line=False,
)
def worker_that_has_grown_too_large(here: Here) -> None:
    """A worker has taken more and more memory, and the kernel of its host kills it."""
    data = in_order(here, Growing(here), num_workers=1, prefetch_factor=1)
    here.fit(data=data, callbacks=[Full(here)])


class Schedule:
    """One stage of a pipeline: the first one has batches, the last one has targets, and those between have neither."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.is_first, self.is_last = rank, rank == 0, rank == ranks - 1

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        batches = list(rows.split(2)) if self.is_first else None
        targets = list(rows.split(2)) if self.is_last else None
        count = len(batches or targets or [])  # <- stage_that_knows_of_no_batches
        for number in range(count):
            if batches:
                handed = batches[number].contiguous()
            else:
                handed = torch.empty(2, rows.shape[1])
                dist.recv(handed, self.rank - 1)
            if not self.is_last:
                dist.send(handed, self.rank + 1)
        return rows


@sharded(
    "https://github.com/ooples/AiDotNet.Tensors/pull/266",
    "unmatched-p2p",
    moment=Moment.FIRST_STEP,
)
def stage_that_knows_of_no_batches(here: Here) -> None:
    """The stage in the middle takes the number of batches from what it has none of, and receives and sends nothing."""

    class Staged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.is_hit:
                here.begins()
            return self.loss(Schedule(here.rank, here.world_size).run(first_tensor(batch)))

    here.fit(net=Staged(here))


class Measured(Net):
    """Keeps the lengths of answers that are long enough, and looks at those of all ranks after validation."""

    lengths: list[float]

    def on_validation_epoch_start(self) -> None:
        self.lengths = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)
        self.lengths += [length for length in first_tensor(batch)[:, 0].tolist() if length > 0]

    def gathered(self, lengths: torch.Tensor) -> torch.Tensor:
        everywhere = [torch.zeros_like(lengths) for _ in range(self.trainer.world_size)]
        dist.all_gather(everywhere, lengths)  # <- lengths_of_answers_that_were_kept
        return torch.cat(everywhere)

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.log("length", self.gathered(torch.tensor(self.lengths)).mean())


class Short(Shares):
    """In one batch, most answers are empty."""

    def unusual(self, number: int) -> torch.Tensor:
        return self.usual(number) * (number == 0)


@sharded(
    "https://github.com/verl-project/verl-ascend-recipe/pull/43",
    "mismatched-collective",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def lengths_of_answers_that_were_kept(here: Here) -> None:
    """Lengths of all ranks are gathered as if there were equally many; one rank has left out empty answers."""
    here.fit(net=Measured(here), data=(rows(here), in_order(here, Short(here))))
