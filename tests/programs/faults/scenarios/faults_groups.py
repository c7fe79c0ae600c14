"""Groups of ranks that are entered in another order, or that do not wait for as long as the strategy says."""

import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from training import Here, Net
from truths import Moment, fault


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


@fault("timeout-misuse", ranks=(), at={Moment.MIDDLE: (2, 3)}, **OWN_TIMEOUT, whose="code")
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


@fault("timeout-misuse", ranks=(), at={Moment.START: (2,)}, **OWN_TIMEOUT, whose="code")
def barrier_with_a_timeout_of_its_own(here: Here) -> None:
    class Prepared(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            group = dist.new_group(group_desc="preparation")
            here.begins()
            if here.rank == 1:
                time.sleep(8)
            dist.monitored_barrier(group, timeout=timedelta(seconds=3))

    here.fit(callbacks=[Prepared()], strategy=here.strategy(suspect_after=20.0))


@fault("crossed-groups", ranks=(-1,), at={Moment.START: (3,)}, has_phase=False)
def group_of_some_in_an_earlier_hook(here: Here) -> None:
    """Which its members alone have made; the next one, of all ranks, has another number on them."""

    class Exchanging(Net):
        def setup(self, stage: str) -> None:
            if self.global_rank < 2:
                self.pair = dist.new_group([0, 1])  # <- here

        def on_train_start(self) -> None:
            here.begins()
            self.everybody = dist.new_group()

    here.fit(net=Exchanging(here))
