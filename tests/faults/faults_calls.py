"""Ranks that call different collectives, in another order, or wait for them for too short a time."""

import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torchmetrics import MeanMetric
from training import Here, Net, rows
from truths import Moment, fault


@fault("unpresented-loader", ranks=(1,), at={Moment.START: (2,)}, has_phase=False)
def steps_estimated_on_rank_zero(here: Here) -> None:
    class Estimating(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            if self.global_rank == 0:
                here.begins()
                _ = self.trainer.estimated_stepping_batches  # <- here
            return super().configure_optimizers()

    here.fit(net=Estimating(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (3,), Moment.EPOCH_END: (2, 3)})
def barrier_on_rank_zero(here: Here) -> None:
    def meet(net: Net) -> None:
        if net.global_rank == 0:
            here.begins()
            dist.barrier()  # <- here

    here.fit(meet)


@fault("diverged-collectives", ranks=(-1,), at={Moment.FIRST_STEP: (3,), Moment.MIDDLE: (3, 4)})
def other_collective_in_a_branch(here: Here) -> None:
    """A branch that depends on the data, not on the rank."""

    def gather(net: Net) -> None:
        if here.is_hit:
            here.begins()
            dist.broadcast(torch.ones(7), src=0)  # <- here
        else:
            dist.all_gather([torch.ones(3) for _ in range(here.world_size)], torch.ones(3))

    here.fit(gather)


@fault("diverged-collectives", ranks=(-1,), at={Moment.MIDDLE: (3,)}, has_line=False)
def collective_skipped_after_an_exception(here: Here) -> None:
    def average(net: Net) -> None:
        try:
            if here.is_hit:
                here.begins()
                raise ValueError("no faces in this image")
            dist.all_reduce(torch.ones(5))
        except ValueError:
            pass

    here.fit(average)


@fault("diverged-collectives", ranks=(0,), at={Moment.EPOCH_END: (2, 3)})
def metric_computed_on_rank_zero(here: Here) -> None:
    class Measured(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                self.mean.compute()  # <- here

    here.fit(net=Measured(here))


@fault("diverged-collectives", ranks=(0,), at={Moment.MIDDLE: (2, 3)})
def log_dir_on_rank_zero(here: Here) -> None:
    """A property that broadcasts."""

    def show(net: Net) -> None:
        if net.trainer.is_global_zero:
            here.begins()
            print(net.trainer.log_dir)  # <- here

    here.fit(show)


@fault("diverged-collectives", ranks=(-1,), at={Moment.EPOCH_END: (3, 4)})
def objects_gathered_on_one_rank(here: Here) -> None:
    def gather(net: Net) -> None:
        if here.is_hit:
            here.begins()
            dist.all_gather_object([None] * here.world_size, {"faces": 3})  # <- here

    here.fit(gather)


@fault("diverged-collectives", "rank-zero-only-work", ranks=(0,), at={Moment.END: (2,)}, has_phase=False)
def validation_after_training_on_rank_zero(here: Here) -> None:
    """With a Trainer of its own, of which the others know nothing: they have finished."""

    class Thorough(L.Callback):
        def on_fit_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            trainer.strategy.barrier("before")
            if trainer.is_global_zero:
                here.begins()
                here.trainer(strategy=here.strategy()).validate(Net(here), rows(here))  # <- here

    here.fit(callbacks=[Thorough()], max_epochs=1)


@fault(
    "mismatched-collective", ranks=(-1,), at={Moment.FIRST_STEP: (3,), Moment.MIDDLE: (3, 4), Moment.EPOCH_END: (3,)}
)
def tensors_of_unequal_length(here: Here) -> None:
    """Features of all samples of a batch, of which one rank has fewer."""

    def average(net: Net) -> None:
        here.begins()
        dist.all_reduce(torch.ones(1_000_000 if here.is_hit else 2_000_000))  # <- here

    here.fit(average)


@fault("mismatched-collective", ranks=(-1,), at={Moment.MIDDLE: (3,)})
def tensors_of_another_type(here: Here) -> None:
    def average(net: Net) -> None:
        here.begins()
        ones = torch.ones(500_000, dtype=torch.float64 if here.is_hit else torch.float32)
        dist.all_reduce(ones)  # <- here

    here.fit(average)


@fault("mismatched-collective", ranks=None, at={Moment.MIDDLE: (2,)})
def gathered_tensors_of_unequal_length(here: Here) -> None:
    def gather(net: Net) -> None:
        here.begins()
        mine = torch.ones(300_000 * (1 + here.rank))
        dist.all_gather([torch.empty_like(mine) for _ in range(here.world_size)], mine)  # <- here

    here.fit(gather)


@fault("crossed-groups", ranks=None, at={Moment.MIDDLE: (2,), Moment.EPOCH_END: (2,)}, has_line=False)
def groups_in_another_order(here: Here) -> None:
    def reduce(net: Net) -> None:
        groups = [dist.new_group(group_desc=name) for name in ("experts", "shards")]
        here.begins()
        for group in groups if here.rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(4), group=group)

    here.fit(reduce)


@fault("crossed-groups", ranks=None, at={Moment.MIDDLE: (3,)}, has_line=False)
def ring_of_groups(here: Here) -> None:
    """Each rank waits for its neighbour in the group of the two, all the way round."""

    def reduce(net: Net) -> None:
        pairs = [(0, 1), (1, 2), (0, 2)]
        groups = [dist.new_group(list(pair), group_desc=f"pair {pair}") for pair in pairs]
        here.begins()
        first = groups[{0: 0, 1: 1, 2: 2}[here.rank]]
        dist.all_reduce(torch.ones(4), group=first)

    here.fit(reduce)


# One rank may take its time, for the strategy's timeout is long; what fails has a timeout of its own. Whose fault that
# is cannot be said: every rank has made the group with it.
OWN_TIMEOUT = {"has_line": False, "has_phase": False, "has_ranks": False}


@fault("timeout-misuse", ranks=(), at={Moment.MIDDLE: (2, 3)}, **OWN_TIMEOUT)
def group_with_a_timeout_of_its_own(here: Here) -> None:
    class Grouped(Net):
        def on_train_start(self) -> None:
            self.group = dist.new_group(timeout=timedelta(seconds=3), group_desc="metrics")

    def reduce(net: Any) -> None:
        here.begins()
        if here.rank == 0:
            time.sleep(8)
        dist.all_reduce(torch.ones(4), group=net.group)

    here.fit(reduce, net=Grouped(here), strategy=here.strategy(suspect_after=20.0))


@fault("timeout-misuse", ranks=(), at={Moment.START: (2,)}, **OWN_TIMEOUT)
def barrier_with_a_timeout_of_its_own(here: Here) -> None:
    class Prepared(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            group = dist.new_group(group_desc="preparation")
            here.begins()
            if here.rank == 1:
                time.sleep(8)
            dist.monitored_barrier(group, timeout=timedelta(seconds=3))

    here.fit(callbacks=[Prepared()], strategy=here.strategy(suspect_after=20.0))
