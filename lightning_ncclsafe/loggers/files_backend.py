"""What loggers that write files have in common: their scalars are collected, and their files written by one sink."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.patching import Replacements
from lightning_ncclsafe.loggers.destinations import open_destination
from lightning_ncclsafe.loggers.files import FilesSink
from lightning_ncclsafe.loggers.intake import LoggedCall, LoggedScalars
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.offload import Backend
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store

HPARAMS = "hparams.yaml"
"""The file of hyperparameters, and the name of a call that writes it."""
# How long the first log waits for its file, so that a program that looks for one finds it, as without an offload.
_FIRST_S = 0.5


class ScalarCollector(threading.local):
    """Collects the scalars of one call of ``log_metrics``, on each thread for itself."""

    def __init__(self) -> None:
        self._found: list[LoggedScalars] | None = None

    @property
    def is_on(self) -> bool:
        """Whether this thread is in such a call."""
        return self._found is not None

    def call(
        self, put: Callable[[LoggedScalars], None], log_metrics: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a logger's ``log_metrics`` and passes on the scalars that it logs, in order, even if it raises."""
        if self._found is not None:
            # A nested call leaves everything to the outer one.
            return log_metrics(*args, **kwargs)
        collected = self._found = []
        try:
            return log_metrics(*args, **kwargs)
        finally:
            self._found = None
            for scalars in collected:
                put(scalars)

    def add(self, tag: str, value: float, step: int | None, created: float) -> None:
        """Adds a scalar."""
        assert self._found is not None
        last = self._found[-1] if self._found else None
        if last is None or last.step != step or tag in last.values:
            self._found.append(LoggedScalars(step=step, values={tag: value}, created=created))
        else:
            last.values[tag] = value


@marked(Mark.LOGGER)
class FilesBackend(Backend):
    """Takes a logger that writes files off the training thread.

    Args:
        logger: The logger; its experiment exists.
        path: The directory that it writes to.
        to_yaml: Creates the text of ``hparams.yaml``.
    """

    def __init__(
        self, logger: Any, path: str, *, store: Store, ledger: Ledger, to_yaml: Callable[[Any], bytes]
    ) -> None:
        super().__init__(logger, path, ledger)
        self._writer = logger.experiment
        self._store = store
        self._to_yaml = to_yaml
        self._destination = open_destination(path)
        self.folders = self._destination.folders
        self.sink = FilesSink(self._destination, store.anchors, store.note, reject=ledger.refuse)
        self._collecting = ScalarCollector()
        self._replacements = Replacements()

    def detach(self) -> None:
        """Restores the methods of the logger and of its writer."""
        self._replacements.undo()

    def _replace_methods(self) -> None:
        log_metrics = partial(self._collecting.call, self._offload.put, self._logger.log_metrics)
        self._replacements.replace(self._logger, "log_metrics", log_metrics)
        self._replacements.replace(self._logger, "finalize", self._offload.finalize)

    def _put_hparams(self, hparams: Any) -> None:
        self._offload.put(LoggedCall(name=HPARAMS, args=(hparams,), keep=True))
        self._await_file()

    def _await_file(self) -> None:
        if self.folders:
            self._offload.catch_up(_FIRST_S)

    def _hparams_frame(self, call: LoggedCall, **details: Any) -> StagedFrame:
        body = self._to_yaml(*call.args)
        return StagedFrame(kind="whole", file=HPARAMS, body=body, records=1, keep=True, details=details)
