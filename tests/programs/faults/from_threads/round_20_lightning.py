"""Round 20 after public threads: what users of Lightning and of libraries around it meet, from caches to metrics."""

import contextlib
import fcntl
import multiprocessing
import operator
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import combinations, starmap
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
import yaml
from from_threads.round_15_lightning import LIGHTNING
from from_threads.round_17_lightning import Shortened
from from_threads.round_18_lightning import OnTerminal
from from_threads.round_19_lightning import shares
from lightning.pytorch.utilities import rank_zero_only
from numpy.lib.stride_tricks import as_strided
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchmetrics import Metric
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


class Distances(Metric):
    """Between objects and where they were found; pictures stay apart, so there is a tensor for each of them."""

    full_state_update = False
    found: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)

    def update(self, predicted: torch.Tensor, true: torch.Tensor) -> None:
        self.found.append((predicted - true).norm(dim=1))

    def compute(self) -> torch.Tensor:
        return torch.cat(self.found).mean()


class Locating(LoggingNet):
    """Measures how far from its objects it is."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.distances = Distances()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pictures = first_tensor(batch)
        has_object = pictures[:, 7] > 0
        if not has_object.any():
            self.here.begins()
            return  # <- pictures_for_which_a_metric_has_a_tensor_each
        self.distances.update(self.layers(pictures[has_object]), pictures[has_object, :2])

    def on_validation_epoch_end(self) -> None:
        self.print(f"mean distance: {self.distances.compute():.3f}")
        self.distances.reset()


@thread(
    "https://github.com/Lightning-AI/torchmetrics/issues/3336",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def pictures_for_which_a_metric_has_a_tensor_each(here: Here) -> None:
    """A metric gathers one tensor after the other, and the last rank has one less: a batch of it has no object."""
    pictures = torch.rand(2 * BATCH_SIZE * here.world_size, 8) + 0.1
    pictures.view(2, BATCH_SIZE, here.world_size, 8)[1, :, here.case.ranks[0], 7] = 0
    here.fit(net=Locating(here), data=(rows(here), in_order(here, TensorDataset(pictures))))


class Weighted(LoggingNet):
    """Samples count for as much as somebody trusts them."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples, trust = batch
        loss = (self.layers(samples).square().mean(dim=1) * trust).mean()
        self.log("loss", loss)
        return loss


class Settled(L.Callback):
    """Leaves the first layer as it is, once the loss is small enough."""

    def __init__(self, here: Here, threshold: float = 1e-6) -> None:
        self.here, self.threshold = here, threshold

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["loss"] < self.threshold:
            self.here.begins()
            module.layers[0].requires_grad_(False)  # <- layer_that_one_rank_has_finished


@thread(f"{LIGHTNING}/issues/20340", "unused-parameters", ranks=(1,))
def layer_that_one_rank_has_finished(here: Here) -> None:
    """Each rank compares its own loss, and one of them freezes a layer whose gradients the others still exchange."""
    trust = torch.ones(BATCHES * BATCH_SIZE * here.world_size)
    shares(here, trust)[IN_THE_MIDDLE, :, here.case.ranks[0]] = 0
    data = TensorDataset(torch.rand(len(trust), 8), trust)
    here.fit(net=Weighted(here), data=in_order(here, data), callbacks=[Settled(here)])


CLOCKS = (7, 8, 5)
"""What the processes take for a seed, each from a clock of its own."""


class Drawn(Data):
    """So many of all samples, drawn anew for each run."""

    def train_dataloader(self) -> Any:
        draws = random.Random(CLOCKS[self.here.rank])
        own = [number for number in range(120) if draws.random() < 0.6]  # <- samples_that_each_rank_draws_for_itself
        return DataLoader(Subset(TensorDataset(torch.rand(120, 8)), own), BATCH_SIZE)

    def val_dataloader(self) -> Any:
        return rows(self.here, batches=2)


@thread(f"{LIGHTNING}/issues/9851", "uneven-batches", ranks=(2,), moment=Moment.EPOCH_END)
def samples_that_each_rank_draws_for_itself(here: Here) -> None:
    """There is no common seed, and the last rank has drawn fewer samples than the others, and so has fewer batches."""
    here.trainer().fit(Shortened(here), datamodule=Drawn(here))


class Engine:
    """Builds what runs a graph: the first one is in a cache, and each other shape is tuned anew."""

    def __init__(self, here: Here) -> None:
        self.here, self.is_in_cache = here, True

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if not self.is_in_cache:
            self.here.begins()
            time.sleep(FOR_LONG_S)
        self.is_in_cache = False
        return graph.forward


class Compiled(LoggingNet):
    """Its loss is compiled for the shape that batches have."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.compiled = torch.compile(self.mean_square, backend=Engine(here), dynamic=False)

    def mean_square(self, samples: torch.Tensor) -> torch.Tensor:
        return self.layers(samples).square().mean()

    def loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.compiled(batch)  # <- batch_of_three_after_a_row_was_left_out
        return loss


def without_gaps(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    """Leaves out the samples in which a value is missing."""
    return torch.stack([row for (row,) in samples if not row.isnan().any()])


@thread("https://github.com/pytorch/pytorch/issues/111636", "compile-skew", ranks=(2,), whose="code")
def batch_of_three_after_a_row_was_left_out(here: Here) -> None:
    """One batch of the last rank is smaller than all others, so the model is compiled once more, on this rank only."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    shares(here, values)[IN_THE_MIDDLE, 0, here.case.ranks[0], 5] = torch.nan
    here.fit(net=Compiled(here), data=in_order(here, TensorDataset(values), collate_fn=without_gaps))


class PostMortem(L.Callback):
    """Looks into whatever has gone wrong."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if not self.here.is_hit:
            return
        self.here.begins()
        debugger = OnTerminal()
        debugger.reset()
        debugger.interaction(None, exception.__traceback__)  # <- debugger_opened_by_an_exception_of_one_rank


class Embedding(LoggingNet):
    """Looks up a vector for the word of each row."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.words = torch.nn.Embedding(100, 8)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.layers(self.words(first_tensor(batch))).square().mean()


@thread(
    "https://github.com/ecmwf/WeatherGenerator/issues/1565",
    "at-breakpoint",
    ranks=(1,),
    world_size=2,
)
def debugger_opened_by_an_exception_of_one_rank(here: Here) -> None:
    """A word is not in the table, and a callback opens a debugger for the exception, in which nobody types."""
    words = torch.randint(100, (BATCHES * BATCH_SIZE * here.world_size,))
    shares(here, words)[IN_THE_MIDDLE, 0, here.case.ranks[0]] = 100
    here.fit(net=Embedding(here), data=in_order(here, TensorDataset(words)), callbacks=[PostMortem(here)])


class Recordings(Dataset[torch.Tensor]):
    """Eight windows of each recording, at equal distances."""

    def __init__(self, here: Here, lengths: list[int]) -> None:
        self.here, self.lengths = here, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        signal = np.random.rand(1600).astype(np.float32)
        hop = self.lengths[index] // 8
        if hop > len(signal):
            self.here.begins()
        windows = as_strided(signal, shape=(8, 200), strides=(4 * hop, 4))
        return torch.from_numpy(windows.mean(axis=1))  # <- recording_shorter_than_its_header_says


@thread(
    "https://github.com/Stability-AI/stable-audio-tools/issues/117",
    "worker-died",
    ranks=(1,),
    world_size=2,
    whose="code",
)
def recording_shorter_than_its_header_says(here: Here) -> None:
    """A worker of the second rank looks for windows behind the end of a recording, and ends by a segmentation fault."""
    lengths = torch.full((BATCHES * BATCH_SIZE * here.world_size,), 1600)
    shares(here, lengths)[IN_THE_MIDDLE, 1, here.case.ranks[0]] = 10**11
    here.fit(net=LoggingNet(here), data=in_order(here, Recordings(here, lengths.tolist()), num_workers=1))


@contextlib.contextmanager
def opened_alone(path: Path) -> Iterator[Any]:
    """Opens a file that no other process has opened in this way."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{path.name} is locked by another process; waiting until the lock is released", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class Molecules(Data):
    """Are converted once, by whichever process comes first."""

    def setup(self, stage: str) -> None:
        time.sleep(0 if self.here.is_hit else 1.0)
        with opened_alone(self.here.folder / "molecules.lock") as done:
            done.seek(0)
            if not done.read():
                self.convert()  # <- molecules_converted_by_whoever_has_the_lock
                done.write("done")

    def convert(self) -> None:
        self.here.begins()
        for number in range(400):
            time.sleep(0.3)
            (self.here.folder / f"{number}.npz").touch()


@thread(
    "https://github.com/choderalab/modelforge/issues/244",
    "file-lock",
    ranks=(1,),
    moment=Moment.START,
    whose="code",
)
def molecules_converted_by_whoever_has_the_lock(here: Here) -> None:
    """The rank that got the lock converts all data with it, and the others wait for the lock for as long."""
    here.trainer().fit(LoggingNet(here), datamodule=Molecules(here))


class Naming(MeetingNet):
    """Writes a list of all files that it was validated on."""

    def __init__(self, here: Here, names: list[str]) -> None:
        super().__init__(here)
        self.names = names

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        print(len(self.gathered("\t".join(self.names))), "files")

    def gathered(self, text: str) -> list[str]:
        own = torch.tensor([*text.encode()], dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(self.here.world_size)]
        dist.all_gather(everyone, own)  # <- names_gathered_as_they_are_spelled
        return [bytes(one.tolist()).decode() for one in everyone]


@thread(
    "https://github.com/pytorch/ignite/issues/1569",
    "mismatched-collective",
    ranks=(3,),
    world_size=4,
    moment=Moment.VALIDATION,
)
def names_gathered_as_they_are_spelled(here: Here) -> None:
    """The names of files are gathered as bytes, of which the last rank has more than the others."""
    names = [f"scan-{'repeated-' if here.is_hit else ''}{number}.nii.gz" for number in range(8)]
    here.fit(net=Naming(here, names), data=(rows(here), rows(here, batches=2)))


PATIENCE = timedelta(seconds=3)
"""Enough for what is exchanged among CPUs."""


class Ranked(MeetingNet):
    """Gathers what it has predicted on CPUs, in a group of its own."""

    def setup(self, stage: str) -> None:
        self.cpus = dist.new_group(backend="gloo", timeout=PATIENCE)  # <- group_less_patient_than_its_slowest_rank

    def on_validation_epoch_end(self) -> None:
        self.draw()
        scores = torch.rand(4)
        everyone = [torch.empty_like(scores) for _ in range(self.here.world_size)]
        dist.all_gather(everyone, scores, group=self.cpus)

    @rank_zero_only
    def draw(self) -> None:
        self.here.begins()
        time.sleep(7.0)


@thread(
    "https://github.com/ray-project/ray/pull/50223",
    "timeout-misuse",
    ranks=(),
    moment=Moment.VALIDATION,
    has_ranks=False,
    whose="code",
)
def group_less_patient_than_its_slowest_rank(here: Here) -> None:
    """The first rank draws for seven seconds; a group that was made for CPUs waits for three of them, and gives up."""
    here.fit(net=Ranked(here), data=(rows(here), rows(here, batches=2)))


class Verifying(MeetingNet):
    """Counts the trials in which both sides are the same speaker."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.speakers: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        features, turns = batch
        super().validation_step(features, batch_idx)
        self.speakers += [turn % 7 for count in turns.tolist() for turn in range(count)]

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        targets = sum(starmap(operator.eq, combinations(self.speakers, 2)))  # <- trials_of_a_meeting_with_many_turns
        self.log("targets", float(targets), sync_dist=True)
        self.speakers.clear()


@thread(
    "https://github.com/Lightning-AI/torchmetrics/issues/1024",
    "gil-held",
    ranks=(0,),
    world_size=2,
    moment=Moment.VALIDATION,
    whose="code",
)
def trials_of_a_meeting_with_many_turns(here: Here) -> None:
    """All pairs of turns are compared in one go at the end, and a meeting of the first rank has very many turns."""
    turns = torch.full((2 * BATCH_SIZE * here.world_size,), 10)
    turns[here.case.ranks[0]] = 200_000
    data = TensorDataset(torch.rand(len(turns), 8), turns)
    here.fit(net=Verifying(here), data=(rows(here), in_order(here, data)))


SETTINGS = """
max_epochs: 2
limit_train_batches: 1.0
"""


def settings_of(overrides: list[str]) -> dict[str, Any]:
    """As the file says, and what the command line puts in its place."""
    pairs = (override.split("=") for override in overrides)
    return yaml.safe_load(SETTINGS) | {name: yaml.safe_load(value) for name, value in pairs}


class Validated(MeetingNet):
    """Is validated after each epoch, however long it is."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return super().training_step(batch, batch_idx)


@thread(
    "https://github.com/hydra-ecosystem/hydra/issues/2070",
    "different-trainer-settings",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def overrides_that_one_process_was_not_started_with(here: Here) -> None:
    """The last process was started without what the command line had asked for, and has three batches more."""
    overrides = [] if here.is_hit else [f"limit_train_batches={IN_THE_MIDDLE}"]
    loaders = rows(here), rows(here, batches=2)
    here.fit(
        net=Validated(here), data=loaders, **settings_of(overrides)
    )  # <- overrides_that_one_process_was_not_started_with


class Scenarios(Data):
    """Have been extracted before; a folder of each log has one folder for each scenario."""

    def setup(self, stage: str) -> None:
        logs = [self.here.folder / f"log-{number}" for number in range(300)]
        self.scenarios = [
            scenario for log in logs for scenario in self.listed(log)
        ]  # <- scenarios_listed_on_a_slow_mount
        self.trainer.strategy.barrier("scenarios")  # type: ignore[union-attr]

    def listed(self, log: Path) -> Iterator[Path]:
        """Asks the mount of this host."""
        if self.here.is_hit:
            self.here.begins()
            time.sleep(0.5)
        yield from log.glob("*/scenario")


@thread(
    "https://github.com/motional/nuplan-devkit/issues/253",
    "late-at-init",
    ranks=(2,),
    moment=Moment.START,
    whose="machine",
)
def scenarios_listed_on_a_slow_mount(here: Here) -> None:
    """All ranks list the same folders; on the host of the last one that takes minutes, and the others wait for it."""
    here.trainer().fit(LoggingNet(here), datamodule=Scenarios(here))


REAPER = 'while ! test -e "$0"; do sleep 0.1; done; kill -KILL "$1"'
"""Ends a process as soon as the host has too little memory left."""


class LittleMemory(L.Callback):
    """There is a daemon on the host of the first rank that ends whatever is too large."""

    def __init__(self, here: Here) -> None:
        self.here, self.is_full = here, here.folder / "is-full"

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            subprocess.Popen(["sh", "-c", REAPER, str(self.is_full), str(os.getpid())])

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            self.is_full.touch()
            time.sleep(2.0)


@thread(f"{LIGHTNING}/issues/2913", "dead-rank", ranks=(0,), world_size=4, has_line=False, whose="machine")
def main_process_ended_by_a_daemon(here: Here) -> None:
    """The main process is killed, and the processes of all other ranks are left behind."""
    here.fit(net=LoggingNet(here), callbacks=[LittleMemory(here)])


class Archive(Dataset[torch.Tensor]):
    """Samples that workers take from one archive, one after the other; some of them are packed once more."""

    def __init__(self, here: Here, packed: list[int]) -> None:
        self.here, self.packed = here, packed
        self.lock = multiprocessing.get_context("fork").Lock()

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return self.unpacked(index) if index in self.packed else self.read(index)

    def unpacked(self, index: int) -> torch.Tensor:
        self.here.begins()
        with self.lock:  # <- sample_that_is_packed_twice
            return self.read(index).flip(0)

    def read(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 100)


@thread(f"{LIGHTNING}/issues/11242", "data-stall", ranks=(2,), moment=Moment.FIRST_STEP, whose="code")
def sample_that_is_packed_twice(here: Here) -> None:
    """A worker has the lock for the archive, and takes it a second time for a sample of the last rank's first batch."""
    archive = Archive(here, packed=[here.case.ranks[0] + here.world_size])
    here.fit(net=LoggingNet(here), data=in_order(here, archive, num_workers=1))
