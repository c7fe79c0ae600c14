"""Small trainings with offloaded loggers, in each of which something else goes wrong.

Run by the tests as a program: ``python logging_scenario.py FOLDER kill full-disk ...``. Every case is a fork of it, as
to import torch takes seconds, but ends as a program of its own would. It works in ``FOLDER/<case>``: ``logs`` and
``staging`` are there, what it printed is in ``output.txt``, and ``steps.txt`` says which step had been logged when.
The exit codes and the times of the ends are printed as JSON. ``--again`` starts the same cases once more, when nothing
goes wrong any more; with ``--own-mounts`` nobody else sees the disks that they mount; and with ``--here`` the only case
is the program itself, and prints where that does.
"""

import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import rich.console
import rich.text
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[1]))
import slow_storage  # type: ignore[import-not-found]

from lightning_ncclsafe import LoggerOffload, SafeDDP
from lightning_ncclsafe.loggers.recovery import recover

Deed = Callable[[L.Trainer], Any]

# How long a step takes: as most cases last for a second or two, a step of half that costs twice the work.
STEP_S = 0.02
SLOW = f"{slow_storage.PROTOCOL}://"
# From <linux/sched.h>, and MS_PRIVATE | MS_REC of <linux/mount.h>.
_NEW_MOUNTS, _PRIVATE = 0x20000, 0x44000
# Imported before the forks, as they would import it each.
PRELOADED = (rich.console, rich.text)


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


class Model(L.LightningModule):
    """Logs the number of each step as its value."""

    def __init__(self, deeds: Mapping[int, Deed], steps_file: Path) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 2})
        self.layer = torch.nn.Linear(2, 1)
        self.deeds = deeds
        self.steps_file = steps_file

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx and self.trainer.is_global_zero:
            # Lightning logs a step after it.
            self.note(batch_idx - 1)
        if batch_idx in self.deeds:
            self.deeds[batch_idx](self.trainer)
        threading.Event().wait(STEP_S)
        self.log("value", float(batch_idx))
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("tested", 7.0)

    def note(self, step: int) -> None:
        with self.steps_file.open("a") as file:
            file.write(f"{step} {time.time()}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class BrokenCallback(L.Callback):
    """A callback that fails when something else has failed: Lightning finalizes no logger then."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        raise RuntimeError("this, too")


class BrokenAtTheEnd(Logger):
    """A logger that cannot be finalized."""

    name = "broken"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def finalize(self, status: str) -> None:
        raise RuntimeError("the server has said goodbye")


def make_trainer(
    folder: Path,
    *,
    storage: str = "",
    loggers: tuple[Logger, ...] = (),
    callbacks: tuple[L.Callback, ...] = (),
    timeout_s: float = 8,
    **options: Any,
) -> L.Trainer:
    logs = f"{storage}{folder / 'logs'}"
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=folder,
        logger=[*loggers, TensorBoardLogger(logs, name="tensorboard"), CSVLogger(logs, name="csv")],
        callbacks=[*callbacks, LoggerOffload(staging_dir=folder / "staging", finalize_timeout=timeout_s)],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **options},
    )


def fit(folder: Path, deeds: Mapping[int, Deed] | None = None, *, steps: int = 50, **options: Any) -> None:
    before = surroundings()
    trainer = make_trainer(folder, **options)
    try:
        trainer.fit(Model(deeds or {}, folder / "steps.txt"), DataLoader(Numbers(steps * trainer.world_size)))
    finally:
        if trainer.is_global_zero:
            left = sorted(map(str, surroundings() ^ before)) + [path.name for path in (folder / "staging").glob("*")]
            print(f"made {trainer.global_step} steps, left behind: {left}", flush=True)


def surroundings() -> set[object]:
    """What a Trainer must leave as it was."""
    handlers = {(number, signal.getsignal(number)) for number in signal.valid_signals()}
    return {*handlers, *os.environ.items(), *threading.enumerate(), *psutil.Process().children()}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def send(number: signal.Signals) -> Deed:
    return lambda trainer: os.kill(os.getpid(), number)


def end_at_once(trainer: L.Trainer) -> None:
    os._exit(5)


def raise_error(trainer: L.Trainer) -> None:
    raise ValueError("the batch is broken")


def exit_silently(trainer: L.Trainer) -> None:
    sys.exit(3)


def fork_child(trainer: L.Trainer) -> None:
    """A child that ends as programs do, while something waits to be delivered."""
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)


def hang_on_rank_1(trainer: L.Trainer) -> None:
    if trainer.global_rank == 1:
        threading.Event().wait(60)


def stall(folder: Path) -> Deed:
    os.environ[slow_storage.STALL] = str(folder / "stall")
    return lambda trainer: (folder / "stall").touch()


def remove(*paths: Path) -> Deed:
    def remove_all(trainer: L.Trainer) -> None:
        for path in paths:
            # Something may be written there meanwhile.
            wait_for(partial(is_removed, path))

    return remove_all


def is_removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def leave_mounts() -> None:
    """From now on nobody but this process and its children sees what they mount: ``unshare --mount``, as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount_small(folder: Path) -> Path:
    """A disk of one megabyte."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(folder)], check=True)
    return folder


def fill(disk: Path) -> None:
    """Leaves not a page on a disk."""
    handle = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(handle, bytes(1 << 12)):
            pass
    except OSError:
        os.close(handle)


def fill_logs(folder: Path) -> None:
    """The disk of the logs is full for a while, until both loggers have met that."""
    disk = mount_small(folder / "logs")

    def make_room(trainer: L.Trainer) -> None:
        wait_for(lambda: (folder / "output.txt").read_text().count("No space left") >= 2)
        (disk / "filler").unlink()

    # Only then do the rows of the CSV file need another page.
    fit(folder, {150: lambda trainer: fill(disk), 450: make_room}, steps=460)
    shutil.copytree(disk, folder / "seen")


def fill_staging(folder: Path, *, step: int | None = None) -> None:
    """The disk of the staging is full from a step on, or from the beginning."""
    disk = mount_small(folder / "staging")
    if step is None:
        fill(disk)
    fit(folder, {} if step is None else {step: lambda trainer: fill(disk)}, steps=100)


def fit_in_fit(folder: Path) -> None:
    (folder / "inner").mkdir()
    fit(folder, {15: lambda trainer: fit(folder / "inner", steps=15)})


def fit_twice(folder: Path) -> None:
    """The first training fails; the next one has the same staging and the same directory for its logs."""
    try:
        fit(folder, {15: raise_error})
    except ValueError:
        fit(folder)


def fit_and_test(folder: Path) -> None:
    trainer = make_trainer(folder)
    model = Model({}, folder / "steps.txt")
    trainer.fit(model, DataLoader(Numbers(50)))
    trainer.test(model, DataLoader(Numbers(5)))


def fit_and_requeue(folder: Path) -> None:
    """Slurm asks for a checkpoint at step 30; what is on storage when it is told to start again is copied."""
    scontrol = folder / "scontrol"
    scontrol.write_text(f"#!/bin/sh\ncp -r {folder}/logs {folder}/seen\n")
    scontrol.chmod(0o700)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    os.environ.update(job, PATH=f"{folder}:{os.environ['PATH']}")
    fit(folder, {30: send(signal.SIGUSR1)}, plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)])


def print_staging(trainer: L.Trainer) -> None:
    stages = any(thread.name.startswith("ncclsafe-stage-") for thread in threading.enumerate())
    print(f"rank {trainer.global_rank} stages: {stages}\n", end="", flush=True)


def fit_on_two(folder: Path, strategy: Any) -> None:
    fit(folder, {30: print_staging}, devices=2, strategy=strategy)


def recover_all(folder: Path) -> None:
    for left in sorted((folder / "staging").glob("*")):
        print(recover(left), flush=True)


def versions(folder: Path) -> list[Path]:
    return [folder / "logs" / logger / "version_0" for logger in ("tensorboard", "csv")]


CASES: dict[str, Callable[[Path], None]] = {
    "kill": lambda folder: fit(folder, {100: send(signal.SIGKILL)}, steps=125),
    "abort": lambda folder: fit(folder, {82: send(signal.SIGABRT)}, steps=125),
    "os-exit": lambda folder: fit(folder, {90: end_at_once}, steps=125),
    "kill-stalled": lambda folder: fit(folder, {0: stall(folder), 75: send(signal.SIGKILL)}, steps=125, storage=SLOW),
    "end-stalled": lambda folder: fit(folder, {15: stall(folder)}, storage=SLOW, timeout_s=1.0),
    "sigterm": lambda folder: fit(folder, {30: send(signal.SIGTERM)}),
    "sigint": lambda folder: fit(folder, {30: send(signal.SIGINT)}),
    "raise": lambda folder: fit(folder, {30: raise_error}),
    "sys-exit": lambda folder: fit(folder, {30: exit_silently}),
    "finalize": lambda folder: fit(folder, loggers=(BrokenAtTheEnd(),)),
    "no-versions": lambda folder: fit(folder, {87: remove(*versions(folder))}, steps=150),
    "no-logs": lambda folder: fit(folder, {87: remove(folder / "logs")}, steps=150),
    "no-staging-any-more": lambda folder: fit(folder, {87: remove(folder / "staging")}, steps=150),
    "on-exception": lambda folder: fit(folder, {30: raise_error}, callbacks=(BrokenCallback(),)),
    "child": lambda folder: fit(folder, {30: fork_child}),
    "nested": fit_in_fit,
    "twice": fit_twice,
    "fit-test": fit_and_test,
    "requeue": fit_and_requeue,
    "full-disk": fill_logs,
    "full-staging": partial(fill_staging, step=5),
    "no-staging": fill_staging,
    "fork": partial(fit_on_two, strategy="ddp_fork"),
    "popen": lambda folder: fit_on_two(folder, SafeDDP()),
    "guard": lambda folder: fit(
        folder,
        {30: hang_on_rank_1},
        storage=SLOW,
        devices=2,
        strategy=SafeDDP(suspect_after=1.0, timeout=timedelta(seconds=5), start_method="fork"),
    ),
}

# What is done when the case is started again, if it is not a short training like the first one.
AGAIN: dict[str, Callable[[Path], None]] = {
    "kill-stalled": partial(fit, steps=10, storage=SLOW),
    "end-stalled": recover_all,
}


def fork_each(folder: Path, names: list[str]) -> str | None:
    """Forks a process for each case; returns its case there, and None here, when all have ended."""
    cases: dict[int, str] = {}
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        pid = os.fork()
        if not pid:
            # Whatever hangs, the others are not to wait for it.
            signal.alarm(100)
            # A shell has programs in the background ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return name
        cases[pid] = name
    ends: dict[str, dict[str, float]] = {}
    while cases:
        pid, status = os.wait()
        if pid in cases:
            ends[cases.pop(pid)] = {"exit_code": os.waitstatus_to_exitcode(status), "ended": time.time()}
    print(json.dumps(ends))
    return None


def main() -> None:
    folder, *names = sys.argv[1:]
    options, names = ([one for one in names if one.startswith("--") is is_option] for is_option in (True, False))
    if "--own-mounts" in options:
        leave_mounts()
    name: str | None = names[0]
    # So that the end of each process does not look at everything that was imported.
    gc.freeze()
    # A launcher that starts this program again has one case for it, and takes its output.
    if "LOCAL_RANK" not in os.environ and "--here" not in options:
        name = fork_each(Path(folder), names)
        if name is not None:
            sys.argv[2:] = [name]
            output = os.open(Path(folder, name, "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
    if name is not None:
        case = AGAIN.get(name, partial(fit, steps=10)) if "--again" in options else CASES[name]
        case(Path(folder, name))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
