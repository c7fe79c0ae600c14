"""MLFlow: the points of many calls go to the server together, each with the time at which it was logged."""

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.loggers.calls_backend import LOG_METRICS, CallsBackend, is_permanent
from lightning_ncclsafe.loggers.frames import LogFrame

# What MLFlow's server takes at once (mlflow.utils.validation.MAX_METRICS_PER_BATCH).
_MOST_METRICS = 1000
_LOG_BATCH = "experiment.log_batch"
_LOG_METRIC = "experiment.log_metric"
_LOG_PARAM = "experiment.log_param"


@marked(Mark.LOGGER)
class MLFlowBackend(CallsBackend):
    """Takes an ``MLFlowLogger`` and its client off the training thread."""

    _caught: list[tuple[Any, dict[str, Any]]] | None = None

    def deliver(self, frames: Sequence[LogFrame]) -> None:
        """Makes the calls, in order; points that follow each other in one request for every thousand.

        Raises:
            Exception: What the client raised, unless trying again would not help.
        """
        for are_points, group in groupby(frames, key=lambda frame: frame.file == LOG_METRICS and frame.points > 0):
            same = [frame for frame in group if frame.details.get("number", 0) > self._delivered]
            if not are_points:
                super().deliver(same)
                continue
            for some in _in_parts(same):
                self._send_all(some)

    def _send_all(self, frames: Sequence[LogFrame]) -> None:
        try:
            self._send(frames)
            self._done(frames)
        except Exception as error:
            if not is_permanent(error):
                raise
            # One of them is wrong, and must not take the others with it.
            for frame in frames:
                self._attempt(partial(self._send, [frame]), frame)
                self._done([frame])

    def _send(self, frames: Sequence[LogFrame]) -> None:
        metrics: list[tuple[Any, dict[str, Any]]] = []
        for frame in frames:
            created = json.loads(frame.body)["created"]
            self._caught = []
            try:
                # The logger's own, for prefixes and names that MLFlow does not allow.
                self._make_from_text(frame)
            finally:
                caught, self._caught = self._caught, None
            for metric, said in caught:
                metrics.append((type(metric)(metric.key, metric.value, int(1000 * created), metric.step), said))
        # All for the same run, unless the logger is one of the user's.
        for said, group in groupby(metrics, key=lambda one: one[1]):
            same = [metric for metric, _ in group]
            for first in range(0, len(same), _MOST_METRICS):
                self._methods[_LOG_BATCH](metrics=same[first : first + _MOST_METRICS], **said)

    def _queue(self, name: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        if self._offload.is_own_thread and name == _LOG_BATCH and self._caught is not None and not args:
            metrics = kwargs.pop("metrics", ())
            self._caught += [(metric, kwargs) for metric in metrics]
            return None
        if name == _LOG_METRIC and len(args) < 4 and kwargs.get("timestamp") is None:
            kwargs["timestamp"] = int(1000 * time.time())
        # Parameters and tags.
        keep = keep or (name == _LOG_BATCH and bool(args[2:] or kwargs.get("params") or kwargs.get("tags")))
        answer = super()._queue(name, keep, *args, **kwargs)
        # The client gives back the value it was given.
        return (args[2] if len(args) > 2 else kwargs.get("value")) if (name, answer) == (_LOG_PARAM, None) else answer


def _in_parts(frames: Sequence[LogFrame]) -> Iterator[list[LogFrame]]:
    """Frames whose points go into one request, so that none is sent again because of a later one."""
    part: list[LogFrame] = []
    points = 0
    for frame in frames:
        if part and points + frame.points > _MOST_METRICS:
            yield part
            part, points = [], 0
        part.append(frame)
        points += frame.points
    if part:
        yield part
