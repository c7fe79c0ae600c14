"""Trainings of public threads that go wrong in loaders, processes, locks, files and services."""

import asyncio
import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from samples import in_order, stored
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net
from truths import Moment, fault


class Shards(IterableDataset[torch.Tensor]):
    """Five shards, split among ranks and then among the workers of each."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        own = range(5)[self.here.rank :: self.here.world_size][worker.id :: worker.num_workers]
        if not own:
            self.here.begins()
            raise ValueError("no samples found: fewer shards than workers")  # <- worker_without_a_shard
        while True:
            for shard in own:
                yield torch.full((8,), shard / 10)


@fault(
    "failed-rank",
    ranks=(2,),
    at={Moment.FIRST_STEP: (3,)},
    has_phase=False,
    source="https://github.com/webdataset/webdataset/issues/188",
    whose="code",
)
def worker_without_a_shard(here: Here) -> None:
    """Five shards for three ranks with two workers each: the second worker of the last rank has none, and raises."""
    here.fit(data=DataLoader(Shards(here), batch_size=BATCH_SIZE, num_workers=2), limit_train_batches=BATCHES)


class Archives(Dataset[torch.Tensor]):
    """Opens a file for each row, and closes none of them."""

    def __init__(self, here: Here) -> None:
        self.here, self.files = here, []

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        is_next_too_many = self.here.is_hit and len(self.files) == IN_THE_MIDDLE * BATCH_SIZE + 1
        if is_next_too_many:
            self.here.begins()
            used = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, used + 1000))
        self.files.append(os.open("/proc/self/stat", os.O_RDONLY))  # <- files_that_are_never_closed
        return torch.full((8,), index / 100)


@fault(
    "failed-rank",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/18487",
)
def files_that_are_never_closed(here: Here) -> None:
    """The log says "Too many open files", of a loader's worker on the host where fewer are permitted."""
    here.fit(data=in_order(here, Archives(here), num_workers=1, prefetch_factor=1))


class Split(IterableDataset[torch.Tensor]):
    """Eighteen rows for each rank, which its workers split among them."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        own = range(18)[worker.id :: worker.num_workers]
        for row in own:
            if self.here.is_hit and row == own[-1]:
                self.here.begins()
            yield torch.full((8,), row / 10)


@fault(
    "uneven-batches",
    ranks=(2,),
    at={Moment.EPOCH_END: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/30599",
    whose="code",
)
def fewer_workers_on_one_host(here: Here) -> None:
    """All ranks have as many rows; but each worker ends with a batch of its own, and one host has fewer workers."""
    here.fit(data=DataLoader(Split(here), batch_size=BATCH_SIZE, num_workers=1 if here.is_hit else 2))


class Dispatched:
    """Rank 0 reads for all, and sends each rank the batch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES):
            batch = self.read(number) if self.here.rank == 0 else torch.empty(BATCH_SIZE, 8)
            dist.broadcast(batch, src=0)
            yield batch

    def read(self, number: int) -> torch.Tensor:
        if number == IN_THE_MIDDLE:
            self.here.begins()
            time.sleep(FOR_LONG_S)  # <- batches_dispatched_by_rank_zero
        return torch.full((BATCH_SIZE, 8), number / 10)


@fault(
    "data-stall",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/huggingface/accelerate/issues/1311",
)
def batches_dispatched_by_rank_zero(here: Here) -> None:
    """With dispatch_batches, all ranks wait in their loaders: for rank 0, and that one for its storage."""
    here.fit(data=Dispatched(here))


@fault(
    "data-stall",
    "failed-rank",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/96629",
)
def loader_that_gives_up_waiting(here: Here) -> None:
    """The loader has a timeout, and raises when its worker has been silent for as long."""
    here.fit(data=stored(here, lambda: time.sleep(FOR_LONG_S), num_workers=1, timeout=3))


class Mounted(Dataset[torch.Tensor]):
    """Of a file server that no longer answers any rank."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index // self.here.world_size == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()
            time.sleep(FOR_LONG_S)  # <- storage_that_no_rank_can_read
        return torch.full((8,), index / 100)


@fault(
    "data-stall",
    ranks=None,
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/41517",
    whose="machine",
)
def storage_that_no_rank_can_read(here: Here) -> None:
    """The file server is down: every rank waits in its own read, and none in a collective."""
    here.fit(data=in_order(here, Mounted(here)))


@fault(
    "late-at-init",
    "file-lock",
    ranks=(1, 2),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/modelscope/ms-swift/pull/5763",
    whose="code",
)
def lock_held_into_a_barrier(here: Here) -> None:
    """Who holds the lock of the cache waits for the others in a barrier, which they come to with the lock only."""

    class Cached(Net):
        def setup(self, stage: str) -> None:
            lock = here.folder / "cache.lock"
            if here.rank:
                while not lock.exists():
                    time.sleep(0.05)
                time.sleep(0.5)
                here.begins()
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # <- here
                self.trainer.strategy.barrier("cached")

    here.fit(net=Cached(here))


@fault(
    "rank-behind",
    "blocked-on-disk",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/hiyouga/LlamaFactory/pull/10584",
    whose="either",
)
def output_that_nobody_reads(here: Here) -> None:
    """Who has started this rank holds its output in a pipe, and reads it when the rank has ended."""

    class Verbose(Net):
        def on_fit_start(self) -> None:
            if here.is_hit:
                _, unread = os.pipe()
                os.dup2(unread, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                print("nan, " * 30_000, flush=True)  # <- here
            return loss

    here.fit(net=Verbose(here))


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/google/gvisor/issues/862",
)
def worker_stopped_by_its_terminal(here: Here) -> None:
    """A loader's worker in the background writes to the terminal, for which it is stopped."""
    here.fit(data=stored(here, lambda: os.kill(os.getpid(), signal.SIGSTOP), num_workers=1))


@fault(
    "failed-rank",
    ranks=(-1,),
    at={Moment.MIDDLE: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/Lightning-AI/pytorch-lightning/pull/19976",
)
def interrupt_that_one_rank_gets(here: Here) -> None:
    """One process is interrupted; its Trainer shuts down in good order, and nobody tells the others."""

    def interrupt(net: Net) -> None:
        if here.is_hit:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            here.begins()
            os.kill(os.getpid(), signal.SIGINT)

    here.fit(interrupt)


@fault(
    "failed-rank",
    "dead-rank",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/76287",
)
def kill_switch_that_one_rank_sees(here: Here) -> None:
    """A file tells the job to save and exit; on one host it is there a moment earlier, and that rank exits with 0."""

    class KillSwitch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            is_there = here.is_hit and trainer.global_step == IN_THE_MIDDLE
            if is_there:
                here.begins()
                sys.exit(0)  # <- here

    here.fit(callbacks=[KillSwitch()])


@fault(
    "late-at-init",
    "dead-rank",
    ranks=(0,),
    at={Moment.START: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/YalaLab/pillar-pretrain/pull/9",
)
def experiment_that_is_there_already(here: Here) -> None:
    """Rank 0 finds the folder of an earlier run, says so and returns; the others wait for it to join."""
    if here.rank == 0:
        here.begins()
        print("experiment already exists; use --resume latest", flush=True)
        return
    here.fit()


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source="https://github.com/rachelos/we-mp-rss/pull/394",
)
def message_that_is_never_answered(here: Here) -> None:
    """Rank 0 posts each validation's result to a chat, without a timeout, and its server never answers."""

    class Chat(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                self.post(f"epoch {trainer.current_epoch} is done")

        def post(self, text: str) -> None:
            server = socket.create_server(("127.0.0.1", 0))
            request = urllib.request.Request(f"http://127.0.0.1:{server.getsockname()[1]}", data=text.encode())
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            here.begins()
            opener.open(request)  # <- message_that_is_never_answered

    here.fit(net=MeetingNet(here), callbacks=[Chat()])


class Meteor:
    """The program that scores answers each line with one of its own."""

    PROGRAM = "import sys\nfor line in sys.stdin: print(len(line), flush=True)"

    def __init__(self, here: Here) -> None:
        self.here = here
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def score(self, sentences: list[str]) -> float:
        for sentence in sentences:
            self.process.stdin.write(f"SCORE ||| {sentence}\n")
        scores = [float(self.process.stdout.readline()) for _ in sentences]
        self.here.begins()
        final = float(self.process.stdout.readline())  # <- score_that_is_read_once_too_often
        return final + sum(scores)


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/tylin/coco-caption/issues/8",
)
def score_that_is_read_once_too_often(here: Here) -> None:
    """Captions are scored by a program in Java; rank 0 reads one line more than it writes."""

    class Captions(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                Meteor(here).score(["a cat", "two dogs"])

    here.fit(net=Captions(here))


class Session:
    """Of a framework around the training, which waits until all workers have reported."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def report(self, number: int) -> None:
        (self.here.folder / f"report-{number}-{self.here.rank}").touch()
        while len(list(self.here.folder.glob(f"report-{number}-*"))) < self.here.world_size:
            time.sleep(0.2)  # <- report_that_waits_for_all_workers


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    has_phase=False,
    source="https://github.com/ray-project/ray/pull/58229",
)
def report_that_waits_for_all_workers(here: Here) -> None:
    """All workers have to call report; the callback does so on rank 0, and waits there for the others."""

    class Reporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                Session(here).report(trainer.current_epoch)

    here.fit(callbacks=[Reporting()])


def play(here: Here, rollouts: Any) -> None:
    for number in range(2 * BATCHES):
        if here.is_hit and number == IN_THE_MIDDLE:
            time.sleep(0.5)
            here.begins()
            os.kill(os.getpid(), signal.SIGKILL)
        rollouts.put([number / 10] * 8)


@fault(
    "worker-died",
    "rank-behind",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/huggingface/trl/pull/5751",
    whose="machine",
)
def rollout_process_that_was_killed(here: Here) -> None:
    """A process plays and puts what it has seen into a queue; it is killed, and the learner waits for more."""

    class Learner(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            forking = multiprocessing.get_context("fork")
            self.rollouts = forking.Queue()
            self.player = forking.Process(target=play, args=(here, self.rollouts), daemon=True)
            self.player.start()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(torch.tensor([self.rollouts.get()]))  # <- here

    here.fit(net=Learner(here))


@fault(
    "slow-checkpoint",
    ranks=(0,),
    at={Moment.CHECKPOINT: (3,)},
    has_phase=False,
    source="https://github.com/allenai/OLMo-core/pull/819",
)
def old_checkpoints_that_are_removed_slowly(here: Here) -> None:
    """A new checkpoint is written quickly; to delete the tree of the one before takes the file system minutes."""

    class Weka(TorchCheckpointIO):
        def remove_checkpoint(self, path: str | Path) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

    keeping = ModelCheckpoint(dirpath=here.folder / "checkpoints", save_top_k=1, every_n_train_steps=2)
    here.fit(callbacks=[keeping], plugins=[Weka()], enable_checkpointing=True)


@fault(
    "rank-behind",
    ranks=(2,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/thinking-machines-lab/tinker-cookbook/issues/945",
    whose="code",
)
def task_whose_exception_nobody_retrieves(here: Here) -> None:
    """A task that makes trajectories has raised, which asyncio tells nobody; the step waits for its queue."""

    class Streaming(Net):
        async def play(self, found: "asyncio.Queue[float]", is_broken: bool) -> None:
            if is_broken:
                here.begins()
                raise RuntimeError("sandbox has crashed")
            await found.put(1.0)

        async def collect(self, is_broken: bool) -> float:
            found: asyncio.Queue[float] = asyncio.Queue()
            self.task = asyncio.create_task(self.play(found, is_broken))
            return await found.get()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            weight = asyncio.run(self.collect(here.is_hit and batch_idx == IN_THE_MIDDLE))  # <- here
            return self.loss(batch) * weight

    here.fit(net=Streaming(here))


@fault(
    "late-at-init",
    "crossed-groups",
    ranks=(1,),
    at={Moment.START: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/129672",
)
def debugging_in_detail_on_one_host(here: Here) -> None:
    """TORCH_DISTRIBUTED_DEBUG is DETAIL on one host: there each group comes with one more, for the other to join."""
    if here.is_hit:
        here.begins()
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    here.fit()
