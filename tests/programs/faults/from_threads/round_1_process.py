"""Trainings of public threads that go wrong by what a process is: its messages, threads, signals and memory."""

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from training import BATCH_SIZE, FOR_LONG_S, Here, MeetingNet, Net, rows
from truths import Moment, fault


@fault(
    "crossed-groups",
    ranks=None,
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/pull/11275",
)
def everybody_sends_before_anybody_receives(here: Here) -> None:
    """Queues of negatives go round: each rank sends to its neighbour first, and only then listens."""

    def pass_on(net: Net) -> None:
        ours, theirs = torch.ones(1_000_000), torch.empty(1_000_000)
        here.begins()
        dist.send(ours, dst=(here.rank + 1) % here.world_size)  # <- here
        dist.recv(theirs, src=(here.rank - 1) % here.world_size)

    here.fit(pass_on)


@fault(
    "crossed-groups",
    "unmatched-p2p",
    ranks=(0, 1),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/pytorch/gloo/issues/308",
)
def microbatches_that_are_numbered_differently(here: Here) -> None:
    """Two stages of a pipeline tag what they send by the number of the microbatch; one of them counts from one."""

    class Staged(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                here.begins()
                self.hand_over()

        def hand_over(self) -> None:
            parts = [torch.ones(1000) * part for part in range(3)]
            if here.rank == 0:
                works = [dist.isend(one, dst=1, tag=number) for number, one in enumerate(parts)]
            else:
                works = [dist.irecv(one, src=0, tag=number) for number, one in enumerate(parts, 1)]
            for work in works:
                work.wait()  # <- here

    here.fit(net=Staged(here))


@fault(
    "mismatched-collective",
    ranks=(-1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/NVIDIA/apex/pull/18",
)
def buckets_in_the_order_of_their_first_tensor(here: Here) -> None:
    """Statistics are reduced by type, and on one rank another type came first."""

    class Statistics(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step != 4:
                return
            seen = [torch.ones(50_000), torch.ones(300, dtype=torch.float64), torch.ones(20_000)]
            reduce_by_type(here, reversed(seen[:2]) if here.is_last else seen[:2])

    here.fit(callbacks=[Statistics()])


def reduce_by_type(here: Here, tensors: Iterable[torch.Tensor]) -> None:
    buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.dtype, []).append(tensor)
    here.begins()
    for bucket in buckets.values():
        dist.all_reduce(torch.cat(bucket))  # <- buckets_in_the_order_of_their_first_tensor


@fault(
    "diverged-collectives",
    "crossed-groups",
    ranks=(),
    at={Moment.START: (3,)},
    has_ranks=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/25390",
)
def group_that_only_its_members_make(here: Here) -> None:
    """Only those that are to be in a group make it; from then on ranks count groups differently, and none comes up."""

    class Paired(Net):
        def on_fit_start(self) -> None:
            members = [0, 1]
            if self.global_rank in members:
                self.pair = dist.new_group(members)  # <- here
            here.begins()
            self.everybody = dist.new_group()

    here.fit(net=Paired(here))


@fault(
    "timeout-misuse",
    ranks=(),
    at={Moment.EPOCH_END: (2,)},
    has_line=False,
    has_ranks=False,
    has_phase=False,
    source="https://github.com/Metta-AI/metta/pull/2043",
)
def group_that_gives_up_while_rank_zero_still_works(here: Here) -> None:
    """A group was made with a short limit so that nothing can hang; rank 0 needs a little longer than that."""

    class Scores(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            here.begins()
            if trainer.is_global_zero:
                time.sleep(1.8)
            scores = [None] * here.world_size
            dist.all_gather_object(scores, {"score": 0.5}, group=self.group)

    here.fit(callbacks=[Scores()])


@fault(
    "diverged-collectives",
    ranks=(2,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source="https://github.com/local-inference-lab/b12x/pull/147",
)
def gather_whose_exception_is_swallowed(here: Here) -> None:
    """What one rank has found cannot be pickled; the helper catches all, and goes on with the rank's own results."""

    class Boxed(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            found = {"boxes": [here.rank]}
            if here.is_hit:
                found["stream"] = (row for row in range(3))
            here.begins()
            self.boxes = gathered(found)

    here.fit(net=Boxed(here), data=(rows(here), rows(here)))


def gathered(mine: Any) -> list[Any]:
    everything = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everything, mine)  # <- gather_whose_exception_is_swallowed
    except Exception as error:
        print(f"could not gather, using local results: {error}")
        return [mine]
    return everything


@fault(
    "skipped-step",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/44353",
)
def batch_given_up_for_want_of_memory(here: Here) -> None:
    """One rank's batch does not fit; the exception is caught, the batch skipped, and the others wait in backward."""

    class Sparing(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            try:
                loss = self.padded_loss(batch, longest=10**15 if here.is_hit and batch_idx == 3 else 10)
            except RuntimeError as error:
                if "allocate memory" not in str(error):
                    raise
                here.begins()
                optimizer.zero_grad()
                return  # <- here
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        def padded_loss(self, batch: Any, longest: int) -> torch.Tensor:
            return self.loss(batch) + torch.zeros(longest).sum()

    here.fit(net=Sparing(here))


@fault(
    "diverged-collectives",
    ranks=(2,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/OpenNMT/OpenNMT-py/pull/2550",
)
def batch_repeated_in_halves(here: Here) -> None:
    """A batch that does not fit is done again in two halves, each with a backward pass that all ranks should share."""

    class Halving(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            try:
                self.fit_into_memory(batch_idx)
                self.manual_backward(self.loss(batch))
            except MemoryError:
                here.begins()
                for half in batch[0].chunk(2):
                    self.manual_backward(self.loss(half))  # <- here
            optimizer.step()

        def fit_into_memory(self, batch_idx: int) -> None:
            if here.is_hit and batch_idx == 3 and not self.current_epoch:
                bytearray(10**17)

    here.fit(net=Halving(here))


@fault(
    "stopped-early",
    ranks=(1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/20806",
)
def preemption_that_one_rank_is_told_of(here: Here) -> None:
    """The scheduler signals one task; its handler asks the Trainer to stop, and no other rank hears of it."""

    class Preempted(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            def stop(number: int, frame: Any) -> None:
                trainer.should_stop = True  # <- here

            signal.signal(signal.SIGUSR2, stop)

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if here.is_hit and trainer.global_step == 3:
                here.begins()
                os.kill(os.getpid(), signal.SIGUSR2)

    here.fit(callbacks=[Preempted()])


@fault(
    "dead-rank",
    ranks=(-1,),
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/8130",
    whose="code",
)
def decoder_that_reads_beyond_its_buffer(here: Here) -> None:
    """Native code crashes on one rank, in validation."""

    class Decoding(MeetingNet):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if here.is_hit and batch_idx == 1:
                here.begins()
                ctypes.string_at(8, 64)  # <- here
            super().validation_step(batch, batch_idx)

    here.fit(net=Decoding(here), data=(rows(here), rows(here)))


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/RadarML/red-rover/issues/23",
    whose="code",
)
def prefetching_thread_that_has_died(here: Here) -> None:
    """Batches are made in a thread; it raises, nobody looks, and the training waits for its queue."""
    here.fit(data=Prefetched(here))


class Prefetched:
    """Batches that a thread has made in advance."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.ready: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=1)
        threading.Thread(target=self.fill, daemon=True).start()
        while (batch := self.ready.get()) is not None:  # <- prefetching_thread_that_has_died
            yield batch

    def fill(self) -> None:
        for number in range(len(self)):
            if self.here.is_hit and number == 4:
                self.here.begins()
                raise FileNotFoundError("shard-4.tar")
            self.ready.put(torch.full((BATCH_SIZE, 8), number / 10))
        self.ready.put(None)


@fault(
    "rank-behind",
    "gc-pause",
    ranks=(2,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/delmic/odemis/pull/1952",
    whose="code",
)
def finalizer_that_waits_for_a_thread(here: Here) -> None:
    """An object in a cycle is found by the garbage collector, and its `__del__` joins a thread that never ends."""

    class Collecting(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if here.is_hit and batch_idx == 2:
                Subscription()
                here.begins()
            gc.collect()

    here.fit(net=Collecting(here))


class Subscription:
    """Listens in a thread of its own until it is told to stop."""

    def __init__(self) -> None:
        self.itself = self
        self.thread = threading.Thread(target=queue.Queue().get, daemon=True)
        self.thread.start()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.thread.join()  # <- finalizer_that_waits_for_a_thread


@fault(
    "rank-behind",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/tqdm/tqdm/issues/469",
    whose="code",
)
def lock_that_a_monitor_takes_twice(here: Here) -> None:
    """A thread holds the lock of all bars when one is finalized in it, which takes that lock; now nobody gets it."""

    class Bars(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            if here.is_hit and trainer.global_step == 3:
                monitor = threading.Thread(target=watch_bars, daemon=True)
                monitor.start()
                time.sleep(0.2)
                here.begins()
            with Bar.lock:  # <- here
                Bar.drawn += 1

    here.fit(callbacks=[Bars()])


class Bar:
    """A progress bar, one of several that share a terminal."""

    lock = threading.Lock()
    drawn = 0

    def __del__(self) -> None:
        with Bar.lock:
            Bar.drawn -= 1


def watch_bars() -> None:
    bar = Bar()
    with Bar.lock:
        del bar


@fault(
    "gil-held",
    ranks=(-1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/109074",
    whose="code",
)
def kernel_launched_with_the_gil_held(here: Here) -> None:
    """A binding calls into a library that blocks, without letting go of Python's lock."""
    library = ctypes.PyDLL(None)

    def launch(net: Net) -> None:
        if here.is_hit:
            here.begins()
            library.sleep(int(FOR_LONG_S))  # <- here

    here.fit(launch)


@fault(
    "at-breakpoint",
    ranks=(0,),
    at={Moment.MIDDLE: (4,)},
    source="https://github.com/pytorch/pytorch/pull/113775",
)
def breakpoint_of_torch_distributed(here: Here) -> None:
    """`torch.distributed.breakpoint()` was left in: rank 0 shows a prompt, the others wait in its barrier."""
    terminal, _ = os.openpty()
    os.dup2(terminal, 0)

    def debug(net: Net) -> None:
        here.begins()
        dist.breakpoint()  # <- here

    here.fit(debug)


@fault(
    "compile-skew",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/karpathy/nanochat/pull/722",
)
def length_that_only_one_rank_compiles(here: Here) -> None:
    """All have compiled in the first step; a batch of another length makes one rank compile again, for long."""

    def exported(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        if here.is_hit and any(one.shape[:1] == (3,) for one in inputs):
            here.begins()
            time.sleep(FOR_LONG_S)
        return graph.forward

    class Compiled(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.body = torch.compile(
                lambda values: self.layers(values).square().mean(), backend=exported, dynamic=False
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values = batch[0]
            if here.is_hit and batch_idx == 3:
                values = values[:3]
            return self.body(values)

    here.fit(net=Compiled(here))


@fault(
    "failed-rank",
    ranks=(0,),
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source="https://github.com/optuna/optuna/pull/2849",
    whose="code",
)
def trial_that_is_pruned_on_rank_zero(here: Here) -> None:
    """Only rank 0 knows the study: it raises `TrialPruned`, which the study catches, and begins the next trial."""

    class Pruning(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                raise TrialPruned("trial 0 was pruned at epoch 0")  # <- here

    try:
        here.fit(net=MeetingNet(here), data=(rows(here), rows(here)), callbacks=[Pruning()])
    except TrialPruned:
        here.fit(net=MeetingNet(here), data=(rows(here), rows(here)))


class TrialPruned(Exception):
    """As hyperparameter searches have it."""
