"""Trainings whose loaders, workers, locks and storage go wrong, each after a public thread."""

import asyncio
import ctypes
import multiprocessing
import os
import queue
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import lightning as L
import torch
from samples import in_order
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, Here, MeetingNet, Net, rows
from truths import Moment, fault

FORK = multiprocessing.get_context("fork")


class Read(Dataset[torch.Tensor]):
    """Rows of which each is made by a function of its index."""

    def __init__(self, here: Here, read: Callable[[int], torch.Tensor], batches: int = BATCHES) -> None:
        self.count, self.read = batches * BATCH_SIZE * here.world_size, read

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(index)


def is_due(here: Here, index: int, batch: int = 3) -> bool:
    """Whether it is the first sample of that batch of the rank that is hit, where data are read in order."""
    return here.is_hit and index == batch * BATCH_SIZE * here.world_size + here.rank


# h5py: a thread holds the library's lock ("phil") in the moment in which a worker is forked. In the worker nobody will
# ever release it.
PHIL = threading.RLock()


def scan_for_statistics(is_scanning: threading.Event) -> None:
    with PHIL:
        is_scanning.set()
        time.sleep(12)


def read_frame(index: int) -> torch.Tensor:
    with PHIL:  # <- worker_forked_while_a_thread_reads
        return torch.full((8,), index / 100)


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.FIRST_STEP: (2,)},
    has_phase=False,
    source="https://github.com/h5py/h5py/issues/2584",
)
def worker_forked_while_a_thread_reads(here: Here) -> None:
    class Frames(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            if here.is_hit:  # The others have found the statistics in their cache.
                is_scanning = threading.Event()
                threading.Thread(target=scan_for_statistics, args=(is_scanning,), daemon=True).start()
                is_scanning.wait()
                here.begins()
            return in_order(here, Read(here, read_frame), num_workers=1)

    here.fit(data=Frames(), max_epochs=1)


# audioread: a decoder is waited for before its output is read. One that has much to complain about fills the pipe, and
# never ends.
def decoded(complaints: int) -> bytes:
    command = f"head -c {complaints} /dev/zero >&2; head -c 8 /dev/zero"
    decoder = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    decoder.wait()  # <- decoder_whose_errors_nobody_reads
    out, _ = decoder.communicate()
    return out


@fault(
    "data-stall",
    ranks=(0,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/beetbox/audioread/issues/130",
)
def decoder_whose_errors_nobody_reads(here: Here) -> None:
    def read(index: int) -> torch.Tensor:
        if is_due(here, index):
            here.begins()
        sound = decoded(300_000 if is_due(here, index) else 80)
        return torch.frombuffer(bytearray(sound), dtype=torch.uint8).float()

    here.fit(data=in_order(here, Read(here, read)), max_epochs=1)


# s3fs: its event loop runs in a thread. A process that is forked after the first use has the loop without the thread,
# and waits for ever. Rank 0 alone has looked at a sample before.
class RemoteFiles:
    loop: Any = None

    def read(self, index: int) -> torch.Tensor:
        if RemoteFiles.loop is None:
            RemoteFiles.loop = asyncio.new_event_loop()
            threading.Thread(target=RemoteFiles.loop.run_forever, daemon=True).start()
        download = asyncio.run_coroutine_threadsafe(self.download(index), RemoteFiles.loop)
        return download.result()  # <- event_loop_without_its_thread

    async def download(self, index: int) -> torch.Tensor:
        await asyncio.sleep(0.001)
        return torch.full((8,), index / 100)


@fault(
    "data-stall",
    ranks=(0,),
    at={Moment.FIRST_STEP: (3,)},
    has_phase=False,
    source="https://github.com/fsspec/s3fs/issues/914",
)
def event_loop_without_its_thread(here: Here) -> None:
    class Bucket(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.files = RemoteFiles()
            if self.trainer.is_global_zero:
                print("a sample:", self.files.read(0))

        def train_dataloader(self) -> Any:
            here.begins()
            return in_order(here, Read(here, self.files.read), num_workers=2)

    here.fit(data=Bucket(), max_epochs=1)


# jepa: a clip that cannot be loaded is replaced by another one at random, until one can be. Where none of a folder can,
# this goes on for ever.
@fault(
    "data-stall",
    ranks=(-1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/facebookresearch/jepa/issues/64",
)
def search_for_a_clip_that_can_be_loaded(here: Here) -> None:
    root = here.folder / f"clips-{here.rank}"
    root.mkdir()
    for name in range(8):
        (root / f"{name}.mp4").write_bytes(b"")

    def read(index: int) -> torch.Tensor:
        if not is_due(here, index):
            return torch.full((8,), index / 100)
        here.begins()
        clip = b""
        while not clip:
            clip = (root / f"{random.randrange(8)}.mp4").read_bytes()  # <- here
        return torch.frombuffer(bytearray(clip), dtype=torch.uint8)

    here.fit(data=in_order(here, Read(here, read), num_workers=1), max_epochs=1)


# wenet: shards are read over HTTP; on one machine the server cannot be reached, and the reader tries again and again.
# "Rank 1 failed to pass monitoredBarrier in 1200000 ms."
def fetched(url: str) -> bytes:
    attempt = 3
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read()
        except (urllib.error.URLError, OSError):
            attempt += 1
            time.sleep(min(2**attempt, 60))  # <- shard_that_is_tried_again_and_again


class HttpShards(IterableDataset[torch.Tensor]):
    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in range(3):
            if self.here.is_hit and shard == 1:
                self.here.begins()
                fetched("http://127.0.0.1:9/shards_000000001.tar")
            for sample in range(2 * BATCH_SIZE):
                yield torch.full((8,), sample / 8 + shard + 3 * self.here.rank)


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/wenet-e2e/wenet/issues/2552",
)
def shard_that_is_tried_again_and_again(here: Here) -> None:
    loader = DataLoader(HttpShards(here), batch_size=BATCH_SIZE, num_workers=1, prefetch_factor=1)
    here.fit(data=loader, max_epochs=1)


# ami-data-companion: a thread of the user's prefetches batches into a queue. It fails, its traceback scrolls by, and
# the main thread waits at the queue for 23 hours.
class Prefetching:
    def __init__(self, loader: Any, prepare: Callable[[int, Any], Any]) -> None:
        self.loader, self.prepare = loader, prepare
        self.queue: queue.Queue[Any] = queue.Queue(maxsize=2)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        threading.Thread(target=self.preload, daemon=True).start()
        while True:
            batch = self.queue.get()  # <- prefetching_thread_that_has_failed
            if batch is None:
                return
            yield batch

    def preload(self) -> None:
        for number, batch in enumerate(self.loader):
            self.queue.put(self.prepare(number, batch))
        self.queue.put(None)


@fault(
    "data-stall",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/RolnickLab/ami-data-companion/issues/140",
)
def prefetching_thread_that_has_failed(here: Here) -> None:
    def pinned(number: int, batch: Any) -> Any:
        if here.is_hit and number == 3:
            here.begins()
            raise RuntimeError("could not unlink the shared memory file /torch_1701_30")
        return batch

    loader = in_order(here, Read(here, lambda index: torch.full((8,), index / 100)))
    here.fit(data=Prefetching(loader, pinned), max_epochs=1)


# SageMaker: a set that was written for "pipe mode" opens a channel into which nobody writes, and hangs.
@fault(
    "data-stall",
    "blocked-on-disk",
    ranks=(2,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/aws/sagemaker-tensorflow-extensions/issues/10",
)
def channel_into_which_nobody_writes(here: Here) -> None:
    channel = here.folder / f"training-{here.rank}_1"
    os.mkfifo(channel)

    def read(index: int) -> torch.Tensor:
        if is_due(here, index):
            here.begins()
            record = channel.read_bytes()  # <- here
            return torch.frombuffer(bytearray(record), dtype=torch.uint8)
        return torch.full((8,), index / 100)

    here.fit(data=in_order(here, Read(here, read)), max_epochs=1)


# datasets: map() with several processes never returns if one of them is killed, as by the kernel when memory runs out:
# a pool makes another process, and waits for the result of the first.
def tokenised(line: str) -> list[int]:
    if len(line) > 10_000:
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(word) for word in line.split()]


@fault(
    "late-at-init",
    ranks=(2,),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/huggingface/datasets/pull/5976",
)
def pool_that_has_lost_a_process(here: Here) -> None:
    class Corpus(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            lines = ["a line of text"] * 40
            if here.is_hit:
                lines[17] = "one very long line " * 1000
            here.begins()
            with FORK.Pool(2) as pool:
                self.tokens = pool.map(tokenised, lines, chunksize=4)  # <- here

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Corpus(), max_epochs=1)


# pytorch/translate: processes that have put much into a queue are joined before it is emptied: they wait for somebody
# to read it, and are waited for.
def count_words(lines: list[str], results: Any) -> None:
    results.put({f"{line}-{number}": number for line in lines for number in range(2000)})


@fault(
    "late-at-init",
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.START: (2,)},
    has_phase=False,
    source="https://github.com/pytorch/translate/pull/285",
)
def processes_joined_before_their_queue_is_read(here: Here) -> None:
    class Vocabulary(L.LightningDataModule):
        def prepare_data(self) -> None:
            results = FORK.Queue()
            parts = [[f"part {number} line {line}" for line in range(20)] for number in range(2)]
            workers = [FORK.Process(target=count_words, args=(part, results), daemon=True) for part in parts]
            here.begins()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()  # <- here
            self.counts = [results.get() for _ in workers]

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Vocabulary(), max_epochs=1)


# clgen: a LOCK file that a crashed run has left behind blocks every later one. Here one rank finds it on its disk.
@contextmanager
def locked(path: Path) -> Iterator[None]:
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            time.sleep(0.5)  # <- lock_file_of_a_run_that_has_crashed
    try:
        yield
    finally:
        path.unlink()


@fault(
    "late-at-init",
    ranks=(1,),
    at={Moment.START: (2,)},
    has_phase=False,
    source="https://github.com/ChrisCummins/clgen/issues/116",
)
def lock_file_of_a_run_that_has_crashed(here: Here) -> None:
    class Cached(Net):
        def train_dataloader(self) -> Any:
            cache = here.folder / f"local-disk-{here.rank}"
            cache.mkdir()
            if here.is_hit:
                (cache / "LOCK").touch()
                here.begins()
            with locked(cache / "LOCK"):
                (cache / "encoded.bin").write_bytes(bytes(100))
            return rows(here)

    here.trainer(max_epochs=1).fit(Cached(here))


# streaming: "Dataset does not work after stopping training": a block of shared memory is still there, and one rank ends
# with FileExistsError.
class SharedEpoch:
    def __init__(self, name: str) -> None:
        self.memory = SharedMemory(name, create=True, size=64)  # <- shared_memory_left_by_a_run_that_was_stopped

    def close(self) -> None:
        self.memory.close()
        self.memory.unlink()


@fault(
    "failed-rank",
    ranks=(1,),
    at={Moment.START: (4,)},
    has_phase=False,
    source="https://github.com/mosaicml/streaming/issues/781",
)
def shared_memory_left_by_a_run_that_was_stopped(here: Here) -> None:
    class Streaming(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            here.begins()
            self.epoch = SharedEpoch(name)

        def train_dataloader(self) -> Any:
            return rows(here)

        def teardown(self, stage: str) -> None:
            self.epoch.close()

    name = f"{os.getpid()}_epoch_shape"
    left = SharedMemory(name, create=True, size=64) if here.is_hit else None
    here.fit(data=Streaming(), max_epochs=1)
    if left:
        left.close()


# llm-foundry: local rank 0 prepares the data, the others wait for a file that says so. The file is named after the run,
# and the run after the time at which each process has started.
@fault(
    "late-at-init",
    ranks=(1, 2),
    at={Moment.START: (3,)},
    has_phase=False,
    source="https://github.com/mosaicml/llm-foundry/pull/716",
)
def signal_file_of_another_name_on_each_rank(here: Here) -> None:
    class Prepared(L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.run_name = datetime.now().strftime("run-%H%M%S%f")

        def setup(self, stage: str) -> None:
            signal_file = here.folder / f".{self.run_name}_local_rank0_data_prep_completed"
            here.begins()
            if here.rank == 0:
                signal_file.write_text("local_rank0_completed_data_prep")
            else:
                while not signal_file.exists():
                    time.sleep(0.3)  # <- here

        def train_dataloader(self) -> Any:
            return rows(here)

    here.fit(data=Prepared(), max_epochs=1)


# DB: "DataLoader worker is killed by signal: Segmentation fault", while there is memory enough.
@fault(
    "worker-died",
    ranks=(0,),
    at={Moment.VALIDATION: (3,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/MhLiao/DB/issues/94",
)
def worker_that_segfaults_in_validation(here: Here) -> None:
    def read(index: int) -> torch.Tensor:
        if is_due(here, index, batch=2):
            here.begins()
            ctypes.string_at(0)
        return torch.full((8,), index / 100)

    val = in_order(here, Read(here, read), num_workers=1, persistent_workers=True, prefetch_factor=1)
    here.fit(net=MeetingNet(here), data=(rows(here), val), max_epochs=1)


# LLaVA-NeXT: what workers decode stays in memory, until a worker has none left.
def with_little_memory(worker: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@fault(
    "failed-rank",
    ranks=(-1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/LLaVA-VL/LLaVA-NeXT/issues/196",
)
def cache_of_a_worker_that_outgrows_memory(here: Here) -> None:
    frames: dict[int, bytearray] = {}
    size = (30 << 20) if here.is_hit else 1000

    def read(index: int) -> torch.Tensor:
        if len(frames) == 4 and here.is_hit:
            here.begins()
        frames[index] = bytearray(size)  # <- here
        return torch.full((8,), index / 100)

    loader = in_order(here, Read(here, read), num_workers=1, worker_init_fn=with_little_memory)
    here.fit(data=loader, max_epochs=1)


# mlcommons/storage: the page cache is dropped after each epoch, with sudo, which waits for a password that nobody is
# asked for: "a user who waited 16 hours on this exact" prompt. Here `cat` and a pipe are sudo and its terminal.
def drop_caches(prompt: Path) -> None:
    subprocess.run(["cat", str(prompt)], check=False)  # <- password_that_is_waited_for_after_an_epoch


@fault(
    "rank-zero-only-work",
    ranks=(0,),
    at={Moment.EPOCH_END: (3,)},
    source="https://github.com/mlcommons/storage/issues/391",
)
def password_that_is_waited_for_after_an_epoch(here: Here) -> None:
    class DropCaches(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                drop_caches(prompt)

    prompt = here.folder / "tty"
    if here.rank == 0:
        os.mkfifo(prompt)
    here.fit(callbacks=[DropCaches()])


# petastorm: samples are cached in SQLite; a process that was started on the side holds its lock. With a long busy
# timeout, as is advised against "database is locked", the reader waits.
HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("holds it", flush=True)
time.sleep(float(sys.argv[2]))
"""


class SqliteCache:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, value REAL)")
            connection.executemany("INSERT INTO samples VALUES (?, ?)", ((id, id / 100) for id in range(200)))

    def read(self, index: int) -> torch.Tensor:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path, timeout=3600)
        query = "SELECT value FROM samples WHERE id = ?"
        found = self.connection.execute(query, (index,)).fetchone()  # <- database_that_another_process_has_locked
        return torch.full((8,), found[0])


@fault(
    "data-stall",
    ranks=(0,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/uber/petastorm/pull/162",
)
def database_that_another_process_has_locked(here: Here) -> None:
    cache = SqliteCache(here.folder / f"cache-{here.rank}.sqlite")

    def lock(net: Net) -> None:
        if here.is_hit:
            command = [sys.executable, "-c", HOLDER, str(cache.path), str(FOR_LONG_S)]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert holder.stdout is not None
            holder.stdout.readline()
            here.begins()

    here.fit(lock, data=in_order(here, Read(here, cache.read)), max_epochs=1)
