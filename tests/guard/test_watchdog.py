"""The watchdog, with a clock of its own: no test waits for time to pass."""

import threading

from lightning_ncclsafe.guard.watchdog import Watchdog


class Run:
    """A run whose clock and position are set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.position = 0
        self.idle_s: list[float] = []
        self.failures: list[Exception] = []

    def watchdog(self, **changes: object) -> Watchdog:
        arguments = {
            "position": lambda: self.position,
            "tick": self.idle_s.append,
            "on_failure": self.failures.append,
            "clock": lambda: self.now,
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


def test_a_failure_is_told_once_and_ends_the_watch() -> None:
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
