"""A logger is called in place until it has proved slow: by waiting, not by computing, and not by accident."""

from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.loggers.starting import CallTimer


class Time:
    """Clocks that stand still unless somebody waits or computes."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds


class Log:
    """A logger; each of its calls takes what is said."""

    def __init__(self, takes: Callable[[], None] = lambda: None) -> None:
        self.points: list[Any] = []
        self.takes = takes

    def log_metrics(self, metrics: Any, step: int | None = None) -> str:
        self.takes()
        self.points.append((metrics, step))
        return "logged"

    def save(self) -> None:
        self.takes()


class Tried:
    """A logger on trial, and how often it was found slow."""

    def __init__(self, takes: Callable[[Time], None]) -> None:
        self.time = Time()
        self.log = Log(lambda: takes(self.time))
        self.slow: list[bool] = []
        self.trial = CallTimer(self.log, self.found, clock=lambda: self.time.now, cpu_clock=lambda: self.time.cpu)

    def found(self) -> None:
        self.slow.append(any(isinstance(value, ReplacedMethod) for value in vars(self.log).values()))

    def call(self, times: int, every_s: float = 0.0) -> None:
        for step in range(times):
            self.time.wait(every_s)
            assert self.log.log_metrics({"a": 1.0}, step=step) == "logged"


@pytest.mark.parametrize(
    "takes",
    [lambda time: None, lambda time: time.wait(0.049), lambda time: time.compute(2.0)],
    ids=["nothing", "a little", "computing"],
)
def test_a_fast_logger_is_not_offloaded(takes: Callable[[Time], None]) -> None:
    tried = Tried(takes)
    tried.call(1000)
    assert tried.slow == []
    assert len(tried.log.points) == 1000
    tried.trial.end()
    assert not any(isinstance(value, ReplacedMethod) for value in vars(tried.log).values())


@pytest.mark.parametrize("waits_s", [0.05, 1.0, 60.0])
def test_a_logger_that_keeps_waiting_is_slow_before_its_next_call(waits_s: float) -> None:
    tried = Tried(lambda time: time.wait(waits_s))
    tried.call(3)
    assert tried.slow == []
    tried.call(5)
    assert tried.slow == [False], "once, after the logger is restored"
    assert [step for _, step in tried.log.points] == [*range(3), *range(5)], "each call once, in order"


def test_waiting_for_a_core_does_not_count_as_logger_time() -> None:
    time = Time()

    def asked() -> float:
        # As a busy machine does to whoever calls the system.
        time.wait(0.3)
        return time.cpu

    log, slow = Log(), list[None]()
    CallTimer(log, lambda: slow.append(None), clock=lambda: time.now, cpu_clock=asked)
    for step in range(20):
        log.log_metrics({}, step)
    assert not slow


def test_a_rarely_called_logger_may_wait() -> None:
    tried = Tried(lambda time: time.wait(0.1))
    tried.call(100, every_s=10.0)
    assert tried.slow == []


def test_occasional_waits_are_tolerated() -> None:
    # As for a core, on a machine that is short of them.
    numbers = count()
    tried = Tried(lambda time: time.wait(2.0 if next(numbers) % 5 > 2 else 0.0))
    tried.call(1000)
    assert tried.slow == []


def test_a_nested_call_is_part_of_its_caller() -> None:
    class Saving(Log):
        def log_metrics(self, metrics: Any, step: int | None = None) -> str:
            self.save()
            return super().log_metrics(metrics, step)

    time = Time()
    log = Saving(lambda: time.wait(0.03))
    slow: list[None] = []
    CallTimer(log, lambda: slow.append(None), clock=lambda: time.now, cpu_clock=lambda: 0.0)
    for step in range(3):
        log.log_metrics({}, step)
        log.save()
    assert not slow
    log.log_metrics({}, 3)
    assert slow == [None]


class Slotted:
    __slots__ = ("points",)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...


class Watching(Log):
    """Knows whatever is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert not isinstance(value, ReplacedMethod)
        super().__setattr__(name, value)


def test_an_unusual_logger_is_left_alone() -> None:
    given = Log()
    given.log_metrics = Mock()  # type: ignore[method-assign]
    for log in (Slotted(), Watching(), given, object()):
        trial = CallTimer(log, lambda: None)
        assert not isinstance(getattr(log, "log_metrics", None), ReplacedMethod)
        trial.end()
    assert isinstance(given.log_metrics, Mock)


def test_a_method_patched_by_the_user_meanwhile_is_kept() -> None:
    log: Any = Log()
    trial = CallTimer(log, lambda: None)
    timed = log.log_metrics
    log.log_metrics = lambda metrics, step=None: f"{timed(metrics, step)} by the user's"
    trial.end()
    assert log.log_metrics({"loss": 1.0}, 3) == "logged by the user's"
    assert log.points == [({"loss": 1.0}, 3)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_replacements_can_be_removed_in_any_order(order: tuple[int, int]) -> None:
    log = Log()
    before = dict(vars(log))
    replaced = [ReplacedMethod(log, "save", lambda: None) for _ in range(2)]
    for index in order:
        replaced[index].remove()
    assert vars(log) == before
