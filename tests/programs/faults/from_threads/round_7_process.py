"""Round 7 of trainings of public threads that go wrong: data, pools, pipes, signals, threads and stores."""

import code
import faulthandler
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from samples import stored
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, Net, rows
from truths import Moment


def padded(samples: list[Any]) -> torch.Tensor:
    """To the length of the longest sample of all ranks."""
    longest = torch.tensor(float(len(samples)))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # <- length_agreed_upon_where_batches_are_made
    return torch.stack([sample[0] for sample in samples])


@thread(
    "https://github.com/pytorch/pytorch/issues/82077",
    "data-stall",
    ranks=None,
    moment=Moment.FIRST_STEP,
)
def length_agreed_upon_where_batches_are_made(here: Here) -> None:
    """Batches are as long as the longest of all ranks; the loader was given workers, which are no ranks."""
    here.begins()
    here.fit(data=rows(here, collate_fn=padded, num_workers=1))


class Index:
    """Two locks: of what is in memory, and of what is in files."""

    def __init__(self) -> None:
        self.memory, self.files = threading.Lock(), threading.Lock()
        self.is_writing = threading.Event()

    def write(self) -> None:
        with self.files:
            self.is_writing.set()
            time.sleep(0.5)
            with self.memory:
                pass

    def read(self) -> None:
        with self.memory, self.files:  # <- two_locks_taken_in_both_orders
            pass


@thread("https://github.com/r-spade/ormah/issues/207", "rank-behind")
def two_locks_taken_in_both_orders(here: Here) -> None:
    """A thread writes an index: it takes the lock of the files, then that of memory; a step takes them vice versa."""

    class Remembering(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            index = Index()
            if goes_wrong(here, batch_idx):
                threading.Thread(target=index.write, daemon=True).start()
                index.is_writing.wait()
            index.read()
            return self.loss(batch)

    here.fit(net=Remembering(here))


def load_table(path: str) -> None:
    Path(path).read_bytes()


@thread("https://github.com/python/cpython/issues/87472", "worker-died", "rank-behind")
def pool_that_cannot_begin(here: Here) -> None:
    """Processes of a pool read a table when they start; on one host it is missing, and each new process ends, too."""

    class Scored(Net):
        def score(self, table: str) -> float:
            with get_context("fork").Pool(1, load_table, (table,)) as pool:
                return sum(pool.map(abs, range(4)))  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == IN_THE_MIDDLE:
                self.score("/nowhere/table" if goes_wrong(here, batch_idx) else os.devnull)
            return self.loss(batch)

    here.fit(net=Scored(here), max_epochs=1)


class DecodingError(Exception):
    """Of a clip, with the place where it is broken."""

    def __init__(self, clip: str, place: int) -> None:
        super().__init__(f"{clip} is broken at {place}")


def decoded(clip: str) -> int:
    if "broken" in clip:
        raise DecodingError(clip, 7)
    return len(clip)


@thread("https://github.com/python/cpython/issues/103061", "worker-died", "data-stall", "rank-behind")
def exception_that_cannot_be_read_back(here: Here) -> None:
    """A process of a pool raises; its exception wants two arguments, and the thread that reads results ends of it."""
    pool = get_context("fork").Pool(1)

    def read() -> None:
        pool.map(decoded, ["whole.mp4", "broken.mp4"])  # <- here

    here.fit(data=stored(here, read))


@thread("https://github.com/MemPalace/mempalace/issues/2221", "data-stall", "blocked-on-disk", "rank-behind")
def file_that_is_a_pipe(here: Here) -> None:
    """Among the files of a folder there is a named pipe, of which nobody has the other end."""
    folder = here.folder / f"files-{here.rank}"
    folder.mkdir()
    os.mkfifo(folder / "notes.md")

    def read() -> None:
        for path in folder.iterdir():
            path.read_bytes()  # <- here

    here.fit(data=stored(here, read))


@thread("https://github.com/pytest-dev/pytest-faulthandler/issues/5", "dead-rank", has_line=False)
def traceback_that_ends_the_process(here: Here) -> None:
    """A traceback is to be written if a step takes long, and the process ended; after validation it stays armed."""

    class Armed(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                faulthandler.dump_traceback_later(0.5, exit=True)
                time.sleep(1.0)

    here.fit(callbacks=[Armed()])


@thread("https://github.com/python/cpython/pull/6773", "dead-rank")
def pipe_whose_reader_has_gone(here: Here) -> None:
    """The script takes SIGPIPE as the shell does; a viewer that frames are sent to has been closed on one host."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reading, writing = os.pipe()

    class Viewed(L.Callback):
        def show(self) -> None:
            os.write(writing, b"frame")  # <- here

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                os.close(reading)
            self.show()

    here.fit(callbacks=[Viewed()])


class Sharded(IterableDataset[torch.Tensor]):
    """Files for the workers of a rank, of which each takes those of its number."""

    def __init__(self, here: Here, files: int) -> None:
        self.here, self.files = here, [*range(files)]

    def read(self, file: int) -> Iterator[torch.Tensor]:
        yield from torch.full((BATCHES * BATCH_SIZE // 2, 8), file / 10)

    def of_worker(self, number: int) -> int:
        return self.files[number]  # <- worker_for_which_there_is_no_file

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        if len(self.files) == 1:
            self.here.begins()
        yield from self.read(self.of_worker(worker.id if worker else 0))


@thread("https://github.com/huggingface/datasets/issues/5881", "failed-rank", moment=Moment.FIRST_STEP)
def worker_for_which_there_is_no_file(here: Here) -> None:
    """Each rank has two workers, and each of these a file by its number; one rank's share has a single file."""
    here.fit(data=DataLoader(Sharded(here, 1 if here.is_hit else 2), batch_size=BATCH_SIZE, num_workers=2))


@thread("https://docs.python.org/3/library/itertools.html#itertools.count", "gil-held")
def number_that_the_series_has_not(here: Here) -> None:
    """Whether a step is one of the series is asked by looking for it, and this series has the even numbers only."""

    class Probed(Net):
        def is_due(self, step: int, series: Any) -> bool:
            return step in series  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            step = 1 if goes_wrong(here, batch_idx) else 2 * batch_idx
            self.is_due(step, itertools.count(0, 2))
            return self.loss(batch)

    here.fit(net=Probed(here))


@thread("https://github.com/dask/distributed/issues/1505", "at-breakpoint")
def shell_that_was_left_in(here: Here) -> None:
    """An interactive shell was left in for a loss that is too high, which it is on one rank."""

    class Debugged(Net):
        def look(self, batch: Any) -> None:
            terminal, _ = os.openpty()
            os.dup2(terminal, 0)
            sys.stdin = os.fdopen(0)
            code.interact(local={"batch": batch})  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                self.look(batch)
            return self.loss(batch)

    here.fit(net=Debugged(here))


class Replay(L.Callback):
    """A buffer of what has been played, which is part of the checkpoint; on one host it is on a slow disk."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def packed(self) -> bytes:
        if self.here.is_hit:
            self.here.begins()
            time.sleep(FOR_LONG_S)  # <- buffer_that_each_rank_puts_into_the_checkpoint
        return b"episodes"

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.packed()}


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/pull/10638",
    "slow-checkpoint",
    moment=Moment.CHECKPOINT,
)
def buffer_that_each_rank_puts_into_the_checkpoint(here: Here) -> None:
    """All ranks collect the state for a checkpoint that the first one writes, and one rank's takes long."""
    saving = ModelCheckpoint(here.folder / "saved")
    here.fit(callbacks=[Replay(here), saving], enable_checkpointing=True)


class Finder(L.LightningDataModule):
    """Looks for the largest batch that fits, on each rank by itself."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here, self.batch_size = here, 1

    def fits(self, size: int) -> bool:
        return size <= (BATCH_SIZE * 2 if self.here.is_hit else BATCH_SIZE)

    def setup(self, stage: str) -> None:
        while self.fits(self.batch_size * 2):
            self.batch_size *= 2

    def train_dataloader(self) -> Any:
        return rows(self.here, batch_size=self.batch_size)


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/20994",
    "uneven-batches",
    moment=Moment.EPOCH_END,
    has_line=False,
)
def batch_size_that_each_rank_finds_for_itself(here: Here) -> None:
    """Each rank finds out how large its batches may be; one device has more memory, so its epoch is shorter."""

    class Ending(Net):
        def on_train_epoch_end(self) -> None:
            here.begins()

    here.trainer().fit(Ending(here), datamodule=Finder(here))


class Spinning(IterableDataset[torch.Tensor]):
    """Reads its shards round and round."""

    def __init__(self, here: Here, shards: int) -> None:
        self.here, self.shards = here, shards

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if not self.shards:
                self.here.begins()
            for shard in range(self.shards):
                yield torch.full((8,), shard / 10)


@thread(
    "https://github.com/huggingface/datasets/issues/8669",
    "data-stall",
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def worker_that_goes_round_without_a_shard(here: Here) -> None:
    """Shards are read again and again without end; shuffling has left one rank's worker without any."""
    loader = DataLoader(Spinning(here, 0 if here.is_hit else 2), batch_size=BATCH_SIZE, num_workers=1)
    here.fit(data=loader, limit_train_batches=BATCHES)


class Meeting:
    """Ranks count themselves in a file, until there are as many as the scheduler has said."""

    def __init__(self, path: Path, expected: int) -> None:
        self.path, self.expected = path, expected

    def present(self) -> int:
        return len(self.path.read_text()) if self.path.exists() else 0

    def meet(self) -> None:
        with self.path.open("a") as file:
            file.write("x")
        while self.present() < self.expected:
            time.sleep(0.1)  # <- one_rank_more_than_there_is


@thread(
    "https://github.com/pytorch/pytorch/issues/75213",
    "rank-behind",
    ranks=None,
    moment=Moment.EPOCH_END,
)
def one_rank_more_than_there_is(here: Here) -> None:
    """All meet by a file before they export; the number that they wait for counts a process that is no rank."""

    class Exporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            here.begins()
            Meeting(here.folder / "present", expected=here.world_size + 1).meet()

    here.fit(callbacks=[Exporting()])


def upload(metrics: dict[str, float]) -> None:
    if metrics:
        time.sleep(FOR_LONG_S)


@thread("https://github.com/mlflow/mlflow/issues/12402", "unfinished-rank", moment=Moment.END)
def queue_emptied_before_the_end(here: Here) -> None:
    """Metrics are sent by threads of a pool, which is shut down at the end and waits for all; one server is slow."""

    class Sending(L.Callback):
        def __init__(self) -> None:
            self.pool = ThreadPoolExecutor(1)

        def flush(self) -> None:
            self.pool.shutdown(wait=True)  # <- here

        def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.is_hit:
                here.begins()
                self.pool.submit(upload, {"loss": 0.5})
            self.flush()

    here.fit(callbacks=[Sending()])


class Versioned(Logger):
    """Keeps the version of the code with the hyperparameters."""

    name = "versioned"
    version = 0

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here

    def commit(self) -> str:
        ask = ["sleep", str(FOR_LONG_S)]
        return subprocess.check_output(ask, text=True)  # <- version_that_is_asked_for_over_the_network

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
        self.here.begins()
        self.commit()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass


@thread(
    "https://github.com/treeverse/dvc.org/pull/4934",
    "slow-logger",
    "late-at-init",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.START,
)
def version_that_is_asked_for_over_the_network(here: Here) -> None:
    """With the hyperparameters a logger keeps the version of the code, which it lets a program ask a server for."""

    class Configured(Net):
        def __init__(self, here: Here, width: int = 16) -> None:
            super().__init__(here)
            self.save_hyperparameters({"width": width})

    here.fit(net=Configured(here), logger=Versioned(here))


class Connections:
    """No more than two at a time."""

    def __init__(self) -> None:
        self.free = threading.BoundedSemaphore(2)

    def fetch(self, is_there: bool) -> None:
        self.free.acquire()  # <- connections_that_errors_have_used_up
        if not is_there:
            raise FileNotFoundError("404")
        self.free.release()


@thread("https://github.com/wso2/carbon-analytics-common/issues/571", "data-stall", "rank-behind")
def connections_that_errors_have_used_up(here: Here) -> None:
    """A connection is given back after a download, though not after an error; two errors are tried again."""
    connections = Connections()

    def read() -> None:
        for attempt in range(3):
            try:
                connections.fetch(is_there=attempt == 2)
            except FileNotFoundError:
                continue

    here.fit(data=stored(here, read))


@thread(
    "https://github.com/InternLM/xtuner/pull/1852",
    "failed-rank",
    "exception-during-save",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def folder_made_anew_under_the_others(here: Here) -> None:
    """Each rank writes its part into a folder that the first one makes anew, for which nobody waits."""
    folder = here.folder / "incomplete"

    class Sharding(L.Callback):
        def renew(self) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.5)
            folder.mkdir()

        def write(self) -> None:
            time.sleep(0.2 if here.is_hit else 1.0)
            (folder / f"part-{here.rank}").write_bytes(b"part")  # <- here

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.is_hit:
                here.begins()
            if here.rank == 0:
                self.renew()
            self.write()
            dist.barrier()

    folder.mkdir(exist_ok=True)
    here.fit(callbacks=[Sharding()])


class Short(Dataset[torch.Tensor]):
    """The rows of one rank's shard."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 100)


@thread(
    "https://github.com/ruimalheiro/gradient-garden/pull/20",
    "uneven-batches",
    "diverged-collectives",
    moment=Moment.EPOCH_END,
    has_line=False,
)
def shard_whose_batches_are_padded_together(here: Here) -> None:
    """Each rank reads its own shard, and pads to the longest sample of all; one shard is a batch shorter."""

    def together(samples: list[torch.Tensor]) -> torch.Tensor:
        longest = torch.tensor(float(len(samples)))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return torch.stack(samples)

    class Ending(Net):
        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()

    shard = Short((BATCHES - here.is_hit) * BATCH_SIZE)
    loader = DataLoader(shard, batch_size=BATCH_SIZE, collate_fn=together)
    here.fit(net=Ending(here), data=loader, use_distributed_sampler=False)
