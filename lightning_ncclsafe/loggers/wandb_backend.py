"""Weights & Biases: each row keeps the time at which it was logged."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.loggers.calls_backend import CallsBackend
from lightning_ncclsafe.loggers.frames import LogFrame

_LOG = "experiment._log"


@marked(Mark.LOGGER)
class WandbBackend(CallsBackend):
    """Takes a ``WandbLogger`` and its run off the training thread."""

    # When what is delivered just now was logged, seconds since the epoch.
    _created: float | None = None

    def _make(self, frame: LogFrame) -> None:
        held = self._objects.get(int(frame.details["number"]))
        with self._at(held[0].created if held is not None else None):
            super()._make(frame)

    def _make_from_text(self, frame: LogFrame) -> None:
        with self._at(json.loads(frame.body or "{}").get("created")):
            super()._make_from_text(frame)

    @contextmanager
    def _at(self, created: float | None) -> Iterator[None]:
        self._created = created
        try:
            yield
        finally:
            self._created = None

    def _queue(self, name: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        if name != _LOG:
            return super()._queue(name, keep, *args, **kwargs)
        said = {**dict(zip(("data", "step", "commit"), args, strict=False)), **kwargs}
        data = said.get("data")
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            # Raises.
            return self._methods[name](*args, **kwargs)
        created = self._created if self._created is not None and self._offload.is_own_thread else time.time()
        return super()._queue(name, keep, **{**said, "data": {"_timestamp": created, **data}})
