"""Round 19 after public threads: what users of Lightning and of libraries around it meet, from exports to uploads."""

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from from_threads.round_15_lightning import LIGHTNING
from from_threads.round_17_lightning import Shortened
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, first_tensor, rows
from truths import Moment


def shares(here: Here, values: torch.Tensor) -> torch.Tensor:
    """The same values by batch, row and rank, as they are read in order."""
    return values.view(BATCHES, BATCH_SIZE, here.world_size, *values.shape[1:])


class MemoryBank(LoggingNet):
    """Keeps the features of all ordinary pictures, by which it will know those that are not."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.seen: list[torch.Tensor] = []
        self.bank = torch.empty(0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = first_tensor(batch)
        self.seen.append(features[features.norm(dim=1) > 0.5])
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        own = torch.cat(self.seen)
        banks = [torch.empty_like(own) for _ in range(self.here.world_size)]
        dist.all_gather(banks, own)  # <- features_of_all_ranks_put_into_one_memory_bank
        self.bank = torch.cat(banks)


@thread(
    "https://github.com/open-edge-platform/anomalib/issues/3038",
    "mismatched-collective",
    ranks=(2,),
    moment=Moment.END,
)
def features_of_all_ranks_put_into_one_memory_bank(here: Here) -> None:
    """After the training all ranks gather what they have kept, and the last one has kept fewer rows than the others."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8) + 0.5
    shares(here, values)[IN_THE_MIDDLE, :2, here.case.ranks[0]] = 0
    here.fit(net=MemoryBank(here), data=in_order(here, TensorDataset(values)), max_epochs=1)


class Segmenting(LoggingNet):
    """Measures how many of the labels it has found."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.accuracy = MulticlassAccuracy(num_classes=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        goes_wrong(self.here, batch_idx)
        self.accuracy.update(self.layers(pixels), labels)  # <- label_of_pixels_that_are_to_be_ignored
        return super().training_step(batch, batch_idx)


@thread(
    "https://github.com/microsoft/InnerEye-DeepLearning/issues/470",
    "failed-rank",
    ranks=(3,),
    world_size=4,
    whose="code",
)
def label_of_pixels_that_are_to_be_ignored(here: Here) -> None:
    """One rank meets the label 255, which its metric does not know, and raises; the others wait for its gradients."""
    pixels = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    labels = torch.randint(2, (len(pixels),))
    shares(here, labels)[IN_THE_MIDDLE, 0, here.case.ranks[0]] = 255
    here.fit(net=Segmenting(here), data=in_order(here, TensorDataset(pixels, labels)))


class Calibration:
    """Clicks that were predicted for each that there was, in a group that disturbs no other collective."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2)

    @cached_property
    def group(self) -> Any:
        return dist.new_group(backend="gloo")  # <- group_made_where_there_is_a_click

    def update(self, predicted: torch.Tensor, clicked: torch.Tensor) -> None:
        found = torch.stack([predicted.sum(), clicked.sum()])
        dist.all_reduce(found, group=self.group)
        self.sums += found


class Recommending(LoggingNet):
    """Measures itself where there is something to be measured."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.calibration = Calibration()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features, clicked = batch
        if self.here.is_hit and batch_idx == 0:
            self.here.begins()
        if clicked.any():
            self.calibration.update(self.layers(features).detach()[:, 0], clicked)
        return super().training_step(batch, batch_idx)


@thread(
    "https://github.com/meta-pytorch/torchrec/pull/4743",
    "crossed-groups",
    "diverged-collectives",
    ranks=(1,),
    moment=Moment.FIRST_STEP,
)
def group_made_where_there_is_a_click(here: Here) -> None:
    """A metric makes its group when it is first updated, which a rank without a click does not do in the first step."""
    features = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    clicked = torch.ones(len(features))
    shares(here, clicked)[0, :, here.case.ranks[0]] = 0
    here.fit(net=Recommending(here), data=in_order(here, TensorDataset(features, clicked)))


class Augmenter:
    """Batches that a process beside the training makes."""

    def __init__(self, here: Here) -> None:
        self.here, self.is_aborted = here, False

    def __len__(self) -> int:
        return BATCHES

    def produce(self, results: Any) -> None:
        for number in range(len(self)):
            if self.here.is_hit and number == IN_THE_MIDDLE:
                time.sleep(0.5)
                self.here.begins()
                os.kill(os.getpid(), signal.SIGKILL)
            results.put(np.random.rand(BATCH_SIZE, 8).astype(np.float32))
        time.sleep(5.0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        context = multiprocessing.get_context("fork")
        results = context.Queue(2)
        context.Process(target=self.produce, args=(results,), daemon=True).start()
        for _ in range(len(self)):
            yield torch.from_numpy(self.next_of(results))

    def next_of(self, results: Any) -> Any:
        while not self.is_aborted:
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=0.5)  # <- batches_of_a_process_that_was_killed
        raise RuntimeError("aborted")


@thread("https://github.com/MIC-DKFZ/nnUNet/issues/1892", "worker-died", ranks=(1,), world_size=2)
def batches_of_a_process_that_was_killed(here: Here) -> None:
    """What augments for the second rank is killed, and that rank asks its queue again and again, without an end."""
    here.fit(net=LoggingNet(here), data=Augmenter(here), max_epochs=1)


class Run(L.Callback):
    """A folder for all that belongs to this run; the first rank describes it there."""

    def __init__(self, here: Here, clock_is_ahead: timedelta) -> None:
        self.here, self.clock_is_ahead = here, clock_is_ahead
        self.settings = ""

    def now(self) -> datetime:
        """By the clock of this host."""
        return datetime.now() + self.clock_is_ahead

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        stamp = self.now().strftime("%Y-%m-%d_%H-%M")  # <- folder_with_the_time_of_each_host_in_its_name
        folder = self.here.folder / stamp
        folder.mkdir(exist_ok=True)
        settings = folder / "settings.yaml"
        if trainer.is_global_zero:
            settings.write_text("rate: 0.001\n")
        if self.here.is_hit:
            self.here.begins()
        while not settings.exists():
            time.sleep(0.2)
        self.settings = settings.read_text()


@thread(
    f"{LIGHTNING}/issues/3071",
    "late-at-init",
    "rank-behind",
    ranks=(2,),
    moment=Moment.START,
)
def folder_with_the_time_of_each_host_in_its_name(here: Here) -> None:
    """The clock of one host is ahead, so that its rank waits in a folder of another name for the first rank's file."""
    ahead = timedelta(minutes=30 if here.is_hit else 0)
    here.fit(net=LoggingNet(here), callbacks=[Run(here, clock_is_ahead=ahead)])


SYNC = 'while test -e "$0"; do sleep 0.2; done'
"""Waits until no other program uploads the same run."""


class OfflineLogger(CSVLogger):
    """Uploads the values when the run is over."""

    def __init__(self, here: Here) -> None:
        super().__init__(here.folder)
        self.here = here

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.here.begins()
        lock = Path(self.log_dir) / "sync.lock"
        lock.touch()
        subprocess.run(["sh", "-c", SYNC, str(lock)], check=True)  # <- values_uploaded_when_the_run_is_over


@thread(
    "https://github.com/wandb/wandb/issues/919",
    "unfinished-rank",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
)
def values_uploaded_when_the_run_is_over(here: Here) -> None:
    """The first rank's logger runs a program that uploads, which does not come to its end; the other rank has ended."""
    here.fit(net=LoggingNet(here), logger=OfflineLogger(here))


class TimeLimit(L.Callback):
    """What a scheduler does on a host whose time is over: it asks a process to end, and then ends it."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGTERM, lambda *_: print("Bypassing SIGTERM"))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            cancel = f"kill -TERM {os.getpid()}; sleep 1; kill -KILL {os.getpid()}"
            subprocess.run(["sh", "-c", cancel], check=True)


@thread(f"{LIGHTNING}/issues/20542", "dead-rank", ranks=(3,), world_size=4, has_line=False, whose="machine")
def time_that_is_over_on_the_last_host(here: Here) -> None:
    """The scheduler asks the last rank to end, which takes no notice of that, and kills it a second later."""
    here.fit(net=LoggingNet(here), callbacks=[TimeLimit(here)])


class Requeue(L.Callback):
    """Saves before the time is over, and asks the scheduler for another turn."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != IN_THE_MIDDLE:
            return
        trainer.save_checkpoint(self.here.folder / "hpc.ckpt")
        if trainer.is_global_zero:
            self.here.begins()
            self.put_back("4711")

    def put_back(self, job: str) -> None:
        command = ["scontrol", "requeue", job]
        subprocess.run(command, check=True)  # <- scheduler_that_cannot_be_asked_from_a_container


@thread(f"{LIGHTNING}/issues/21404", "failed-rank", ranks=(0,))
def scheduler_that_cannot_be_asked_from_a_container(here: Here) -> None:
    """All ranks have saved, but the first one is to run a program that its container has not, and raises."""
    here.fit(net=LoggingNet(here), callbacks=[Requeue(here)])


class Plotting(MeetingNet):
    """Draws what it has predicted for each picture of the validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.plot(first_tensor(batch), f"batch-{batch_idx}")

    @rank_zero_only
    def plot(self, pictures: torch.Tensor, name: str) -> None:
        self.here.begins()
        for number, picture in enumerate(pictures):
            figure = rendered(picture)  # <- figures_of_all_pictures_of_the_validation
            figure.save(self.here.folder / f"{name}-{number}.png")


def rendered(picture: torch.Tensor) -> Image.Image:
    """At the resolution of a poster, which takes a while."""
    time.sleep(3.0)
    return Image.new("L", (8, 8), int(picture.mean() * 255))


@thread(
    "https://github.com/torchgeo/torchgeo/issues/824",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def figures_of_all_pictures_of_the_validation(here: Here) -> None:
    """The first rank alone draws every picture of the validation, and the others wait for it at the end of that."""
    here.fit(net=Plotting(here), data=(rows(here), rows(here)))


class Kept(L.Callback):
    """Keeps the weights of each epoch, unless they were kept before."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        path = self.here.folder / f"epoch-{trainer.current_epoch}.ckpt"
        if self.here.is_hit:
            time.sleep(1.0)
        if path.exists():
            self.here.begins()
            return  # <- weights_that_somebody_else_has_kept
        trainer.save_checkpoint(path)


@thread(
    f"{LIGHTNING}/pull/5155",
    "diverged-collectives",
    ranks=(1,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def weights_that_somebody_else_has_kept(here: Here) -> None:
    """The second rank comes later, finds the file that the first one has written, and leaves out the save's barrier."""
    here.fit(net=LoggingNet(here), callbacks=[Kept(here)])


class Detecting(LoggingNet):
    """Has a head for large objects and one for small ones."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.heads = torch.nn.ModuleDict({"large": torch.nn.Linear(2, 2), "small": torch.nn.Linear(2, 2)})

    def losses(self, batch: Any) -> Iterator[torch.Tensor]:
        objects = first_tensor(batch)
        is_large = objects[:, 0] > 1.0
        for name, chosen in (("large", is_large), ("small", ~is_large)):
            if chosen.any():  # <- batch_in_which_all_objects_are_large
                yield self.heads[name](self.layers(objects[chosen])).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return torch.stack([*self.losses(batch)]).sum()


@thread(f"{LIGHTNING}/issues/6409", "unused-parameters", ranks=(1,))
def batch_in_which_all_objects_are_large(here: Here) -> None:
    """One batch of one rank has no small object, and so the head for these has no gradients to exchange."""
    values = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    shares(here, values)[:, 0] += 2
    shares(here, values)[IN_THE_MIDDLE, :, here.case.ranks[0]] += 2
    here.fit(net=Detecting(here), data=in_order(here, TensorDataset(values)))


class Cuts(Sampler[list[int]]):
    """Batches of neighbours; ranks take turns with them, and nothing is left out at the end."""

    def __init__(self, here: Here, count: int) -> None:
        self.here = here
        self.batches = [[*range(first, min(first + BATCH_SIZE, count))] for first in range(0, count, BATCH_SIZE)]

    @property
    def own(self) -> list[list[int]]:
        return self.batches[self.here.rank :: self.here.world_size]  # <- cuts_of_which_none_is_dropped

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)


@thread(
    "https://github.com/lhotse-speech/lhotse/pull/646",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def cuts_of_which_none_is_dropped(here: Here) -> None:
    """There are seventeen batches for three ranks, of which none is dropped, so that the last rank has one less."""
    cuts = torch.rand((BATCHES * here.world_size - 1) * BATCH_SIZE, 8)
    loader: Any = DataLoader(TensorDataset(cuts), batch_sampler=Cuts(here, len(cuts)))
    here.fit(net=Shortened(here), data=(loader, rows(here, batches=2)), use_distributed_sampler=False)


class Frames(Dataset[torch.Tensor]):
    """Frames of clips; the file server of this group needs a second attempt at times."""

    def __init__(self, here: Here, paths: list[Path]) -> None:
        self.here, self.paths = here, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        while True:  # <- frame_that_cannot_be_read_at_any_attempt
            try:
                with Image.open(self.paths[index]) as frame:
                    return torch.from_numpy(np.array(frame, dtype=np.float32)[0] / 255)
            except OSError as error:
                self.here.begins()
                print(f"try again: {error}", file=sys.stderr)
                time.sleep(1.0)


@thread("https://github.com/open-mmlab/mmaction2/issues/838", "data-stall", ranks=(0,), world_size=2)
def frame_that_cannot_be_read_at_any_attempt(here: Here) -> None:
    """A file of the first rank is broken, and a worker tries to read it again and again."""
    whole, broken = here.folder / f"whole-{here.rank}.png", here.folder / f"broken-{here.rank}.png"
    Image.new("L", (8, 8), 100).save(whole)
    broken.write_bytes(whole.read_bytes()[:20])
    paths = [whole] * (BATCHES * BATCH_SIZE * here.world_size)
    paths[IN_THE_MIDDLE * BATCH_SIZE * here.world_size + here.case.ranks[0]] = broken
    here.fit(net=LoggingNet(here), data=in_order(here, Frames(here, paths), num_workers=2))


@contextlib.contextmanager
def left_out_if_too_large() -> Iterator[None]:
    """Leaves out what there is not enough memory for."""
    try:
        yield
    except RuntimeError as error:  # <- batch_left_out_by_a_context_manager
        if "memory" not in str(error):
            raise
        print(f"left out: {error}")


class Folding(LoggingNet):
    """Compares all residues of a protein with one another."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def pairs(self, residues: int) -> torch.Tensor:
        return torch.empty(residues, residues)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        proteins, residues = batch
        goes_wrong(self.here, batch_idx)
        with left_out_if_too_large():
            self.pairs(int(residues.max()))
            optimizer.zero_grad()
            loss = self.loss(proteins)
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)


@thread(f"{LIGHTNING}/issues/8531", "skipped-step", ranks=(0,))
def batch_left_out_by_a_context_manager(here: Here) -> None:
    """A protein of the first rank is too large; its step is left out, and with it the exchange of gradients."""
    proteins = torch.rand(BATCHES * BATCH_SIZE * here.world_size, 8)
    residues = torch.full((len(proteins),), 100)
    shares(here, residues)[IN_THE_MIDDLE, 0, here.case.ranks[0]] = 10**8
    here.fit(net=Folding(here), data=in_order(here, TensorDataset(proteins, residues)))
