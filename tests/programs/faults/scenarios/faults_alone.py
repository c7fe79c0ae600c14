"""One rank does what the others do not, or takes longer: they wait for it in a collective."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from training import FOR_LONG_S, Here, MeetingNet, Net
from truths import Moment, fault

ALL = ("SafeDDP", "SafeModelParallel", "SafeFSDP")


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.FIRST_STEP: (2,), Moment.MIDDLE: (2, 3), Moment.EPOCH_END: (2, 4), Moment.VALIDATION: (2,)},
    strategies=ALL,
)
def evaluation_on_rank_zero(here: Here) -> None:
    def evaluate(net: Net) -> None:
        if net.trainer.is_global_zero:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    here.fit(evaluate)


@fault("rank-zero-only-work", ranks=(0,), at={Moment.EPOCH_END: (2, 3), Moment.MIDDLE: (2,)})
def early_return_of_the_others(here: Here) -> None:
    def score(net: Net) -> None:
        if not net.trainer.is_global_zero:
            return
        here.begins()
        compare(torch.rand(400, 400))

    def compare(images: torch.Tensor) -> None:
        end = time.monotonic() + FOR_LONG_S
        while time.monotonic() < end:
            torch.linalg.svdvals(images)  # <- here

    here.fit(score)


@fault("rank-zero-only-work", ranks=(0,), at={Moment.VALIDATION: (2, 3)})
def plot_in_a_callback(here: Here) -> None:
    class Plot(L.Callback):
        @rank_zero_only
        def on_validation_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    here.fit(callbacks=[Plot()])


@fault("rank-zero-only-work", ranks=(0,), at={Moment.EPOCH_END: (2,)}, has_phase=False)
def upload_at_the_end_of_training(here: Here) -> None:
    class Upload(L.Callback):
        def on_train_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    class Agree(L.Callback):
        """The next collective of all: what many put at the end."""

        def on_train_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            trainer.strategy.barrier("uploaded")

    here.fit(callbacks=[Upload(), Agree()], max_epochs=1)


@fault("unfinished-rank", ranks=(0,), at={Moment.END: (2, 3)}, has_phase=False, whose="code")
def export_after_the_end_of_training(here: Here) -> None:
    class Export(L.Callback):
        def on_fit_end(self, trainer: L.Trainer, net: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    here.fit(callbacks=[Export()], max_epochs=1)


@fault("unfinished-rank", ranks=(1,), at={Moment.END: (2,)}, has_phase=False, whose="code")
def teardown_that_never_ends(here: Here) -> None:
    class Pooled(Net):
        def teardown(self, stage: str) -> None:
            if here.is_hit:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here

    here.fit(net=Pooled(here), max_epochs=1)


@fault("at-breakpoint", ranks=(1,), at={Moment.MIDDLE: (2,), Moment.FIRST_STEP: (3,)})
def breakpoint_that_was_forgotten(here: Here) -> None:
    """The debugger of a rank that has no terminal of its own waits for a line that nobody types."""

    def look(net: Net) -> None:
        if here.is_hit:
            terminal, _ = os.openpty()
            os.dup2(terminal, 0)
            sys.stdin = os.fdopen(0)
            here.begins()
            breakpoint()  # <- here

    here.fit(look)


@fault("rank-zero-only-work", ranks=(2,), at={Moment.MIDDLE: (4,), Moment.EPOCH_END: (3,)})
def work_of_one_middle_rank(here: Here) -> None:
    def export(net: Net) -> None:
        if dist.get_rank() == 2:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    here.fit(export)


@fault(
    "rank-behind",
    ranks=(-1,),
    at={Moment.FIRST_STEP: (2, 3), Moment.MIDDLE: (2, 4), Moment.VALIDATION: (2, 3)},
    whose="code",
)
def large_sample_in_a_step(here: Here) -> None:
    def forward(net: Net) -> None:
        if here.is_hit:
            here.begins()
            images()

    def images() -> None:
        # From a server that answers this rank late.
        time.sleep(FOR_LONG_S)  # <- here

    net = MeetingNet(here)
    here.fit(forward, net=net)


@fault("rank-behind", ranks=(1,), at={Moment.MIDDLE: (2,), Moment.FIRST_STEP: (3,)}, whose="code")
def thread_that_is_waited_for(here: Here) -> None:
    """A pool of the user's that fetches negatives, and that nobody answers."""

    def fetch(net: Net) -> None:
        if here.is_hit:
            here.begins()
            pool.submit(time.sleep, FOR_LONG_S).result()  # <- here

    pool = ThreadPoolExecutor(1)
    here.fit(fetch)


@fault("rank-behind", ranks=(0,), at={Moment.MIDDLE: (2, 3)})
def slow_optimizer_step(here: Here) -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            if here.is_hit and net.global_step == 3:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here
            return found

    class SlowNet(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Slow(self.parameters(), lr=0.001)

    net = SlowNet(here)
    here.fit(net=net)


@fault("rank-behind", ranks=(1,), at={Moment.MIDDLE: (2,)}, whose="code")
def lock_of_a_thread_that_waits(here: Here) -> None:
    """A thread of the user's waits for more to write while it holds the lock."""
    lock, has_begun, may_end = threading.Lock(), threading.Event(), threading.Event()

    def write() -> None:
        with lock:
            has_begun.set()
            may_end.wait()

    def take(net: Net) -> None:
        if here.is_hit:
            here.begins()
            threading.Thread(target=write, daemon=True, name="writer").start()
            has_begun.wait()
        with lock:  # <- here
            pass

    here.fit(take)
