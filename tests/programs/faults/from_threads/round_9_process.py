"""Round 9 after public threads: saves, locks, children, signals, loggers and services beside the training."""

import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import Dataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, Net, rows
from truths import Moment

LOG = logging.getLogger("train")


class Tracking(Logger):
    """What all of the loggers below have."""

    name = "tracking"
    version = 0

    def log_hyperparams(self, *args: Any, **keywords: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass


class Sharded(L.Callback):
    """Each rank writes its shard into a folder of the step, which the main process creates."""

    def __init__(self, here: Here, root: Path) -> None:
        self.here, self.root = here, root

    def folder(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    @rank_zero_only
    def create(self, folder: Path) -> None:
        if folder.exists():
            self.here.begins()
            raise FileExistsError(f"checkpoint directory {folder} already exists")  # <- folder_of_an_interrupted_save
        folder.mkdir(parents=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        folder = self.folder(trainer.global_step)
        self.create(folder)
        dist.barrier()
        torch.save(module.state_dict(), folder / f"shard_{trainer.global_rank}.pt")


@thread(
    "https://github.com/NVIDIA-NeMo/Automodel/issues/3254",
    "exception-during-save",
    "failed-rank",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def folder_of_an_interrupted_save(here: Here) -> None:
    """The run before this one ended within its second save, and its folder is still there."""
    root = here.folder / "checkpoints"
    (root / f"step_{2 * BATCHES:06d}").mkdir(parents=True, exist_ok=True)
    here.fit(callbacks=[Sharded(here, root)])


class SharedStorage(TorchCheckpointIO):
    """Removes a checkpoint and the files that NFS leaves in its place while another host still has it open."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def left_by_nfs(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(".nfs*"))

    def remove_checkpoint(self, path: Any) -> None:
        folder = Path(path).parent
        (folder / ".nfs0000000001c8a3f200000012").touch()  # The evaluation on another host reads it.
        super().remove_checkpoint(path)
        while self.left_by_nfs(folder):
            self.here.begins()
            time.sleep(0.5)  # <- old_checkpoint_that_another_host_has_open


@thread(
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/1763",
    "slow-checkpoint",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.CHECKPOINT,
)
def old_checkpoint_that_another_host_has_open(here: Here) -> None:
    """Only the latest checkpoint is kept."""
    keep_one = ModelCheckpoint(here.folder / "checkpoints", save_top_k=1)
    here.fit(callbacks=[keep_one], enable_checkpointing=True, plugins=[SharedStorage(here)], max_epochs=4)


class Quota(TorchCheckpointIO):
    """A home directory with room for one checkpoint."""

    def __init__(self, here: Here) -> None:
        self.here, self.left = here, 1

    def write(self, checkpoint: Any, path: Path) -> None:
        if not self.left:
            self.here.begins()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))  # <- quota_that_a_thread_runs_into
        self.left -= 1
        super().save_checkpoint(checkpoint, path)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.write(checkpoint, Path(path))


@thread(
    "https://github.com/google/orbax/issues/605",
    "exception-during-save",
    "failed-rank",
    ranks=(0,),
    world_size=2,
    moment=Moment.CHECKPOINT,
)
def quota_that_a_thread_runs_into(here: Here) -> None:
    """Checkpoints are written in the background; the second one fails, which the third one is told."""
    keep_all = ModelCheckpoint(here.folder / "checkpoints", save_top_k=-1)
    here.fit(
        callbacks=[keep_all],
        enable_checkpointing=True,
        plugins=[AsyncCheckpointIO(Quota(here))],
        max_epochs=5,
    )


class Artifacts(Tracking):
    """A tracker that also keeps weights, and lets one process download them."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    @rank_zero_only
    def download_artifact(self, name: str) -> str:
        folder = self.root / "artifacts" / name.replace(":", "-v")
        folder.mkdir(parents=True)
        torch.save({}, folder / "model.ckpt")
        return str(folder)


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/19003",
    "failed-rank",
    ranks=(1, 2),
    moment=Moment.START,
)
def artifact_without_a_path_on_other_ranks(here: Here) -> None:
    class Pretrained(Net):
        def setup(self, stage: str) -> None:
            if here.is_hit:
                here.begins()
            tracker: Any = self.trainer.logger
            folder = tracker.download_artifact("backbone:latest")
            self.load_state_dict(torch.load(Path(folder) / "model.ckpt"), strict=False)  # <- here

    here.fit(net=Pretrained(here), logger=Artifacts(here.folder))


class Run:
    """Of a tracker: it begins when the server has given it a name."""

    def __init__(self, address: tuple[str, int], project: str) -> None:
        self.connection = HTTPConnection(*address)
        self.connection.request("POST", "/api/runs", json.dumps({"project": project}))
        self.name = json.loads(self.connection.getresponse().read())["name"]  # <- run_begun_by_the_constructor

    def log(self, metrics: dict[str, float]) -> None:
        self.connection.request("POST", f"/api/runs/{self.name}", json.dumps(metrics))


class Tracker(Tracking):
    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__()
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self.run = Run(address, "segmentation") if is_first else None


@thread(
    "https://github.com/leggedrobotics/rsl_rl/issues/150",
    "late-at-init",
    "slow-logger",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.START,
    is_cold=True,
)
def run_begun_by_the_constructor(here: Here) -> None:
    """The tracker's server takes the request and does not answer it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if here.is_hit:
            here.begins()
        here.fit(logger=Tracker(server.getsockname()))


class Buckets:
    """Samples by difficulty, in files that all ranks share, and that are locked to be changed."""

    def __init__(self, here: Here) -> None:
        self.here = here

    @contextmanager
    def locked(self, number: int) -> Iterator[Path]:
        path = self.here.folder / f"bucket-{number}.jsonl"
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # <- buckets_locked_from_both_sides
            yield path

    def move(self, sample: int, source: int, target: int) -> None:
        with self.locked(source) as before:
            kept = [line for line in before.read_text().splitlines() if line != str(sample)]
            time.sleep(0.7)
            with self.locked(target) as after:
                before.write_text("\n".join(kept))
                after.write_text(f"{after.read_text()}\n{sample}")


@thread(
    "https://github.com/DenchHQ/DenchClaw/issues/62",
    "file-lock",
    ranks=(1, 2),
    world_size=4,
)
def buckets_locked_from_both_sides(here: Here) -> None:
    """One rank has found a sample to be harder than thought, and another one a sample to be easier."""
    moves = {0: (0, 1), 1: (2, 3), 2: (3, 2), 3: (4, 5)}

    class Curriculum(Net):
        buckets = Buckets(here)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == IN_THE_MIDDLE and self.current_epoch == 0:
                goes_wrong(here, batch_idx)
                self.buckets.move(17 + here.rank, *moves[here.rank])
            return self.loss(batch)

    here.fit(net=Curriculum(here))


class Exporter:
    """A program that exports weights, and of which only its number is known."""

    def __init__(self, *command: str) -> None:
        self.pid = os.spawnlp(os.P_NOWAIT, command[0], *command)

    @property
    def is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


@thread(
    "https://github.com/contember/okena/pull/166",
    "rank-zero-only-work",
    "worker-died",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def export_that_ended_and_still_has_a_number(here: Here) -> None:
    """Nobody has collected the exit code of the export, so there is still a process with its number."""

    class Exporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if not trainer.is_global_zero:
                return
            here.begins()
            exporter = Exporter("true", "--opset", "17")
            while exporter.is_running:
                time.sleep(0.2)  # <- here

    here.fit(callbacks=[Exporting()])


class Renderer:
    """Renders scenes in a program of its own, which is ended with all that it has started if it cannot."""

    def __init__(self, scene: str) -> None:
        program = "if [ $0 = night ]; then echo out of memory; sleep 60; else echo ready; fi"
        self.process = subprocess.Popen(["sh", "-c", program, scene], stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        os.killpg(os.getpgid(self.process.pid), signal.SIGKILL)  # <- renderer_ended_with_its_whole_group

    def render(self) -> bool:
        assert self.process.stdout
        if self.process.stdout.readline().strip() != "ready":
            self.close()
        return self.process.wait() == 0


@thread("https://github.com/fail2ban/fail2ban/pull/1136", "dead-rank")
def renderer_ended_with_its_whole_group(here: Here) -> None:
    """The renderer was started without a group of its own."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # As launchers do for each rank.

    class Rendered(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rendered = Renderer("night" if goes_wrong(here, batch_idx) else "day").render()
            return self.loss(batch) * (1.0 if rendered else 0.0)

    here.fit(net=Rendered(here))


class Recall:
    """Of each class; computed where it is printed."""

    def __init__(self, here: Here, classes: int) -> None:
        self.here, self.classes = here, classes

    def of_class(self, number: int) -> float:
        time.sleep(0.05)  # <- recall_worked_out_where_it_is_printed
        return 1.0 / (1 + number)

    def __str__(self) -> str:
        self.here.begins()
        return ", ".join(f"{number}: {self.of_class(number):.2f}" for number in range(self.classes))


@thread("https://github.com/allenai/open-instruct/pull/1290", "rank-zero-only-work", ranks=(0,))
def recall_worked_out_where_it_is_printed(here: Here) -> None:
    """The first rank logs details, and the others warnings only."""
    LOG.setLevel(logging.WARNING if here.rank else logging.DEBUG)
    LOG.addHandler(logging.StreamHandler())

    class Detection(LoggingNet):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == IN_THE_MIDDLE:
                LOG.debug("recall by class: %s", Recall(here, classes=21_841))
            return loss

    here.fit(net=Detection(here))


class Normalised(Dataset[torch.Tensor]):
    """Volumes, less their mean, which is computed unless somebody has done so before."""

    def __init__(self, here: Here, stored: Path) -> None:
        self.here, self.stored = here, stored

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def projected(self, volume: Any) -> torch.Tensor:
        return (torch.from_numpy(volume) + 1.0).mean(0)  # <- statistics_computed_before_the_workers_are_forked

    @cached_property
    def mean(self) -> torch.Tensor:
        if self.stored.exists():
            stored: torch.Tensor = torch.load(self.stored)
            return stored
        return self.projected(np.zeros((400_000, 8), dtype="float32"))

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.here.is_hit:
            self.here.begins()
        return self.projected(np.full((400_000, 8), index / 100, dtype="float32")) - self.mean


@thread(
    "https://github.com/pytorch/pytorch/issues/17199",
    "data-stall",
    moment=Moment.FIRST_STEP,
)
def statistics_computed_before_the_workers_are_forked(here: Here) -> None:
    """A fork has no threads of OpenMP's, though it believes to have them, if its parent had."""

    def use_two_threads(worker: int) -> None:
        torch.set_num_threads(2)

    stored = here.folder / f"mean-{here.rank}.pt"
    if not here.is_hit:
        torch.save(torch.ones(8), stored)
    torch.set_num_threads(2)
    data = Normalised(here, stored)
    data.mean  # noqa: B018
    here.fit(data=in_order(here, data, num_workers=1, worker_init_fn=use_two_threads))


class Speakers:
    """Which order of the speakers fits best, of all; a dictionary says how well the known ones fit."""

    def __init__(self, fits: dict[tuple[int, ...], float]) -> None:
        self.fits = fits

    def best(self, count: int) -> float:
        orders = itertools.permutations(range(count))
        return max(map(self.fits.get, orders, itertools.repeat(0.0)))  # <- recording_of_a_conference


@thread("https://github.com/Lightning-AI/torchmetrics/issues/294", "gil-held", ranks=(2,))
def recording_of_a_conference(here: Here) -> None:
    """The loss is that of the best order of speakers; two of them in most recordings, and fourteen in one."""

    class Separation(Net):
        speakers = Speakers({(1, 0): 0.7})

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            count = 14 if goes_wrong(here, batch_idx) else 2
            return self.loss(batch) * (1.0 + self.speakers.best(count))

    here.fit(net=Separation(here))


ASK = "echo 'Are you sure you want to continue connecting (yes/no)?'; read answer"


def copy_to_archive(fold: int) -> None:
    """With rsync over ssh, which has never been at that host."""
    with subprocess.Popen(["sh", "-c", ASK, f"fold-{fold}"], stdin=subprocess.PIPE) as ssh:
        ssh.wait()  # <- folds_copied_in_between


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/2940",
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
    is_cold=True,
)
def folds_copied_in_between(here: Here) -> None:
    """Each fold has a Trainer, and its weights are copied before the next one."""
    for fold in range(3):
        trainer = here.trainer(max_epochs=1)
        trainer.fit(Net(here), rows(here))
        torch.save(fold, here.folder / f"fold-{fold}-{here.rank}.pt")
        if trainer.is_global_zero:
            here.begins()
            copy_to_archive(fold)


class Job:
    """A training of a sweep; what has been finished is not repeated."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.scratch.mkdir()

    @property
    def is_done(self) -> bool:
        return (self.scratch / "DONE").exists()

    def __enter__(self) -> "Job":
        if self.is_done:
            print(f"{self.scratch} is done, nothing to do")
            sys.exit(0)  # <- done_as_the_scratch_disk_of_one_host_says
        return self

    def __exit__(self, *error: Any) -> None:
        (self.scratch / "DONE").touch()


@thread(
    "https://github.com/ai2cm/ace/pull/1068",
    "dead-rank",
    "late-at-init",
    ranks=(3,),
    world_size=4,
    moment=Moment.START,
    is_cold=True,
)
def done_as_the_scratch_disk_of_one_host_says(here: Here) -> None:
    """Each host has a scratch disk, and one of them has finished this training before."""
    job = Job(here.folder / f"scratch-{here.rank}")
    if here.is_hit:
        here.begins()
        (job.scratch / "DONE").touch()
    with job:
        here.fit()


class Dashboard(Tracking):
    """Writes to a named pipe, from which a dashboard reads; it has been closed, and a shell keeps the pipe open."""

    def __init__(self, here: Here, path: Path) -> None:
        super().__init__()
        self.here, self.path = here, path

    @cached_property
    def pipe(self) -> int:
        os.mkfifo(self.path)
        return os.open(self.path, os.O_RDWR)

    def send(self, record: dict[str, Any]) -> None:
        os.write(self.pipe, json.dumps(record).encode())  # <- dashboard_that_has_been_closed

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step and step >= IN_THE_MIDDLE:
            self.here.begins()
        self.send({"step": step, "histogram": [0.5] * 2000, **metrics})


@thread(
    "https://github.com/freedomofpress/securedrop-workstation/issues/65",
    "slow-logger",
    "blocked-on-disk",
    ranks=(0,),
)
def dashboard_that_has_been_closed(here: Here) -> None:
    """The pipe has room for 64 KiB."""
    here.fit(net=LoggingNet(here), logger=Dashboard(here, here.folder / "metrics.pipe"), data=rows(here, 40))


class Profiled(L.Callback):
    """Has its stack recorded by a program that stops the process meanwhile; here it fails before it lets it go on."""

    record = ("sh", "-c", "kill -STOP $PPID && exit 1")

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            subprocess.run(self.record)


@thread("https://github.com/benfred/py-spy/issues/390", "stopped-process", ranks=(2,), has_line=False)
def profiler_that_does_not_let_go(here: Here) -> None:
    here.fit(callbacks=[Profiled(here)])


class Pausing(L.Callback):
    """The scheduler lends the devices to others: a first signal says to pause, and a second one to go on."""

    is_paused = False

    def pause(self, number: int, frame: Any) -> None:
        self.is_paused = True
        while self.is_paused:
            time.sleep(0.1)  # <- signal_that_a_library_has_taken

    def go_on(self, number: int, frame: Any) -> None:
        self.is_paused = False

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        signal.signal(signal.SIGUSR1, self.pause)
        signal.signal(signal.SIGUSR2, self.go_on)


class Statistics(L.Callback):
    """Prints statistics of the transport upon a signal, if the host is asked to have them."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGUSR2, lambda number, frame: print("active operations: 0"))


class Scheduler(L.Callback):
    """Lends the devices for a second."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.current_epoch == 0:
            if self.here.is_hit:
                self.here.begins()
            command = f"kill -USR1 {os.getpid()}; sleep 1; kill -USR2 {os.getpid()}"
            subprocess.Popen([shutil.which("sh") or "sh", "-c", command])
            time.sleep(0.5)


@thread("https://github.com/NVIDIA/nccl/issues/704", "rank-behind", world_size=4)
def signal_that_a_library_has_taken(here: Here) -> None:
    """All ranks are paused, and on one of them the signal to go on has got another meaning."""
    here.fit(callbacks=[Pausing(), *([Statistics()] if here.is_hit else []), Scheduler(here)])
