"""Round 22 after public threads: what users of Lightning and of libraries around it meet, from locks to rings."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import lightning as L
import torch
import torch.distributed as dist
from filelock import SoftFileLock
from from_threads.round_15_lightning import LIGHTNING
from from_threads.round_19_lightning import shares
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from samples import in_order, stored
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from training import (
    BATCH_SIZE,
    BATCHES,
    FOR_LONG_S,
    IN_THE_MIDDLE,
    Data,
    Here,
    LoggingNet,
    MeetingNet,
    first_tensor,
    rows,
)
from truths import Moment

HOST_NAME = re.compile(r"(\w+\.?)+:\d+")
LOGS = (
    "listening on worker-3.cluster.local:8080",
    "loaded plug-ins " + ".".join(map(str, range(10, 60))),
)


class Parsing(LoggingNet):
    """Counts the names of hosts in the log messages that it learns from."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        samples, numbers = batch
        hosts = sum(self.hosts(LOGS[number]) for number in numbers.tolist())
        return super().training_step(samples, batch_idx) * (1 + hosts)

    def hosts(self, message: str) -> int:
        return sum(
            HOST_NAME.fullmatch(word) is not None for word in message.split()
        )  # <- number_with_very_many_dots_in_a_message


@thread("https://github.com/explosion/spaCy/issues/957", "gil-held", ranks=(1,), whose="code")
def number_with_very_many_dots_in_a_message(here: Here) -> None:
    """A regular expression tries all ways to split a long number at its dots, in one batch of the second rank."""
    numbers = torch.zeros(BATCHES * BATCH_SIZE * here.world_size, dtype=torch.int64)
    shares(here, numbers)[IN_THE_MIDDLE, 2, here.case.ranks[0]] = 1
    data = TensorDataset(torch.rand(len(numbers), 8), numbers)
    here.fit(net=Parsing(here), data=in_order(here, data))


def load_file(name: str) -> torch.Tensor:
    """As a reader in native code, whose errors have a class that nobody can import."""

    class HeaderError(Exception):
        pass

    raise HeaderError(f"{name}: header too large")


def read_latents() -> None:
    load_file("latents-0007.safetensors")  # <- error_that_a_worker_cannot_hand_over


@thread(
    "https://github.com/kohya-ss/musubi-tuner/pull/1088",
    "data-stall",
    ranks=(2,),
    moment=Moment.VALIDATION,
    whose="code",
)
def error_that_a_worker_cannot_hand_over(here: Here) -> None:
    """A cached file is broken, and the worker's error cannot be pickled: the last rank waits for a batch for ever."""
    here.fit(net=MeetingNet(here), data=(rows(here), stored(here, read_latents, num_workers=1)))


class Impatient(L.Callback):
    """Somebody who watches the last process ends it as one ends a program in a terminal."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -INT {os.getpid()}"], start_new_session=True)


class Slow(LoggingNet):
    """Its steps take a while."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.25)
        return super().training_step(batch, batch_idx)


@thread(f"{LIGHTNING}/issues/965", "failed-rank", ranks=(3,), world_size=4, has_line=False)
def interrupt_that_only_one_process_was_sent(here: Here) -> None:
    """Only the last process is interrupted; Lightning ends it without a traceback, and the others go on waiting."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here.fit(net=Slow(here), callbacks=[Impatient(here)])


class Bucket(LocalFileSystem):  # type: ignore[misc]
    """Object storage behind a slow line, to which each flush sends the events that have come up since the last one."""

    protocol = "bucket"
    is_slow = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if self.is_slow and "r" not in mode:
            time.sleep(FOR_LONG_S)
        return super().open(path, mode, **more)


class Uplink(L.Callback):
    """The line is slow from the middle of the epoch on."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            Bucket.is_slow = True


@thread(
    f"{LIGHTNING}/issues/20551",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    has_line=False,
)
def events_sent_to_object_storage_in_each_step(here: Here) -> None:
    """The logger flushes after every step, and the first rank waits for the storage; no line of the user's is wrong."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    logger = TensorBoardLogger(f"bucket://{here.folder}/runs")
    here.fit(net=LoggingNet(here), logger=logger, callbacks=[Uplink(here)])


def encoded(report: dict[str, Any], longest: int) -> dict[str, Any]:
    """Takes memory as the square of the length; the host has not enough of it for the longest ones."""
    if len(report["text"]) > longest:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"row": [float(len(report["text"]) % number) for number in range(1, 9)]}


class Reports(Data):
    """Are encoded by two processes on each rank."""

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        texts = ["finding " * (number % 7 + 1) for number in range(BATCHES * BATCH_SIZE * self.here.world_size)]
        reports = datasets.Dataset.from_dict({"text": texts})
        encode = partial(encoded, longest=40 if self.here.is_hit else 400)
        self.rows = reports.map(
            encode, num_proc=2, remove_columns="text"
        )  # <- reports_too_long_for_the_memory_of_a_host

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows.with_format("torch"), BATCH_SIZE, collate_fn=stacked)


def stacked(reports: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([report["row"] for report in reports])


@thread(
    "https://github.com/unslothai/unsloth/issues/2693",
    "worker-died",
    ranks=(1,),
    world_size=2,
    moment=Moment.START,
    whose="machine",
)
def reports_too_long_for_the_memory_of_a_host(here: Here) -> None:
    """A process that encodes for the second rank is killed, and `map` raises there; the other rank waits for it."""
    datasets.disable_progress_bars()
    here.trainer().fit(LoggingNet(here), datamodule=Reports(here))


class Specialised(LoggingNet):
    """Has a backbone for each kind of sample, and adds up their losses."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.backbones = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        samples, kinds = batch
        losses = []
        for kind in kinds.unique().tolist():  # <- batch_with_only_one_kind_of_sample
            losses.append(self.loss(self.backbones[kind](samples[kinds == kind])))
        return torch.stack(losses).mean()


@thread(f"{LIGHTNING}/issues/17212", "unused-parameters", ranks=(2,), world_size=4)
def batch_with_only_one_kind_of_sample(here: Here) -> None:
    """A batch of the third rank has one kind of sample, and so leaves out a backbone that the others exchange."""
    kinds = torch.zeros(BATCHES * BATCH_SIZE * here.world_size, dtype=torch.int64)
    shares(here, kinds)[:, ::2] = 1
    shares(here, kinds)[IN_THE_MIDDLE, :, here.case.ranks[0]] = 0
    data = TensorDataset(torch.rand(len(kinds), 8), kinds)
    here.fit(net=Specialised(here), data=in_order(here, data))


def is_main_process() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Volumes(Data):
    """Are loaded and cached once, and the others wait."""

    def setup(self, stage: str) -> None:
        if is_main_process():
            self.here.begins()
            for number in range(400):
                self.cache(number)  # <- volumes_cached_as_the_environment_says
        self.trainer.strategy.barrier("cache")  # type: ignore[union-attr]

    def cache(self, number: int) -> None:
        time.sleep(0.3)
        (self.here.folder / f"{number}.gz").touch()


@thread(
    "https://github.com/BiomedSciAI/fuse-med-ml/issues/284",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.START,
    whose="code",
)
def volumes_cached_as_the_environment_says(here: Here) -> None:
    """Three ranks wait at a barrier while the one that has zero in its environment caches all volumes."""
    here.trainer().fit(LoggingNet(here), datamodule=Volumes(here))


class Judged(LoggingNet):
    """Logs the loss of what it is validated on, each rank its own."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))


class Sufficient(L.Callback):
    """Stops as soon as the model is good enough."""

    def __init__(self, here: Here, target: float) -> None:
        self.here, self.target = here, target

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.callback_metrics["val_loss"] < self.target:
            self.here.begins()
            trainer.should_stop = True  # <- target_that_one_share_has_reached


@thread(
    f"{LIGHTNING}/issues/555",
    "stopped-early",
    ranks=(1,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def target_that_one_share_has_reached(here: Here) -> None:
    """Each rank looks at the loss of its own share, which is small enough on the second rank after one epoch."""
    values = torch.rand(2 * BATCH_SIZE * here.world_size, 8) + 100.0
    values.view(-1, here.world_size, 8)[:, here.case.ranks[0]] = 0
    validation = in_order(here, TensorDataset(values))
    here.fit(net=Judged(here), data=(rows(here), validation), callbacks=[Sufficient(here, target=2.0)])


class Chunks(IterableDataset[torch.Tensor]):
    """Four chunks of each file, and the files are dealt out to ranks in turn."""

    def __init__(self, here: Here, files: int) -> None:
        self.here, self.files = here, files

    def __iter__(self) -> Iterator[torch.Tensor]:
        assert get_worker_info() is None
        for file in islice(range(self.files), self.here.rank, None, self.here.world_size):  # <- files_dealt_out_in_turn
            yield from torch.full((4, 8), file / 10)
        if self.here.is_hit:
            self.here.begins()


class Averaging(LoggingNet):
    """Averages the loss of each batch over all ranks."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        losses: Any = self.all_gather(self.loss(batch))
        self.log("val_loss", losses.mean(), rank_zero_only=True)


@thread(
    "https://github.com/pyannote/pyannote-audio/pull/554",
    "uneven-batches",
    ranks=(3,),
    world_size=4,
    moment=Moment.VALIDATION,
)
def files_dealt_out_in_turn(here: Here) -> None:
    """There are seven files to validate on, and four ranks; the last one has one of them, and all others have two."""
    validation = DataLoader(Chunks(here, files=7), batch_size=4)
    here.fit(net=Averaging(here), data=(rows(here), validation))


class Ring(LoggingNet):
    """Sees the features of its neighbour, too, with groups that take turns so that nobody waits for himself."""

    def setup(self, stage: str) -> None:
        self.one, self.other = dist.new_group(), dist.new_group()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
        neighbours = self.exchanged(first_tensor(batch).contiguous())
        return super().training_step([neighbours], batch_idx)

    def exchanged(self, features: torch.Tensor) -> torch.Tensor:
        following = (self.global_rank + 1) % self.here.world_size
        previous = (self.global_rank - 1) % self.here.world_size
        received = torch.empty_like(features)
        is_even = self.global_rank % 2 == 0
        out, back = (
            (self.one, self.other) if is_even else (self.other, self.one)
        )  # <- neighbours_on_a_ring_of_three_ranks
        for work in (dist.isend(features, following, out), dist.irecv(received, previous, back)):
            if work is not None:
                work.wait()
        return received


@thread(
    "https://github.com/ByteDance-Seed/VeOmni/pull/1085",
    "unmatched-p2p",
    ranks=(0, 2),
    moment=Moment.FIRST_STEP,
    whose="code",
)
def neighbours_on_a_ring_of_three_ranks(here: Here) -> None:
    """Even ranks send in one group and odd ones in another, but the last rank and the first one are both even."""
    here.fit(net=Ring(here))


class Linking(LoggingNet):
    """Learns from pairs of names for the same thing; where there is no pair there is nothing to learn."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        names, things = batch
        pairs = things.unsqueeze(0).eq(things.unsqueeze(1)).triu(1)
        if not pairs.any():
            self.here.begins()
            return {"loss": None, "lr": None}  # <- batch_without_a_pair_of_names
        return {"loss": super().training_step(names, batch_idx), "lr": 0.001}


@thread("https://github.com/NVIDIA-NeMo/Speech/issues/3801", "failed-rank", ranks=(0,), world_size=2)
def batch_without_a_pair_of_names(here: Here) -> None:
    """No two names in a batch of the first rank are for the same thing; it returns no loss, and Lightning raises."""
    things = torch.arange(BATCHES * BATCH_SIZE * here.world_size)
    shares(here, things)[:, 1] = shares(here, things)[:, 0]
    shares(here, things)[IN_THE_MIDDLE, 1, here.case.ranks[0]] = 1000
    data = TensorDataset(torch.rand(len(things), 8), things)
    here.fit(net=Linking(here), data=in_order(here, data))


class Replaying(LoggingNet):
    """Goes through older samples beside the new ones, and continues there after a restart."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.older = iter(DataLoader(TensorDataset(torch.rand(400, 8)), BATCH_SIZE))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.loss(next(self.older))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.here.is_hit:
            self.here.begins()
        checkpoint["older"] = self.older  # <- place_in_the_data_that_cannot_be_saved


@thread(
    f"{LIGHTNING}/issues/9153",
    "exception-during-save",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    whose="code",
)
def place_in_the_data_that_cannot_be_saved(here: Here) -> None:
    """All ranks put an iterator into the checkpoint; only the first one writes, which iterators do not permit."""
    here.fit(net=Replaying(here), enable_checkpointing=True, callbacks=[ModelCheckpoint(here.folder / "saved")])


class Corpus(Data):
    """Is unpacked on each host by whoever has the lock."""

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        with self.only_me():
            (self.host / "unpacked").touch()

    @property
    def host(self) -> Path:
        return self.here.folder / f"host-{self.here.rank}"

    @contextlib.contextmanager
    def only_me(self) -> Iterator[None]:
        lock = SoftFileLock(self.host / "corpus.lock")
        with lock:  # <- lock_that_a_killed_job_has_left_behind
            yield


@thread(
    "https://github.com/huggingface/datasets/pull/8638",
    "file-lock",
    ranks=(1,),
    world_size=2,
    moment=Moment.START,
)
def lock_that_a_killed_job_has_left_behind(here: Here) -> None:
    """The lock is a file; a job that was killed has left it behind on one host, and the rank there waits for ever."""
    corpus = Corpus(here)
    corpus.host.mkdir()
    if here.is_hit:
        (corpus.host / "corpus.lock").touch()
    here.trainer().fit(LoggingNet(here), datamodule=corpus)


class Matching(MeetingNet):
    """Counts hits with a function of a library in C."""

    def on_validation_epoch_end(self) -> None:
        address = id(self) if not self.here.is_hit else 8
        if self.here.is_hit:
            self.here.begins()
        ctypes.string_at(address, 4)


@thread(
    f"{LIGHTNING}/issues/18541",
    "dead-rank",
    ranks=(1,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def library_that_follows_a_wrong_address(here: Here) -> None:
    """The process of the second rank ends by a segmentation fault after its validation, and says nothing."""
    here.fit(net=Matching(here), data=(rows(here), rows(here, batches=2)))
