"""What ranks are given to tell when Lightning's own launcher finds that one of them has ended."""

import threading

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_ncclsafe.strategies import launchers

NOBODY = (1 << 22) + 1


class WatchedStrategy:
    """A strategy whose calls are watched, as far as launchers see it."""

    def watch(self, trainer: object) -> threading.Lock:
        return threading.Lock()


class OneTrainer:
    strategy = WatchedStrategy()

    def fit(self) -> str:
        return "fitted"


class EndedRank:
    """A child that was killed."""

    pid, returncode = 4711, -9

    def poll(self) -> None: ...


def test_the_others_are_killed_once_they_have_had_time_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    told, begun, waits = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(_ChildProcessObserver, "_terminate_all", lambda _: events.append("killed"))
    monkeypatch.setattr(launchers.time, "sleep", lambda _: (waits.set(), told.wait(20)))
    observer = _ChildProcessObserver(main_pid=NOBODY, child_processes=[EndedRank()])  # type: ignore[list-item]
    observer.run = lambda: (begun.wait(20), observer._run())  # type: ignore[assignment, func-returns-value]
    observer.start()
    assert launchers.guarded(None).launch(OneTrainer().fit) == "fitted"
    assert launchers.guarded(None).launch(OneTrainer().fit) == "fitted"
    begun.set()
    assert waits.wait(20)
    events.append("told")
    told.set()
    observer.join(20)
    assert events == ["told", "killed"]
