"""MLFlow: the points of many calls go to the server together, each with the time at which it was logged."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from lightning_ncclsafe.loggers.calls_backend import LOG_METRICS, CallsBackend
from lightning_ncclsafe.loggers.frames import Frame

# What MLFlow's server takes at once (mlflow.utils.validation.MAX_METRICS_PER_BATCH).
_MOST_METRICS = 1000


class MLFlowBackend(CallsBackend):
    """Takes an ``MLFlowLogger`` and its client off the training thread."""

    _caught: list[tuple[Any, dict[str, Any]]] | None = None

    def deliver(self, frames: Sequence[Frame]) -> None:
        """Makes the calls, in order; points that follow each other in one request for every thousand.

        Raises:
            Exception: What the client raised, unless trying again would not help.
        """
        for are_points, group in groupby(frames, key=lambda frame: frame.file == LOG_METRICS and frame.points > 0):
            same = [frame for frame in group if frame.details.get("number", 0) > self._delivered]
            if are_points and same:
                self._attempt(partial(self._send, same), same[0])
                self._done(same)
            else:
                super().deliver(same)

    def _send(self, frames: Sequence[Frame]) -> None:
        metrics: list[Any] = []
        kwargs: dict[str, Any] = {}
        for frame in frames:
            created = json.loads(frame.body)["created"]
            self._caught = []
            try:
                # The logger's own, for prefixes and names that MLFlow does not allow.
                self._make_from_text(frame)
            finally:
                caught, self._caught = self._caught, None
            for metric, said in caught:
                metrics.append(type(metric)(metric.key, metric.value, int(1000 * created), metric.step))
                kwargs.update(said)
        for first in range(0, len(metrics), _MOST_METRICS):
            self._methods["log_batch"](metrics=metrics[first : first + _MOST_METRICS], **kwargs)

    def _queue(self, name: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        if self._caught is not None and name == "log_batch" and self._offload.is_own_thread:
            metrics = kwargs.pop("metrics", ())
            self._caught += [(metric, kwargs) for metric in metrics]
            return None
        return super()._queue(name, keep, *args, **kwargs)
