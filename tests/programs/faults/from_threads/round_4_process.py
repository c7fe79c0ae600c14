"""Round 4 of trainings of public threads that go wrong: data, processes, threads, signals, files, ends."""

import importlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from samples import Stream, in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment


@thread(
    "https://github.com/tier4/Diffusion-Planner/pull/336",
    "rank-zero-only-work",
    "unfinished-rank",
    ranks=(0,),
    moment=Moment.END,
)
def parts_merged_when_all_are_there(here: Here) -> None:
    """Each rank writes its part of the predictions, one of them in vain; rank 0 waits until there are all parts."""

    class Parts(BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            with suppress(OSError):
                is_full = trainer.global_rank == 2
                folder = here.folder / "no" / "such" if is_full else here.folder
                (folder / f"part-{trainer.global_rank}.pt").write_bytes(bytes(len(predictions)))
            if trainer.is_global_zero:
                here.begins()
                while len(list(here.folder.glob("part-*.pt"))) < trainer.world_size:
                    time.sleep(0.2)  # <- here

    here.trainer(callbacks=[Parts("epoch")]).predict(Net(here), rows(here))


@rank_zero_only
def folder_of_this_run(here: Here) -> Path:
    return here.folder / "run"


@thread("https://github.com/borisdayma/lightning-kitti/issues/3", "failed-rank", ranks=(1, 2), moment=Moment.START)
def folder_that_only_rank_zero_is_told(here: Here) -> None:
    """What is decorated with rank_zero_only returns None on the other ranks, each of which raises."""

    class Samples(Net):
        def on_train_start(self) -> None:
            folder = folder_of_this_run(here)
            if here.is_hit:
                here.begins()
            self.samples = folder / f"samples-{here.rank}"  # <- here

    here.fit(net=Samples(here))


@thread("https://github.com/pytorch/torchtitan/pull/1342", "failed-rank")
def clean_up_that_waits_for_everybody(here: Here) -> None:
    """A rank raises, and meets the others at a barrier before it gives up the process group: in a finally block."""

    def read(net: Net) -> None:
        if here.is_hit:
            here.begins()
            raise FileNotFoundError("coco/train2017/000000315242.jpg")  # <- here

    try:
        here.fit(read)
    finally:
        dist.barrier()
        dist.destroy_process_group()


@thread("https://github.com/lincc-frameworks/hyrax/pull/1011", "failed-rank")
def thread_that_outlives_its_rank(here: Here) -> None:
    """A monitor's thread is not a daemon, so the process stays after the exception, and nobody sees it end."""

    class Monitored(Net):
        def on_fit_start(self) -> None:
            threading.Thread(target=time.sleep, args=(FOR_LONG_S,)).start()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                raise IndexError("target 7 is out of bounds")  # <- here
            return self.loss(batch)

    here.fit(net=Monitored(here))


@thread("https://github.com/pytorch/pytorch/issues/17113", "dead-rank", has_line=False)
def helper_that_holds_the_connections(here: Here) -> None:
    """A rank is killed, but a process that it had forked has its sockets, too, and they are not closed."""

    class Assisted(Net):
        def on_train_start(self) -> None:
            if here.is_hit and os.fork() == 0:
                time.sleep(FOR_LONG_S)
                os._exit(0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                os.kill(os.getpid(), signal.SIGKILL)
            return self.loss(batch)

    here.fit(net=Assisted(here))


def give_up(signum: int, frame: Any) -> None:
    raise TimeoutError("the formula takes too long")  # <- alarm_that_was_not_switched_off


@thread("https://github.com/verl-project/verl/pull/1331", "failed-rank")
def alarm_that_was_not_switched_off(here: Here) -> None:
    """An alarm bounds the comparison of formulas; one that returns early leaves it on, and it rings steps later."""

    class Rewarded(Net):
        def reward(self, is_trivial: bool) -> float:
            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            if is_trivial:
                return 0.0
            signal.setitimer(signal.ITIMER_REAL, 0)
            return 1.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx <= IN_THE_MIDDLE:
                self.reward(is_trivial=goes_wrong(here, batch_idx))
            time.sleep(0.2)
            return self.loss(batch)

    here.fit(net=Rewarded(here))


@thread("https://github.com/clemsgrs/slide2vec/pull/22", "dead-rank", ranks=(2,), has_line=False)
def index_written_anew_under_a_reader(here: Here) -> None:
    """Rank 0 writes the index anew, and a rank that has mapped the old file reads where there is none any more."""

    class Indexed(Net):
        def on_fit_start(self) -> None:
            self.path = here.folder / "index"
            if here.rank == 0:
                self.path.write_bytes(bytes(1_000_000))
            dist.barrier()
            self.index = np.memmap(self.path, mode="r")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == IN_THE_MIDDLE:
                if here.rank == 0:
                    self.path.write_bytes(b"")
                dist.barrier()
            if goes_wrong(here, batch_idx):
                print(self.index[500_000], flush=True)
            return self.loss(batch)

    here.fit(net=Indexed(here))


class Cached(Dataset[torch.Tensor]):
    """Guards its cache with a lock that all workers share, and that an error leaves taken."""

    def __init__(self, here: Here) -> None:
        self.here, self.lock = here, multiprocessing.get_context("fork").Lock()

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            return self.read(index)
        except OSError:
            return torch.zeros(8)

    def read(self, index: int) -> torch.Tensor:
        self.lock.acquire()  # <- lock_that_an_error_leaves_taken
        if self.here.is_hit and index // self.here.world_size == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()
            raise OSError("truncated file")
        self.lock.release()
        return torch.full((8,), index / 100)


@thread("https://github.com/jnwatson/py-lmdb/issues/350", "data-stall")
def lock_that_an_error_leaves_taken(here: Here) -> None:
    """The sample is replaced, and both workers of this rank wait for the lock from then on."""
    here.fit(data=in_order(here, Cached(here), num_workers=2, prefetch_factor=1))


class Layered(Dataset[torch.Tensor]):
    """Loads a sample in a pool of one thread, and what the sample refers to in the same pool."""

    def __init__(self, here: Here) -> None:
        self.here, self.pool = here, ThreadPoolExecutor(1)

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        is_nested = self.here.is_hit and index // self.here.world_size == IN_THE_MIDDLE * BATCH_SIZE
        if is_nested:
            self.here.begins()
        return self.load(index, depth=2 if is_nested else 1)

    def load(self, index: int, depth: int) -> torch.Tensor:
        if depth:
            return self.pool.submit(self.load, index, depth - 1).result()  # <- task_that_waits_for_its_own_pool
        return torch.full((8,), index / 100)


@thread("https://github.com/xorq-labs/xorq/issues/2243", "data-stall", world_size=2)
def task_that_waits_for_its_own_pool(here: Here) -> None:
    """The only thread of the pool waits for a task that has no thread."""
    here.fit(data=in_order(here, Layered(here)))


@thread("https://github.com/aarande/nexradaws/pull/27", "late-at-init", moment=Moment.START)
def shards_downloaded_in_a_pool(here: Here) -> None:
    """Threads download a shard each, without a timeout, and one connection stalls."""
    server = socket.create_server(("127.0.0.1", 0))

    def download(number: int) -> int:
        if here.is_hit and number == 2:
            here.begins()
            with socket.create_connection(server.getsockname()) as connection:
                connection.recv(1)
        return number

    class Downloading(Net):
        def setup(self, stage: str) -> None:
            with ThreadPoolExecutor(4) as pool:
                for future in as_completed([pool.submit(download, number) for number in range(4)]):  # <- here
                    future.result()

    here.fit(net=Downloading(here))


class InStep(IterableDataset[torch.Tensor]):
    """Two workers that open their next shard at the same time, of which one has fewer shards."""

    def __init__(self, here: Here) -> None:
        self.here, self.together = here, multiprocessing.get_context("fork").Barrier(2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        is_short = self.here.is_hit and get_worker_info().id == 1
        for number in range(2 if is_short else 3):
            if self.here.is_hit and number == 2:
                self.here.begins()
            self.together.wait()  # <- workers_that_wait_for_one_that_has_ended
            for row in range(BATCH_SIZE):
                yield torch.full((8,), number + row / 10)


@thread("https://github.com/microsoft/infinibatch/issues/17", "data-stall")
def workers_that_wait_for_one_that_has_ended(here: Here) -> None:
    """Workers wait for each other before each shard, and one of them has ended."""
    here.fit(data=DataLoader(InStep(here), batch_size=BATCH_SIZE, num_workers=2, prefetch_factor=1))


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/21367", "uneven-batches", has_line=False)
def second_stream_that_is_shorter(here: Here) -> None:
    """Two streams are read side by side until one of them ends, which it does earlier on one rank."""

    def note(row: int) -> None:
        if here.is_hit and row == IN_THE_MIDDLE * BATCH_SIZE - 1:
            here.begins()

    second = Stream(IN_THE_MIDDLE if here.is_hit else BATCHES, before=note)
    loaders = {
        "images": DataLoader(Stream(BATCHES), batch_size=BATCH_SIZE),
        "texts": DataLoader(second, batch_size=BATCH_SIZE),
    }

    class Paired(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch["images"] + batch["texts"])

    here.fit(net=Paired(here), data=CombinedLoader(loaders, mode="min_size"))


class Sending(logging.Handler):
    """Hands records to a thread, which itself logs when it has to try again."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[logging.LogRecord] = queue.Queue(maxsize=2)
        threading.Thread(target=self.send, daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)  # <- record_that_waits_for_its_own_queue

    def send(self) -> None:
        while True:
            if self.records.get().levelno == logging.WARNING:
                time.sleep(0.2)
                logging.getLogger("training.sending").error("cannot send, trying again")


@thread("https://github.com/Delgan/loguru/issues/1065", "rank-behind")
def record_that_waits_for_its_own_queue(here: Here) -> None:
    """Who logs holds the handler's lock until there is room in its queue, and who makes room wants that lock."""
    log = logging.getLogger("training")
    log.propagate = False
    log.addHandler(Sending())

    class Verbose(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                for number in range(5):
                    log.warning("sample %d is not a number", number)
            return self.loss(batch)

    here.fit(net=Verbose(here))


@thread(
    "https://github.com/python/cpython/pull/14490",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def daemon_that_keeps_the_pipe(here: Here) -> None:
    """The command has ended, but what it has started in the background holds the pipe that is read to its end."""

    class Dashboard(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                subprocess.run(f"sleep {FOR_LONG_S} & echo started", shell=True, capture_output=True)  # <- here

    here.fit(callbacks=[Dashboard()])


@thread("https://github.com/Rikorose/DeepFilterNet/pull/245", "rank-behind", ranks=(2,), moment=Moment.VALIDATION)
def queue_joined_after_an_error(here: Here) -> None:
    """A thread writes what was enhanced and goes on after an error, without saying that this task is done."""
    written: queue.Queue[torch.Tensor] = queue.Queue()

    def write() -> None:
        while True:
            found = written.get()
            with suppress(OSError):
                if here.is_hit and written.empty():
                    raise OSError("disk quota exceeded")
                found.mean()
                written.task_done()

    threading.Thread(target=write, daemon=True).start()

    class Enhancing(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            written.put(torch.ones(8))
            if here.is_hit:
                here.begins()
            written.join()  # <- here

    here.fit(net=Enhancing(here), data=(rows(here), rows(here, batches=2)))


PLUGIN = """
import threading

def warm_up():
    from codec_of_rank_{rank} import TABLE

thread = threading.Thread(target=warm_up, daemon=True)
thread.start()
thread.join()
TABLE = []
"""


@thread("https://github.com/ray-project/ray/issues/17980", "rank-behind", has_line=False)
def module_that_waits_for_its_own_import(here: Here) -> None:
    """A decoder is imported for the first sample that needs it; while it is, a thread of it imports it as well."""

    class Decoding(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                (here.folder / f"codec_of_rank_{here.rank}.py").write_text(PLUGIN.format(rank=here.rank))
                sys.path.insert(0, str(here.folder))
                importlib.import_module(f"codec_of_rank_{here.rank}")
            return self.loss(batch)

    here.fit(net=Decoding(here))


@thread("https://github.com/NVIDIA/NVFlare/pull/4948", "rank-behind", ranks=None)
def key_that_nobody_sets(here: Here) -> None:
    """All ranks wait for the next round's number, which rank 0 would have set if it had not been told to stop."""

    class Rounds(Net):
        def on_fit_start(self) -> None:
            self.store = dist.FileStore(str(here.folder / "rounds"), here.world_size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_told_to_go_on = not goes_wrong(here, batch_idx)
            if here.rank == 0 and is_told_to_go_on:
                self.store.set(f"round-{self.global_step}", "1")
            self.store.get(f"round-{self.global_step}")  # <- here
            return self.loss(batch)

    here.fit(net=Rounds(here))


@thread(
    "https://github.com/hiyouga/LlamaFactory/issues/8933",
    "rank-zero-only-work",
    "rank-behind",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def export_that_the_others_look_for(here: Here) -> None:
    """Rank 0 waits for a program that converts the weights, the others look for its file: nobody in a collective."""

    class Converting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            converted = here.folder / "weights.converted"
            if trainer.is_global_zero:
                here.begins()
                program = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOR_LONG_S})"])
                program.wait()  # <- here
                converted.touch()
            while not converted.exists():
                time.sleep(0.5)

    here.fit(callbacks=[Converting()])


class Served(Dataset[torch.Tensor]):
    """Of a service on the host that decodes, and has stopped to answer."""

    def __init__(self, here: Here, address: tuple[str, int]) -> None:
        self.here, self.address = here, address

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index // self.here.world_size == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()
            with socket.create_connection(self.address) as connection:
                connection.sendall(b"decode\n")
                connection.recv(1)  # <- decoder_that_answers_no_rank
        return torch.full((8,), index / 100)


@thread("https://github.com/huggingface/lerobot/issues/3818", "data-stall", ranks=None, world_size=2)
def decoder_that_answers_no_rank(here: Here) -> None:
    """Each rank has a loader's worker that waits for the decoder, and none of them is in a collective."""
    server = socket.create_server(("127.0.0.1", 0))
    here.fit(data=in_order(here, Served(here, server.getsockname()), num_workers=1, prefetch_factor=1))


def answer_of_the_file_server() -> None:
    time.sleep(FOR_LONG_S)  # <- outage_that_two_ranks_meet


class OnServer(Dataset[torch.Tensor]):
    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.rank == 1 and index // self.here.world_size == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()
            answer_of_the_file_server()
        return torch.full((8,), index / 100)


@thread("https://github.com/pytorch/pytorch/issues/41067", "data-stall", "rank-behind", ranks=(1, 2))
def outage_that_two_ranks_meet(here: Here) -> None:
    """The file server is down: rank 1 reads a sample from it, rank 2 a table in its step, rank 0 waits for both."""

    class Reading(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx) and here.rank == 2:
                answer_of_the_file_server()
            return self.loss(first_tensor(batch))

    here.fit(net=Reading(here), data=in_order(here, OnServer(here)))


@thread("https://github.com/FlagOpen/FlagEmbedding/issues/846", "late-at-init", ranks=(1, 2), moment=Moment.START)
def ranks_that_start_one_after_the_other(here: Here) -> None:
    """Each rank waits a minute longer than the one before, so that not all of them read the cache at once."""

    class Staggered(Net):
        def setup(self, stage: str) -> None:
            if here.rank:
                here.begins()
                time.sleep(60.0 * here.rank)  # <- here

    here.fit(net=Staggered(here))
