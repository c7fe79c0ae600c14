"""CSV: rows are staged as JSON and become rows of ``metrics.csv``, as Lightning writes them."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any

import torch

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.loggers.capture import FIRST_S, Replacements, ScalarCollector
from lightning_ncclsafe.loggers.destinations import open_destination
from lightning_ncclsafe.loggers.files import FilesSink
from lightning_ncclsafe.loggers.intake import LoggedCall, LoggedScalars
from lightning_ncclsafe.loggers.offload import Offload
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store

_ROW = "log_metrics"
_HPARAMS = "hparams.yaml"


@marked(Mark.LOGGER)
class CSVBackend:
    """Takes a ``CSVLogger`` and its ``ExperimentWriter`` off the training thread.

    Args:
        logger: The logger; its experiment exists.
        to_yaml: Creates the text of ``hparams.yaml``.
    """

    def __init__(self, logger: Any, store: Store, to_yaml: Callable[[Any], bytes]) -> None:
        self._logger = logger
        self._writer = logger.experiment
        self._store = store
        self._to_yaml = to_yaml
        self._file = os.path.basename(str(self._writer.metrics_file_path))
        self.file_names: tuple[str, ...] = (self._file, _HPARAMS)
        self._collecting = ScalarCollector()
        self._replacements = Replacements()
        self.path = str(self._writer.log_dir)
        self._is_there = False
        destination = open_destination(self.path)
        self.folders = destination.folders
        self.sink = FilesSink(
            destination, store.anchors, store.note, reject=lambda *refused: self._offload.refuse_frames(*refused)
        )

    def attach(self, offload: Offload) -> None:
        """Replaces the writer's methods, after it has saved what it still has."""
        self._offload = offload
        self._writer.save()
        logger, writer, replace = self._logger, self._writer, self._replacements.replace
        replace(writer, "log_metrics", self._log_row)
        replace(writer, "log_hparams", self._log_hparams)
        replace(writer, "save", self._forget_rows)
        replace(logger, "log_metrics", partial(self._collecting.call, offload.put, logger.log_metrics))
        replace(logger, "finalize", offload.finalize)

    def detach(self) -> None:
        """Restores the logger's methods."""
        self._replacements.undo()
        self._writer.metrics = []

    def close(self) -> None:
        """Updates the columns that the writer knows."""
        header = self._store.anchors.get(self._file, {}).get("header")
        if header:
            self._writer.metrics_keys = list(header)

    def scalars(self, scalars: Sequence[LoggedScalars]) -> list[StagedFrame]:
        """One row for each call."""
        rows = [_json({**one.values, "step": one.step}) for one in scalars]
        points = sum(len(one.values) for one in scalars)
        return [StagedFrame(kind="rows", file=self._file, body=b"\n".join(rows), points=points)] if rows else []

    def call(self, call: LoggedCall) -> list[StagedFrame]:
        """A row that must not be thinned, or hyperparameters."""
        if call.name == _HPARAMS:
            return [StagedFrame(kind="whole", file=_HPARAMS, body=self._to_yaml(*call.args), records=1, keep=True)]
        (row,) = call.args
        return [StagedFrame(kind="rows", file=self._file, body=_json(row), points=len(row) - 1)]

    def finalize(self, status: str) -> None:
        """Calls the logger's own."""
        type(self._logger).finalize(self._logger, status)

    def _log_row(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        step = len(self._writer.metrics) if step is None else step
        # As in Lightning, for code that reads the row there until it is saved.
        pairs = metrics_dict.items()
        values = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in pairs}
        self._writer.metrics.append({**values, "step": step})
        # The text of a value is made now, if it is neither text nor a number.
        row: dict[str, Any] = {
            str(name): value if value is None or isinstance(value, (str, Real)) else str(value)
            for name, value in values.items()
        }
        if row and self._collecting.is_on and all(isinstance(value, Real) for value in row.values()):
            for name, value in row.items():
                self._collecting.add(name, value, step, time.time())
        else:
            self._offload.put(LoggedCall(name=_ROW, args=({**row, "step": step},), kwargs={}, created=time.time()))

    def _forget_rows(self) -> None:
        """Drops the rows that Lightning counts where no step is given, and keeps their columns, which a copy needs."""
        self._writer.metrics_keys = sorted({*self._writer.metrics_keys, *chain(*self._writer.metrics)})
        # A new list, as in Lightning: the program may have kept the old one.
        self._writer.metrics = []
        if not self._is_there and self._writer.metrics_keys and self.folders and not self._collecting.is_on:
            self._is_there = True
            self._offload.catch_up(FIRST_S)

    def _log_hparams(self, params: dict[str, Any]) -> None:
        self._writer.hparams.update(params)
        hparams = dict(self._writer.hparams)
        self._offload.put(LoggedCall(name=_HPARAMS, args=(hparams,), kwargs={}, created=time.time(), keep=True))
        if self.folders:
            self._offload.catch_up(FIRST_S)


def _json(row: dict[str, Any]) -> bytes:
    # What JSON does not know becomes its text, as with csv.
    return json.dumps(row, default=str).encode()
