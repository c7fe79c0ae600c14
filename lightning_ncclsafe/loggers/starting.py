"""Starts the offload of a logger: whether it is offloaded, with which backend, and where it is staged."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from lightning_ncclsafe._lightning import (
    CometLogger,
    CSVLogger,
    DummyLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
    lightnings,
    package_of,
    rank_zero_only,
    save_hparams_to_yaml,
)
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.loggers.calls_backend import CallsBackend, MLFlowBackend, WandbBackend, experiment_is_known
from lightning_ncclsafe.loggers.csv_backend import CSVBackend
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.offload import Backend, Offload
from lightning_ncclsafe.loggers.recovery import recover
from lightning_ncclsafe.loggers.staging import Manifest, leftovers, make_staging, remove_unfinished
from lightning_ncclsafe.loggers.store import Store
from lightning_ncclsafe.report.terminal import say_on_stderr
from lightning_ncclsafe.settings import OffloadSettings

# A call that waits this long is slow; memory, or a file on a local disk, takes a thousandth of it.
_SLOW_CALL_S = 0.05
# This many in a row are no accident: on a machine short of cores, any call may have to wait, but not every one.
_IN_A_ROW = 3
# They are worth a thread if they take this share of the time.
_SLOW_SHARE = 0.02
_METHODS = ("log_metrics", "save")
# The experiments of these may be asked for: Lightning has already created them.
_WITH_EXPERIMENT = (MLFlowLogger, WandbLogger, CometLogger)


@marked(Mark.LOGGER)
class CallTimer:
    """Times the calls of a logger, which are made in place until they have proved slow.

    A program may read at any time, unnoticed, what a logger of unknown class keeps in memory: as long as its calls do
    not wait, they are best made where Lightning makes them.

    Args:
        slow: Called on the thread that logs, before its next call, once the logger has proved slow and is restored.
        cpu_clock: Processor time of this thread, seconds; a call waits for the rest of its time.
    """

    def __init__(
        self,
        logger: object,
        slow: Callable[[], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._logger = logger
        self._slow = slow
        self._clock = clock
        self._cpu_clock = cpu_clock
        # The last slow calls in a row of each method: when each began, and how long it waited.
        self._rows: dict[str, list[tuple[float, float]]] = {name: [] for name in _METHODS}
        self._inside = threading.local()
        # Anything but a plain method stays as it is, as do objects whose class intercepts assignments.
        is_plain = hasattr(logger, "__dict__") and type(logger).__setattr__ is object.__setattr__
        self._replaced = {
            name: ReplacedMethod(logger, name, partial(self._call, name))
            for name in _METHODS
            if is_plain and isinstance(getattr(type(logger), name, None), FunctionType) and name not in vars(logger)
        }

    def end(self) -> None:
        """Restores the logger's methods."""
        for replaced in self._replaced.values():
            replaced.remove()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # What a method calls in turn is part of it.
        if getattr(self._inside, "is_on", False):
            return self._replaced[name].original(*args, **kwargs)
        row = self._rows[name]
        if len(row) == _IN_A_ROW and sum(waited_s for _, waited_s in row) > _SLOW_SHARE * (self._clock() - row[0][0]):
            self.end()
            self._slow()
            # The present method, which may be the offload's.
            return getattr(self._logger, name)(*args, **kwargs)
        self._inside.is_on = True
        # The thread's clock is read outside of what is timed: reading it is a system call, in which a thread that has
        # used up its share of a busy core has to wait.
        computed = self._cpu_clock()
        began = self._clock()
        try:
            return self._replaced[name].original(*args, **kwargs)
        finally:
            taken_s = self._clock() - began
            waited_s = taken_s - (self._cpu_clock() - computed)
            self._inside.is_on = False
            self._rows[name] = [*self._rows[name], (began, waited_s)][-_IN_A_ROW:] if waited_s >= _SLOW_CALL_S else []


@marked(Mark.LOGGER)
def start_offload(logger: Logger, settings: OffloadSettings) -> Offload:
    """Takes a logger off the training thread.

    Args:
        logger: The logger; its experiment exists.

    Raises:
        OSError: If local staging is impossible.
    """
    name = type(logger).__name__
    manifest = Manifest(
        logger=name,
        kind="files" if _writes_files(logger) else "calls",
        destination=str(getattr(logger, "log_dir", None) or logger.save_dir or ""),
        root=str(logger.save_dir or ""),
        identity=f"{logger.name}/{logger.version}",
    )
    ledger = Ledger(name, say_on_stderr)
    folder, claim = make_staging(settings.staging_dir, manifest)
    store = Store(folder, spill_bytes=settings.memory_limit_bytes, claim=claim, on_fault=ledger.report_staging_fault)
    with ExitStack() as undo:
        undo.callback(store.close)
        backend = _backend(logger, store, ledger, settings)
        offload = Offload(backend, settings=settings, store=store, ledger=ledger)
        offload.start()
        undo.pop_all()
    # A program that logs nothing leaves nothing behind, however it ends.
    store.vacate()
    offload.run_on_delivery(partial(_recover_leftovers, settings.staging_dir, manifest, backend))
    return offload


def goes_to_storage(logger: Any) -> bool:
    """Whether a logger only passes on what it is given to files or a server, and no program reads it from its memory.

    This cannot be known of other loggers: one may fill a list, for instance.
    """
    kind = type(logger)
    if not issubclass(kind, (TensorBoardLogger, CSVLogger, MLFlowLogger)):
        return False
    # A test may look at the calls of a mock at any time.
    owners = [one for owner in (logger, logger.experiment) for one in (owner, *type(owner).__mro__)]
    parts = (value for owner in owners for value in getattr(owner, "__dict__", {}).values())
    if is_mock(logger.experiment) or any(map(is_mock, parts)):
        return False
    if issubclass(kind, MLFlowLogger):
        return experiment_is_known(logger.experiment)
    return _writes_files(logger)


def is_mock(value: object) -> bool:
    """Whether a value is a mock, which records its calls in a test."""
    mock = sys.modules.get("unittest.mock")
    return mock is not None and issubclass(type(value), mock.NonCallableMock)


def writes_on_this_rank(logger: Logger) -> bool:
    """Whether a logger's ``log_metrics`` does anything on this rank: most have Lightning's decorator for rank 0."""
    if isinstance(logger, DummyLogger):
        return False
    log_metrics: Any = getattr(type(logger), "log_metrics", None)
    rank_zero: Any = rank_zero_only
    is_for_rank_zero = getattr(log_metrics, "__globals__", {}).get("__name__", "") == rank_zero.__module__
    return not is_for_rank_zero or rank_zero.rank == 0


def _writes_files(logger: Logger) -> bool:
    if isinstance(logger, CSVLogger):
        # A writer of the user's own class may keep what it is given.
        kind = type(logger.experiment)
        names = ("log_metrics", "log_hparams", "save")
        writer = lightnings(package_of(type(logger)), "ExperimentWriter")
        return all(getattr(kind, name, None) is getattr(writer, name) for name in names)
    # Not before there is such a logger: TensorBoard takes 5 MB of memory in every rank.
    torchs = sys.modules.get("torch.utils.tensorboard.writer")
    return isinstance(logger, TensorBoardLogger) and isinstance(logger.experiment, getattr(torchs, "SummaryWriter", ()))


def _backend(logger: Logger, store: Store, ledger: Ledger, settings: OffloadSettings) -> Backend:
    if _writes_files(logger):
        if isinstance(logger, CSVLogger):
            return CSVBackend(logger, store=store, ledger=ledger, to_yaml=_hparams_yaml)
        from lightning_ncclsafe.loggers.tensorboard_backend import TensorBoardBackend

        return TensorBoardBackend(logger, store=store, ledger=ledger, to_yaml=_hparams_yaml)
    experiment: Any = logger.experiment if isinstance(logger, _WITH_EXPERIMENT) else None
    known = experiment if experiment_is_known(experiment) else None
    kind = CallsBackend
    if known is not None:
        kind = MLFlowBackend if isinstance(logger, MLFlowLogger) else kind
        kind = WandbBackend if isinstance(logger, WandbLogger) else kind
    return kind(logger, known, ledger, settings)


def _hparams_yaml(hparams: Any) -> bytes:
    """What Lightning writes to ``hparams.yaml``, written to memory, as disks may be full."""
    with open(os.memfd_create("hparams.yaml"), "rb") as file:
        save_hparams_to_yaml(f"/proc/self/fd/{file.fileno()}", hparams)
        return file.read()


def _recover_leftovers(staging_dir: Path, manifest: Manifest, backend: Backend) -> None:
    """Delivers what earlier runs of this project left in staging."""
    replay: Callable[..., None] | None = getattr(backend, "replay", None)
    remove_unfinished(staging_dir)
    for folder, found in leftovers(staging_dir):
        is_same = (found.logger, found.kind, found.root) == (manifest.logger, manifest.kind, manifest.root)
        if is_same and (manifest.kind == "files" or found.identity == manifest.identity):
            done = recover(folder, replay)
            if done.points or done.records:
                say_on_stderr(
                    f"recovered {done.points} points and {done.records} other records that an earlier run of"
                    f" {found.logger} had staged: they are in {done.to}"
                )
            if done.problem and not done.is_busy:
                say_on_stderr(f"what an earlier run of {found.logger} left in {folder} stays there: {done.problem}")
