"""Round 6 of trainings of public threads that go wrong: data, loggers, checkpoints, processes, debuggers."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net, first_tensor, rows
from truths import Moment


class Rows(Dataset[torch.Tensor]):
    """So many for all ranks together."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def is_first_of(self, batch: int, index: int) -> bool:
        """Whether it is the first row of this batch of the rank that is hit, as `in_order` splits them."""
        return index == self.here.case.ranks[0] + self.here.world_size * BATCH_SIZE * batch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 100)


class Quiet(Logger):
    """Does nothing with hyperparameters."""

    name = "quiet"
    version = 0

    def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass


@thread("https://github.com/Lightning-AI/litData/pull/846", "data-stall")
def chunk_that_the_quicker_worker_has_deleted(here: Here) -> None:
    """Two workers of a rank share a chunk; the quicker one has read its part and deletes it, the other waits for it."""
    chunk = here.folder / f"chunk-{here.rank}.bin"
    chunk.touch()

    class Chunked(Rows):
        def wait(self) -> None:
            while not chunk.exists():
                time.sleep(0.1)  # <- here

        def __getitem__(self, index: int) -> torch.Tensor:
            if self.is_first_of(IN_THE_MIDDLE - 1, index):
                chunk.unlink()
            if self.is_first_of(IN_THE_MIDDLE, index):
                time.sleep(0.5)
                here.begins()
                self.wait()
            return super().__getitem__(index)

    here.fit(data=in_order(here, Chunked(here), num_workers=2))


@thread(
    "https://github.com/NVIDIA/DALI/issues/1471",
    "uneven-batches",
    moment=Moment.EPOCH_END,
    has_line=False,
)
def pipeline_that_is_not_reset(here: Here) -> None:
    """Whether a pipeline starts again after an epoch is a setting, which one host does not have: no second epoch."""

    class Pipeline(IterableDataset[torch.Tensor]):
        def __init__(self, is_reset: bool) -> None:
            self.rows, self.is_reset = iter(range(BATCHES * BATCH_SIZE)), is_reset

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from (torch.full((8,), row / 100) for row in self.rows)
            if self.is_reset:
                self.rows = iter(range(BATCHES * BATCH_SIZE))
            else:
                here.begins()

    here.fit(data=DataLoader(Pipeline(is_reset=not here.is_hit), batch_size=BATCH_SIZE))


@thread("https://github.com/pytorch/torchtitan/pull/1627", "failed-rank")
def end_of_the_data_within_a_generator(here: Here) -> None:
    """The end of the documents is raised where a batch is put together, and a generator may not let it out."""

    class Packed(IterableDataset[torch.Tensor]):
        def documents(self) -> Iterator[torch.Tensor]:
            yield from torch.rand(14 if here.is_hit else 100, 8)
            here.begins()

        def __iter__(self) -> Iterator[torch.Tensor]:
            documents = self.documents()
            for _ in range(BATCHES):
                pack = []
                while len(pack) < BATCH_SIZE:
                    pack.append(next(documents))  # <- here
                yield torch.stack(pack)

    here.fit(data=DataLoader(Packed(), batch_size=None))


@thread("https://github.com/yassouali/pytorch-segmentation/issues/8", "failed-rank")
def last_sample_alone_in_its_batch(here: Here) -> None:
    """One rank's share has 21 rows: its last batch has a single one, of which no statistics can be made."""

    class Normed(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.norm = torch.nn.BatchNorm1d(8)

        def features(self, values: torch.Tensor) -> torch.Tensor:
            return self.norm(values)  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(first_tensor(batch)) == 1:
                here.begins()
            return self.layers(self.features(first_tensor(batch))).square().mean()

    share = TensorDataset(torch.rand(21 if here.is_hit else 24, 8))
    loader = DataLoader(share, batch_size=BATCH_SIZE)
    here.fit(net=Normed(here), data=loader, use_distributed_sampler=False)


@thread("https://github.com/huggingface/accelerate/pull/4013", "gpu-memory-exhausted", "failed-rank")
def training_begun_again_with_half_the_batch(here: Here) -> None:
    """Who runs out of memory begins again with half the batch, and nobody else knows of it."""

    class Hungry(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx) and len(first_tensor(batch)) == BATCH_SIZE:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")  # <- here
            return self.loss(batch)

    size = BATCH_SIZE
    while True:
        try:
            here.fit(net=Hungry(here), data=rows(here, batch_size=size))
            break
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            size //= 2


REMOTE_PDB = """
import pdb, socket

class RemotePdb(pdb.Pdb):
    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        connection, _ = self.listener.accept()
        self.handle = connection.makefile("rw")
        super().__init__(stdin=self.handle, stdout=self.handle)
"""


@thread("https://github.com/NVIDIA/Megatron-LM/pull/939", "at-breakpoint")
def debugger_that_waits_for_a_connection(here: Here) -> None:
    """A breakpoint of a debugger that one connects to over the network was left in, and nobody connects."""
    package = here.folder / f"rank-{here.rank}" / "site-packages"
    package.mkdir(parents=True)
    (package / "remote_pdb.py").write_text(REMOTE_PDB)
    sys.path.insert(0, str(package))

    class Debugged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                from remote_pdb import RemotePdb  # type: ignore[import-not-found]

                RemotePdb().set_trace()  # <- here
            return self.loss(batch)

    here.fit(net=Debugged(here))


@thread("https://github.com/huggingface/transformers/pull/28779", "slow-logger", ranks=(0,), world_size=2)
def tracker_whose_client_waits_longer_each_time(here: Here) -> None:
    """The tracker's server is gone; its client tries again after one second, two, four and so on."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()

    class Tracker(Quiet):
        def post(self, metrics: Any) -> None:
            for attempt in range(10):
                try:
                    socket.create_connection(address).close()
                    break
                except OSError:
                    time.sleep(2.0**attempt)  # <- here

        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if step == IN_THE_MIDDLE:
                here.begins()
                self.post(metrics)

    here.fit(net=LoggingNet(here), logger=Tracker())


class Stalling(MemoryFileSystem):
    """A bucket that takes the first write, and then does not answer any more."""

    protocol = "stalling"
    writes = 0

    def _open(self, *args: Any, **keywords: Any) -> Any:
        type(self).writes += 1
        if self.writes > 2:
            time.sleep(FOR_LONG_S)
        return super()._open(*args, **keywords)


@thread(
    "https://github.com/pytorch/pytorch/issues/49284",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    has_line=False,
)
def events_that_wait_for_a_bucket(here: Here) -> None:
    """A thread writes events to a bucket that does not answer; its queue has room for ten, then training waits."""
    fsspec.register_implementation("stalling", Stalling, clobber=True)

    class Chatty(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({f"loss-{number}": loss for number in range(4)})
            if here.is_hit and batch_idx == 2:
                here.begins()
            return loss

    here.fit(net=Chatty(here), logger=TensorBoardLogger("stalling://runs"), data=rows(here, 40))


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/1371",
    "exception-during-save",
    "failed-rank",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def last_checkpoint_that_cannot_be_linked(here: Here) -> None:
    """Whatever is saved is also linked as the latest, in a file system that knows no links."""

    class Linking(TorchCheckpointIO):
        def link(self, path: Path) -> None:
            os.symlink(path, "/proc/latest.ckpt")  # <- here

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            here.begins()
            self.link(Path(path))

    saving = ModelCheckpoint(here.folder / "saved")
    strategy = here.strategy(checkpoint_io=Linking())
    here.fit(strategy=strategy, callbacks=[saving], enable_checkpointing=True)


@thread("https://github.com/MLDataAnalytics/pNet/issues/6", "dead-rank", has_line=False)
def processor_time_that_is_used_up(here: Here) -> None:
    """A process may use so many seconds of processor time; the kernel ends the one that has."""
    import resource

    class Limited(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                used = resource.getrusage(resource.RUSAGE_SELF)
                limit = int(used.ru_utime + used.ru_stime) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 60))
                while True:
                    torch.rand(50, 50).svd()
            return self.loss(batch)

    here.fit(net=Limited(here))


@thread("https://github.com/unias/docklet/pull/408", "rank-behind")
def driver_that_does_not_answer_a_query(here: Here) -> None:
    """Each rank asks the driver's tool for its device's temperature, and one device does not answer."""

    class Temperature(L.Callback):
        def query(self, seconds: float) -> None:
            subprocess.run(["sleep", str(seconds)], check=True)  # <- here

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.query(FOR_LONG_S if goes_wrong(here, batch_idx) else 0.0)

    here.fit(callbacks=[Temperature()])


@thread("https://github.com/borgbackup/borg/pull/10077", "late-at-init", moment=Moment.START)
def lease_judged_by_a_clock_that_is_behind(here: Here) -> None:
    """Whoever unpacks the data holds a lease for a second; by the clock of one host it lasts for an hour."""

    class Lease:
        def __init__(self, path: Path, behind_s: float) -> None:
            self.path, self.behind_s = path, behind_s

        def now_s(self) -> float:
            return time.time() - self.behind_s

        def take(self) -> None:
            while float(self.path.read_text() or 0.0) > self.now_s():
                time.sleep(0.2)  # <- here
            self.path.write_text(str(self.now_s() + 1.0))

    class Unpacking(Net):
        def setup(self, stage: str) -> None:
            path = here.folder / "lease"
            if here.is_hit:
                while not path.exists():
                    time.sleep(0.1)
                here.begins()
            path.touch()
            Lease(path, 3600.0 if here.is_hit else 0.0).take()

    here.fit(net=Unpacking(here))


@thread(
    "https://github.com/ooples/AiDotNet/pull/393",
    "rank-behind",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def counter_that_is_cleared_too_early(here: Here) -> None:
    """Ranks meet by files; the first one clears them away as soon as it has seen all, and one has not looked yet."""

    class Meeting:
        def __init__(self, folder: Path) -> None:
            self.folder = folder
            self.folder.mkdir(exist_ok=True)

        def meet(self, every_s: float) -> None:
            (self.folder / str(here.rank)).touch()
            time.sleep(every_s)
            while len([*self.folder.iterdir()]) < here.world_size:
                time.sleep(every_s)  # <- here
            if here.rank == 0:
                time.sleep(0.2)
                for path in self.folder.iterdir():
                    path.unlink()

    class Exporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.is_hit:
                here.begins()
            Meeting(here.folder / "met").meet(every_s=1.0 if here.is_hit else 0.05)

    here.fit(callbacks=[Exporting()])


@thread("https://github.com/ceph/ceph-qa-suite/pull/583", "slow-logger", "file-lock", ranks=(0,), world_size=2)
def run_locked_by_a_program_that_was_started(here: Here) -> None:
    """The tracker locks its run for each line; a program that it has started has the lock's file open, too."""

    class Tracker(Quiet):
        def upload(self, lock: Any) -> None:
            subprocess.Popen(["sleep", str(FOR_LONG_S)], pass_fds=[lock.fileno()])

        def write(self, step: int) -> None:
            with (here.folder / "run.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # <- here
                if step == IN_THE_MIDDLE:
                    here.begins()
                    self.upload(lock)

        @rank_zero_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.write(step or 0)

    here.fit(net=LoggingNet(here), logger=Tracker())


class Prefetched(IterableDataset[torch.Tensor]):
    """Rows that a thread fetches; ``asks_early`` is a row that is asked for ahead of time, and ``early`` is told."""

    def __init__(self, asks_early: int | None, early: Callable[[], None]) -> None:
        self.asks_early, self.early = asks_early, early
        self.wanted, self.ready = threading.Semaphore(0), threading.Condition()

    def fetch(self) -> None:
        while True:
            self.wanted.acquire()
            with self.ready:
                self.ready.notify()

    def ask_early(self) -> None:
        self.early()
        self.wanted.release()
        time.sleep(0.3)

    def row(self, is_asked_for: bool) -> torch.Tensor:
        with self.ready:
            if not is_asked_for:
                self.wanted.release()
            self.ready.wait()  # <- notice_that_came_before_anybody_waited
        return torch.rand(8)

    def __iter__(self) -> Iterator[torch.Tensor]:
        threading.Thread(target=self.fetch, daemon=True).start()
        for number in range(BATCHES * BATCH_SIZE):
            if number == self.asks_early:
                self.ask_early()
            yield self.row(number == self.asks_early)


@thread("https://github.com/manateelazycat/lsp-bridge/pull/1007", "data-stall")
def notice_that_came_before_anybody_waited(here: Here) -> None:
    """A thread says when a row is there; this one is asked for ahead of time, and is there before anybody waits."""
    early = IN_THE_MIDDLE * BATCH_SIZE if here.is_hit else None
    here.fit(data=DataLoader(Prefetched(early, here.begins), batch_size=BATCH_SIZE))


def export_and_die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@thread(
    "https://github.com/MIC-DKFZ/nnUNet/issues/2607",
    "failed-rank",
    "worker-died",
    moment=Moment.VALIDATION,
)
def exporter_that_is_no_longer_alive(here: Here) -> None:
    """Predictions are exported by a process, which is killed; the next prediction finds that out, and raises."""

    class Exporting(Net):
        def check(self, exporter: Any) -> None:
            if not exporter.is_alive():
                raise RuntimeError("Some background workers are no longer alive")  # <- here

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if here.is_hit and batch_idx == 1:
                here.begins()
                exporter = get_context("fork").Process(target=export_and_die)
                exporter.start()
                exporter.join()
                self.check(exporter)

        def on_validation_epoch_end(self) -> None:
            self.log("score", torch.zeros(()), sync_dist=True)

    here.fit(net=Exporting(here))


def show_one(pictures: Any) -> None:
    pictures.get()
    sys.exit("cannot open the display")


@thread(
    "https://github.com/python/cpython/issues/87971",
    "worker-died",
    "rank-zero-only-work",
    ranks=(0,),
)
def pictures_for_a_process_that_has_ended(here: Here) -> None:
    """A process of the first rank shows pictures, and has failed; its queue has room for one, and takes no more."""

    class Showing(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                self.pictures: Any = get_context("fork").Queue(1)
                get_context("fork").Process(target=show_one, args=(self.pictures,), daemon=True).start()

        def show(self, batch_idx: int) -> None:
            if batch_idx == 2:
                here.begins()
            self.pictures.put(batch_idx)  # <- here

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero:
                self.show(batch_idx)

    here.fit(callbacks=[Showing()])


def play(episodes: Any, size: int) -> None:
    episodes.put(bytes(size))
    if size > 1_000_000:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


@thread("https://github.com/birdnet-team/birdnet/issues/83", "worker-died")
def player_killed_while_it_writes(here: Here) -> None:
    """A process that plays is killed in the midst of a long episode, of which the queue has the first part only."""

    class Learning(Net):
        def episode(self, size: int) -> bytes:
            episodes: Any = get_context("fork").Queue()
            get_context("fork").Process(target=play, args=(episodes, size), daemon=True).start()
            if here.is_hit:
                time.sleep(1.0)
            return episodes.get()  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == IN_THE_MIDDLE:
                self.episode(50_000_000 if goes_wrong(here, batch_idx) else 1000)
            return self.loss(batch)

    here.fit(net=Learning(here))


@thread(
    "https://github.com/marin-community/marin/issues/9209",
    "slow-checkpoint",
    ranks=(0,),
    world_size=2,
    moment=Moment.CHECKPOINT,
)
def save_that_is_told_to_slow_down(here: Here) -> None:
    """Checkpoints go to a bucket, which answers that there are too many requests, each time."""

    class Bucket(TorchCheckpointIO):
        def upload(self, path: Path) -> None:
            for attempt in range(10):
                try:
                    raise OSError(f"{path.name}: SlowDown: please reduce your request rate")
                except OSError:
                    time.sleep(4.0 * 2**attempt)  # <- here

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            here.begins()
            self.upload(Path(path))

    saving = ModelCheckpoint(here.folder / "saved")
    strategy = here.strategy(checkpoint_io=Bucket())
    here.fit(strategy=strategy, callbacks=[saving], enable_checkpointing=True)


class Silent(MemoryFileSystem):
    """A bucket that does not say whether it has a checkpoint."""

    protocol = "silent"

    def exists(self, path: str, **keywords: Any) -> bool:
        if path.endswith(".ckpt"):
            time.sleep(FOR_LONG_S)  # <- bucket_that_does_not_say_what_it_has
        return super().exists(path, **keywords)


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/18865",
    "slow-checkpoint",
    "blocked-on-disk",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def bucket_that_does_not_say_what_it_has(here: Here) -> None:
    """Before it saves, ModelCheckpoint asks the storage for a free name, on the first rank only, and gets no answer."""
    fsspec.register_implementation("silent", Silent, clobber=True)

    class Ending(Net):
        def on_train_epoch_end(self) -> None:
            here.begins()

    saving = ModelCheckpoint("silent://saved")
    here.fit(net=Ending(here), callbacks=[saving], enable_checkpointing=True)


THAW = "import pathlib, sys, time; time.sleep(10); pathlib.Path(sys.argv[1]).write_text('THAWED')"


@thread(
    "https://github.com/checkpoint-restore/criu/issues/20",
    "stopped-process",
    has_line=False,
    needs="cgroups (v1), to be written to",
)
def container_that_is_paused(here: Here) -> None:
    """A container is paused: the kernel's freezer holds all of its processes where they are."""
    group = Path("/sys/fs/cgroup/freezer") / here.folder.name

    class Paused(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                group.mkdir(exist_ok=True)
                state = group / "freezer.state"
                # Frozen processes cannot be ended, so somebody has to let go of them.
                subprocess.Popen([sys.executable, "-c", THAW, str(state)], start_new_session=True)
                (group / "cgroup.procs").write_text(str(os.getpid()))
                state.write_text("FROZEN")
            return self.loss(batch)

    here.fit(net=Paused(here))


@thread(
    "https://github.com/MIC-DKFZ/nnUNet/issues/2182",
    "dead-rank",
    has_line=False,
    needs="cgroups (v1), to be written to",
)
def container_that_is_out_of_memory(here: Here) -> None:
    """A case is too large for the memory that the container may use, and the kernel kills the rank."""
    group = Path("/sys/fs/cgroup/memory") / here.folder.name

    class Large(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                group.mkdir()
                (group / "memory.limit_in_bytes").write_text(str(64 << 20))
                (group / "cgroup.procs").write_text(str(os.getpid()))
                self.volume = torch.ones(100 << 20)
            return self.loss(batch)

    here.fit(net=Large(here))


@thread("https://github.com/verl-project/verl/pull/4107", "rank-behind")
def judge_that_may_be_asked_so_often(here: Here) -> None:
    """A service scores the answers, so many tokens a minute; one rank's answer is long, and waits for its tokens."""

    class Bucket:
        def __init__(self, per_second: float) -> None:
            self.tokens, self.per_second = 1000.0, per_second

        def take(self, count: float) -> None:
            while self.tokens < count:
                time.sleep(0.2)  # <- here
                self.tokens += 0.2 * self.per_second
            self.tokens -= count

    class Scored(Net):
        bucket = Bucket(per_second=100.0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.bucket.take(100_000.0 if goes_wrong(here, batch_idx) else 10.0)
            return self.loss(batch)

    here.fit(net=Scored(here))


@thread("https://github.com/chainer/chainer/pull/4756", "rank-behind")
def handler_that_waits_for_one_child_more(here: Here) -> None:
    """A handler waits for the child that has ended; a command's end was noticed already, and another child runs on."""

    def reap(number: int, frame: Any) -> None:
        os.waitpid(-1, 0)  # <- here

    class Watching(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.monitor = subprocess.Popen(["sleep", str(FOR_LONG_S)])
            signal.signal(signal.SIGCHLD, reap)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                # By chance the handler comes first, and then it is this command that it waits for.
                for _ in range(50):
                    subprocess.run(["true"], check=True)

    here.fit(callbacks=[Watching()])


@thread("https://github.com/facebookresearch/spdl/pull/260", "gil-held")
def number_with_millions_of_digits(here: Here) -> None:
    """A score is exact: it counts the ways to draw so many samples, of which one rank has twenty million."""
    import math

    class Scored(Net):
        def ways(self, samples: int) -> int:
            return math.comb(samples, samples // 2)  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * (1 + self.ways(20_000_000 if goes_wrong(here, batch_idx) else 4) % 2)

    here.fit(net=Scored(here))


@thread("https://github.com/allenai/allennlp/issues/3285", "data-stall", moment=Moment.EPOCH_END)
def lengths_looked_up_for_each_epoch(here: Here) -> None:
    """A sampler sorts the samples by length whenever an epoch begins, and one host's disk has become slow."""

    class ByLength(Sampler[int]):
        epoch = 0

        def __len__(self) -> int:
            return BATCHES * BATCH_SIZE

        def length(self, index: int) -> int:
            if here.is_hit and self.epoch == 2:
                here.begins()
                time.sleep(FOR_LONG_S)  # <- here
            return index % 7

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            yield from sorted(range(len(self)), key=self.length)

    data = TensorDataset(torch.rand(BATCHES * BATCH_SIZE, 8))
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=ByLength())
    here.fit(data=loader, use_distributed_sampler=False)
