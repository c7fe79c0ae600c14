"""Loggers of any class: their own methods are called, in order, by the thread that delivers.

MLFlow and Weights & Biases, where points keep the time at which they are logged, have classes of their own.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, groupby
from typing import Any

import numpy as np

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.patching import Replacements
from lightning_ncclsafe.loggers.capture import copied_call
from lightning_ncclsafe.loggers.intake import LoggedCall, LoggedScalars
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.offload import Backend
from lightning_ncclsafe.loggers.segments import StagedFrame
from lightning_ncclsafe.settings import OffloadSettings

LOG_METRICS = "log_metrics"
# Methods of experiments that return nothing, by package; everything else goes through at once.
_QUEUED = {
    # Called by "run.log", "wandb.log" and the hooks of "run.watch".
    "wandb": ("_log",),
    "mlflow": ("log_batch", "log_metric", "log_param", "set_tag"),
    "comet_ml": ("log_metric", "log_metrics", "log_parameter", "log_parameters", "log_other"),
}
# After these nothing more can be logged, so what waits is delivered first.
_LAST = {"wandb": ("finish",), "mlflow": ("set_terminated",), "comet_ml": ("end",)}
# Prefixes of methods that return what was logged, which is delivered first.
_READING = ("get_", "search_", "list_", "download_", "load_")
# Those that must never be dropped; for MLFlow's batches, the arguments decide.
_KEPT = {"log_param", "log_parameter", "log_parameters", "set_tag", "log_other", "log_hyperparams"}
# Attempts at a call with an error that is unlikely to pass: servers, too, may answer nonsense for a while.
_ATTEMPTS = 3
_NUMBERS = (bool, int, float)
# Names of exceptions for trouble on the way to the server, in libraries with exceptions of their own.
_PASSING = re.compile("connect|timeout|comm|network|unavailable|retr", re.IGNORECASE)
# Most metrics of one request (mlflow.utils.validation.MAX_METRICS_PER_BATCH).
_MOST_METRICS = 1000
_LOG_BATCH = "experiment.log_batch"
_LOG_METRIC = "experiment.log_metric"
_LOG_PARAM = "experiment.log_param"
_LOG = "experiment._log"


@marked(Mark.LOGGER)
class CallsBackend(Backend):
    """Takes a logger of any class off the training thread.

    Args:
        experiment: Its experiment, if its methods are known; None otherwise.
    """

    pace_s = 1.0

    def __init__(self, logger: Any, experiment: Any, ledger: Ledger, settings: OffloadSettings) -> None:
        super().__init__(logger, str(getattr(logger, "save_dir", None) or ""), ledger)
        self.sink = self
        self._experiment = experiment
        self._settings = settings
        self._numbers = count(1)
        self._delivered = 0
        self._attempts = 0
        # Calls whose arguments cannot be staged as they are, by number, and whether an approximation was.
        self._objects: dict[int, tuple[LoggedCall, bool]] = {}
        self._lock = threading.Lock()
        self._of_logger = Replacements()
        self._of_experiment = Replacements()
        self._methods: dict[str, Callable[..., Any]] = {}
        self._save_is_asked = False

    def detach(self) -> None:
        """Restores the logger's methods; what waits is still delivered through those of its experiment."""
        self._of_logger.undo()
        if not self._offload.is_closed:
            self._of_experiment.undo()

    def scalars(self, scalars: Sequence[LoggedScalars]) -> list[StagedFrame]:
        """One call for each, staged in full."""
        return [
            StagedFrame(
                kind="call",
                file=LOG_METRICS,
                body=json.dumps({"step": one.step, "values": one.values, "created": one.created}).encode(),
                points=len(one.values),
                details={"number": next(self._numbers)},
            )
            for one in scalars
        ]

    def call(self, call: LoggedCall) -> list[StagedFrame]:
        """A call, staged if possible and held in memory otherwise."""
        number = next(self._numbers)
        body = b""
        with suppress(TypeError, ValueError):
            body = json.dumps({"args": call.args, "kwargs": call.kwargs, "created": call.created}).encode()
        if not body or not _is_plain([list(call.args), call.kwargs]):
            self._hold(number, call, bool(body))
        return [self._frame(number, call, body)]

    def deliver(self, frames: Sequence[StagedFrame]) -> None:
        """Makes the calls, in order, each once; raises what the logger raises, unless retrying cannot help."""
        for frame in frames:
            if _number(frame) > self._delivered:
                self._attempt(self._make_held, frame)
                self._done([frame])
        self._save()

    def replay(self, frames: Sequence[StagedFrame]) -> None:
        """Makes the calls that an earlier process staged; raises as :meth:`deliver`."""
        for frame in frames:
            self._attempt(self._make_staged, frame)

    def finalize(self, status: str) -> None:
        """Calls the logger's own, after a ``save`` that was asked for."""
        self._save()
        super().finalize(status)

    def close(self) -> None:
        """Restores the experiment's methods."""
        self._of_experiment.undo()

    def _replace_methods(self) -> None:
        """Those of the logger, and those of its experiment that return nothing."""
        logger, experiment = self._logger, self._experiment
        methods, replace = self._methods, self._of_logger.replace
        package = str(getattr(type(logger).log_metrics, "__module__", "")).partition(".")[0]
        if experiment is None or package in ("lightning", "pytorch_lightning"):
            methods[LOG_METRICS] = replace(logger, LOG_METRICS, self._log_metrics)
        else:
            # The user's own method runs at once, as it may keep what it is given; its calls of the experiment wait.
            methods[LOG_METRICS] = logger.log_metrics
        methods["save"] = replace(logger, "save", partial(setattr, self, "_save_is_asked", True))
        replace(logger, "finalize", self._offload.finalize)
        if experiment is None:
            call = partial(self._queue, "log_hyperparams", True)
            methods["log_hyperparams"] = replace(logger, "log_hyperparams", call)
            return
        package, replace = _package(experiment), self._of_experiment.replace
        for name in (name for name in _QUEUED[package] if hasattr(experiment, name)):
            # A method of the logger may have the same name.
            key = f"experiment.{name}"
            methods[key] = replace(experiment, name, partial(self._queue, key, name in _KEPT))
        for name in (name for name in _LAST[package] if hasattr(experiment, name)):
            replace(experiment, name, partial(self._end, getattr(experiment, name)))
        for name in (name for name in dir(type(experiment)) if name.startswith(_READING)):
            if callable(getattr(type(experiment), name)):
                replace(experiment, name, partial(self._read, getattr(experiment, name)))

    def _done(self, frames: Sequence[StagedFrame]) -> None:
        self._delivered = _number(frames[-1])
        with self._lock:
            for frame in frames:
                self._objects.pop(_number(frame), None)

    def _frame(self, number: int, call: LoggedCall, body: bytes) -> StagedFrame:
        details = {"number": number}
        return StagedFrame(kind="call", file=call.name, body=body, records=1, keep=call.keep, details=details)

    def _attempt(self, act: Callable[[StagedFrame], None], frame: StagedFrame) -> None:
        try:
            act(frame)
        except Exception as error:
            self._attempts += 1
            if not is_permanent(error) or self._attempts < _ATTEMPTS:
                raise
            self._ledger.refuse([frame], error)
        self._attempts = 0

    def _make_held(self, frame: StagedFrame) -> None:
        held = self._objects.get(_number(frame))
        if held is None:
            self._make_staged(frame)
        else:
            self._make(held[0])

    def _make_staged(self, frame: StagedFrame) -> None:
        self._make(_staged_call(frame))

    def _make(self, call: LoggedCall) -> None:
        if call.name in self._methods:
            self._methods[call.name](*call.args, **call.kwargs)

    def _hold(self, number: int, call: LoggedCall, is_written: bool) -> None:
        with self._lock:
            self._objects[number] = call, is_written
            limit_bytes = self._settings.memory_limit_bytes
            held = sum(one.data_bytes for one, _ in self._objects.values())
            for old in [old for old, (one, _) in self._objects.items() if not one.keep]:
                if held <= limit_bytes:
                    break
                dropped, is_written = self._objects.pop(old)
                held -= dropped.data_bytes
                if not is_written:
                    error = MemoryError(f"more than {limit_bytes} bytes of arguments wait in memory")
                    self._ledger.refuse([self._frame(old, dropped, b"")], error)

    def _log_metrics(self, *args: Any, **kwargs: Any) -> None:
        scalars = None if self._offload.is_own_thread else _scalars(args, kwargs)
        if scalars is not None:
            self._offload.put(scalars)
        else:
            self._queue(LOG_METRICS, False, *args, **kwargs)

    def _save(self) -> None:
        if self._save_is_asked:
            self._save_is_asked = False
            self._methods["save"]()

    def _read(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._offload.catch_up()
        return method(*args, **kwargs)

    def _end(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._offload.is_own_thread:
            self._offload.drain(self._settings.finalize_s)
        return method(*args, **kwargs)

    def _queue(self, name: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        # MLFlow returns a future for what runs on its own threads.
        is_not_ours = self._offload.is_own_thread or self._offload.is_closed
        if is_not_ours or kwargs.get("synchronous") is False:
            return self._methods[name](*args, **kwargs)
        self._offload.put(copied_call(name, args, kwargs, keep=keep))
        return None


def experiment_is_known(experiment: Any) -> bool:
    """Whether it is known which methods of an experiment return nothing."""
    return _package(experiment) in _QUEUED


def _number(frame: StagedFrame) -> int:
    return int(frame.details.get("number", 0))


def _staged_call(frame: StagedFrame) -> LoggedCall:
    """The call in a frame; one without a name if only its process had the arguments."""
    if not frame.body:
        return LoggedCall(name="")
    call = json.loads(frame.body)
    created = call.get("created") or time.time()
    if "values" in call:
        return LoggedCall(name=LOG_METRICS, kwargs={"metrics": call["values"], "step": call["step"]}, created=created)
    return LoggedCall(name=frame.file, args=tuple(call["args"]), kwargs=call["kwargs"], created=created)


def _package(experiment: Any) -> str:
    return type(experiment).__module__.partition(".")[0]


def is_permanent(error: Exception) -> bool:
    """Whether retrying cannot help."""
    code = str(getattr(error, "error_code", ""))
    if code.startswith("INVALID"):
        return True
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "status_code", None) or getattr(getattr(cause, "response", None), "status_code", None)
        is_of_server = isinstance(status, int) and (status >= 500 or status in (408, 429))
        if isinstance(cause, OSError) or is_of_server or _PASSING.search(type(cause).__name__):
            return False
        cause = cause.__cause__ or cause.__context__
    return not code.startswith(("INTERNAL", "TEMPORARILY", "RESOURCE_EXHAUSTED"))


def _scalars(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoggedScalars | None:
    """What a call of ``log_metrics`` logs, if it is only numbers."""
    arguments = {**dict(zip(("metrics", "step"), args, strict=False)), **kwargs}
    metrics, step = arguments.get("metrics"), _plain(arguments.get("step"))
    if (
        len(args) + len(kwargs) > len(arguments)
        or arguments.keys() - {"metrics", "step"}
        or not isinstance(metrics, Mapping)
    ):
        return None
    values = {tag: _plain(value) for tag, value in metrics.items()}
    if not all(type(tag) is str and type(value) in _NUMBERS for tag, value in values.items()):
        return None
    return LoggedScalars(step=step, values=values, created=time.time()) if type(step) in (int, type(None)) else None


def _plain(value: Any) -> Any:
    """A NumPy number as one that JSON knows."""
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any) -> bool:
    """Whether JSON returns exactly the same."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, *_NUMBERS)


@marked(Mark.LOGGER)
class MLFlowBackend(CallsBackend):
    """Takes an ``MLFlowLogger`` and its client off the training thread."""

    _caught: list[tuple[Any, dict[str, Any]]] | None = None

    def deliver(self, frames: Sequence[StagedFrame]) -> None:
        """Makes the calls, in order, with up to a thousand consecutive points in one request."""
        for are_points, group in groupby(frames, key=lambda frame: frame.file == LOG_METRICS and frame.points > 0):
            same = [frame for frame in group if _number(frame) > self._delivered]
            if not are_points:
                super().deliver(same)
                continue
            for some in _in_parts(same):
                self._send_all(some)

    def _send_all(self, frames: Sequence[StagedFrame]) -> None:
        try:
            self._send(frames)
            self._done(frames)
        except Exception as error:
            if not is_permanent(error):
                raise
            # One of them is wrong and must not cost the others.
            for frame in frames:
                self._attempt(lambda one: self._send([one]), frame)
                self._done([frame])

    def _send(self, frames: Sequence[StagedFrame]) -> None:
        metrics: list[tuple[Any, dict[str, Any]]] = []
        for frame in frames:
            call = _staged_call(frame)
            self._caught = []
            try:
                # Through the logger, for prefixes and for names that MLFlow does not allow.
                self._make(call)
            finally:
                caught, self._caught = self._caught, None
            for metric, options in caught:
                metrics.append((type(metric)(metric.key, metric.value, int(1000 * call.created), metric.step), options))
        # All for the same run, unless the logger's class is the user's.
        for options, group in groupby(metrics, key=lambda one: one[1]):
            same = [metric for metric, _ in group]
            for first in range(0, len(same), _MOST_METRICS):
                self._methods[_LOG_BATCH](metrics=same[first : first + _MOST_METRICS], **options)

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
        # The client returns the value it is given.
        return (args[2] if len(args) > 2 else kwargs.get("value")) if (name, answer) == (_LOG_PARAM, None) else answer


def _in_parts(frames: Sequence[StagedFrame]) -> Iterator[list[StagedFrame]]:
    """Frames whose points fit one request, so that none is sent again because of a later one."""
    part: list[StagedFrame] = []
    points = 0
    for frame in frames:
        if part and points + frame.points > _MOST_METRICS:
            yield part
            part, points = [], 0
        part.append(frame)
        points += frame.points
    if part:
        yield part


@marked(Mark.LOGGER)
class WandbBackend(CallsBackend):
    """Takes a ``WandbLogger`` and its run off the training thread."""

    # When the call that is being delivered was logged, seconds since the epoch.
    _created: float | None = None

    def _make(self, call: LoggedCall) -> None:
        self._created = call.created
        try:
            super()._make(call)
        finally:
            self._created = None

    def _queue(self, name: str, keep: bool, *args: Any, **kwargs: Any) -> Any:
        if name != _LOG:
            return super()._queue(name, keep, *args, **kwargs)
        arguments = {**dict(zip(("data", "step", "commit"), args, strict=False)), **kwargs}
        data = arguments.get("data")
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            # Raises.
            return self._methods[name](*args, **kwargs)
        created = self._created if self._created is not None and self._offload.is_own_thread else time.time()
        return super()._queue(name, keep, **{**arguments, "data": {"_timestamp": created, **data}})
