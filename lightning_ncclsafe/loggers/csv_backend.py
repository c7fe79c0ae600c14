"""CSV: rows are staged as JSON and become rows of ``metrics.csv``, as Lightning writes them."""

import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.loggers.files_backend import HPARAMS, FilesBackend
from lightning_ncclsafe.loggers.intake import LoggedCall, LoggedScalars
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.loggers.store import Store


@marked(Mark.LOGGER)
class CSVBackend(FilesBackend):
    """Takes a ``CSVLogger`` and its ``ExperimentWriter`` off the training thread."""

    def __init__(self, logger: Any, *, store: Store, ledger: Ledger, to_yaml: Callable[[Any], bytes]) -> None:
        super().__init__(logger, str(logger.experiment.log_dir), store=store, ledger=ledger, to_yaml=to_yaml)
        self._file = os.path.basename(str(self._writer.metrics_file_path))
        self.file_names = (self._file, HPARAMS)
        self._is_there = False
        # Before anything is replaced, because it may fail: what the writer still has would be lost.
        self._writer.save()

    def detach(self) -> None:
        """Restores the methods; the rows that the writer still has are staged."""
        super().detach()
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
        return [StagedFrame(kind="rows", file=self._file, body=b"\n".join(rows), points=points)]

    def call(self, call: LoggedCall) -> list[StagedFrame]:
        """A row that must not be thinned, or hyperparameters."""
        if call.name == HPARAMS:
            return [self._hparams_frame(call)]
        (row,) = call.args
        return [StagedFrame(kind="rows", file=self._file, body=_json(row), points=len(row) - 1)]

    def _replace_methods(self) -> None:
        replace = self._replacements.replace
        replace(self._writer, "log_metrics", self._log_row)
        replace(self._writer, "log_hparams", self._log_hparams)
        replace(self._writer, "save", self._forget_rows)
        super()._replace_methods()

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
            self._offload.put(LoggedCall(name="log_metrics", args=({**row, "step": step},)))

    def _forget_rows(self) -> None:
        """Drops the rows that Lightning counts where no step is given, and keeps their columns, which a copy needs."""
        self._writer.metrics_keys = sorted({*self._writer.metrics_keys, *chain(*self._writer.metrics)})
        # A new list, as in Lightning: the program may have kept the old one.
        self._writer.metrics = []
        if not self._is_there and self._writer.metrics_keys and not self._collecting.is_on:
            self._is_there = True
            self._await_file()

    def _log_hparams(self, params: dict[str, Any]) -> None:
        self._writer.hparams.update(params)
        self._put_hparams(dict(self._writer.hparams))


def _json(row: dict[str, Any]) -> bytes:
    # What JSON does not know becomes its text, as with csv.
    return json.dumps(row, default=str).encode()
