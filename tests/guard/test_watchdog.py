"""The watchdog, with a clock of its own: no test waits for time to pass."""

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from lightning_ncclsafe.guard.watchdog import Watchdog


class Run:
    """A run whose clock and position are set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu = 7.0
        self.position = 0
        self.idle_s: list[float] = []
        self.failures: list[Exception] = []

    def watchdog(self, **changes: object) -> Watchdog:
        arguments = {
            "position": lambda: self.position,
            "tick": self.idle_s.append,
            "on_failure": self.failures.append,
            "clock": lambda: self.now,
            "cpu_clock": lambda: self.cpu,
            **changes,
        }
        return Watchdog(**arguments)  # type: ignore[arg-type]


def test_idle_time_counts_from_the_last_change() -> None:
    run = Run()
    watchdog = run.watchdog()
    watchdog.poll()
    run.now += 5
    watchdog.poll()
    run.position, run.now = 1, run.now + 2
    watchdog.poll()
    run.now += 3
    watchdog.poll()
    assert run.idle_s == [0, 5, 0, 3]


@pytest.mark.parametrize(
    ("took", "cpu", "idle"),
    [(3600.25, 0.01, 1), (3600.25, 90, 3601.25), (8, 0.01, 9)],
    ids=["stopped", "the GIL was held", "a busy host"],
)
def test_a_process_that_is_stopped_does_not_wait(took: float, cpu: float, idle: float) -> None:
    run = Run()

    def wait(_: float) -> None:
        run.now, run.cpu = run.now + took, run.cpu + cpu

    watchdog = run.watchdog(poll_s=0.25)
    watchdog._awake = cast("threading.Event", SimpleNamespace(wait=wait, clear=lambda: None))
    watchdog.poll()
    run.now += 0.75
    watchdog.pause()
    run.now += 0.25
    watchdog.poll()
    assert run.idle_s == [0, pytest.approx(idle, abs=0.3)]


def test_a_process_that_is_late_again_and_again_waits() -> None:
    """As on a host that swaps; of one that is stopped twice, there are ticks between."""
    run, takes_s = Run(), iter((60.25, 60.25, 0.25, 60.25))

    def wait(_: float) -> None:
        run.now += next(takes_s)

    watchdog = run.watchdog(poll_s=0.25)
    watchdog._awake = cast("threading.Event", SimpleNamespace(wait=wait, clear=lambda: None))
    watchdog.poll()
    for _ in range(4):
        watchdog.pause()
        watchdog.poll()
    assert run.idle_s == [0, 0.25, 60.5, 60.75, 61.0]


def test_a_failure_is_reported_once_and_ends_the_watch() -> None:
    run = Run()
    told = threading.Event()

    def fail(_: float) -> None:
        raise KeyError("broken")

    watchdog = run.watchdog(tick=fail, on_failure=lambda error: (run.failures.append(error), told.set()), poll_s=0.001)
    watchdog.start()
    assert told.wait(10)
    watchdog.stop()
    assert [repr(error) for error in run.failures] == ["KeyError('broken')"]
    assert "ncclsafe-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_it_can_be_woken_and_stopped_at_once() -> None:
    run = Run()
    ticked = threading.Event()
    watchdog = run.watchdog(tick=lambda _: ticked.set(), poll_s=3600)
    watchdog.start()
    watchdog.wake()
    assert ticked.wait(10)
    watchdog.stop()
    assert "ncclsafe-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_it_can_stop_itself() -> None:
    run = Run()
    stopped = threading.Event()
    watchdog = run.watchdog(tick=lambda _: (watchdog.stop(), stopped.set()), poll_s=0.001)
    watchdog.start()
    assert stopped.wait(10)
    watchdog.stop()
