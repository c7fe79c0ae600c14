"""Runs pytest with the classes of this package in the place of Lightning's own, or without, and notes what comes of it.

``python in_place.py ours|stock NOTES [arguments of pytest]``. A program rather than a plugin of pytest: launchers start
ranks by running this program again, or by importing it first, so that ours are in place there, too.

NOTES gets a line of JSON when a test begins, and one when it has ended. Tests that it already has are not run again.
"""

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch.strategies as of_lightning
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from outcomes import END, noted

OURS, STOCK = ARMS = ("ours", "stock")

# How often strategies of ours were made, and loggers taken off the training thread, in this process.
used: Counter[str] = Counter()
# Classes of Lightning that ours stand for.
in_place: dict[type, type] = {}


def put_ours_in_place() -> None:
    """For everything that is imported from now on."""
    from lightning_ncclsafe import lightning as ours
    from lightning_ncclsafe.strategies.guarded import GuardedStrategy

    pairs = (
        (of_lightning.DDPStrategy, ours.SafeDDP),
        (of_lightning.FSDPStrategy, ours.SafeFSDP),
        (of_lightning.ModelParallelStrategy, ours.SafeModelParallel),
    )
    for its, our in pairs:
        # Where users import them from. Lightning's own code knows its classes by the names it has imported before,
        # as it would in a program of a user.
        for module in (of_lightning, sys.modules[its.__module__]):
            setattr(module, its.__name__, our)
        for entry in of_lightning.StrategyRegistry.values():
            if entry["strategy"] is its:
                entry["strategy"] = our
        in_place[our] = its
    # Names of ours are not among those that tests expect.
    for name in [name for name in of_lightning.StrategyRegistry if name.endswith("_ncclsafe")]:
        of_lightning.StrategyRegistry.remove(name)
    _count_calls(GuardedStrategy, "__init__")
    _offload_loggers(ours.LoggerOffload)


def _offload_loggers(offload: type) -> None:
    """A ``LoggerOffload`` for every Trainer, which tests that count or compare callbacks do not see."""
    hidden: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(trainer: Any) -> Any:
        if trainer not in hidden:
            hidden[trainer] = offload()
        return hidden[trainer]

    hooks, on_save = call._call_callback_hooks, call._call_callbacks_on_save_checkpoint

    def call_hooks(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> None:
        # Those that watch metrics, ModelCheckpoint above all, are called apart, after all others.
        if isinstance(trainer, Trainer) and not kwargs.get("monitoring_callbacks"):
            given = {name: value for name, value in kwargs.items() if name != "monitoring_callbacks"}
            # As Lightning does: what cannot be called is no hook.
            if callable(method := getattr(of(trainer), hook)):
                method(trainer, trainer.lightning_module, *args, **given)
        hooks(trainer, hook, *args, **kwargs)

    def call_on_save(trainer: Any, checkpoint: dict[str, Any]) -> None:
        if isinstance(trainer, Trainer):
            of(trainer).on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        on_save(trainer, checkpoint)

    call._call_callback_hooks, call._call_callbacks_on_save_checkpoint = call_hooks, call_on_save
    _count_calls(offload, "_start")


def _count_calls(kind: type, name: str) -> None:
    function: Callable[..., Any] = getattr(kind, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        used[kind.__name__] += 1
        return function(*args, **kwargs)

    setattr(kind, name, counted)


class AsEver:
    """Tests have their names with ours in place, too, and run once: what repeats those that fail is not installed."""

    def pytest_make_parametrize_id(self, val: object) -> str | None:
        return in_place[val].__name__ if isinstance(val, type) and val in in_place else None

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "flaky(reruns): fails now and then")


class Notes:
    """Writes down what comes of each test."""

    def __init__(self, path: Path) -> None:
        self._begun = {line["id"] for line in noted(path)}
        self._file = path.open("a")
        self._outcome: dict[str, Any] = {}

    def _write(self, **line: Any) -> None:
        self._file.write(f"{json.dumps(line)}\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._begun]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                is_skipped = any(
                    mark.args[:1] == (True,) or mark.kwargs.get("condition") is True
                    for mark in item.iter_markers("skipif")
                )
                self._write(id=item.nodeid, is_skipped=is_skipped)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            why = _last_line(report.longreprtext)
            self._write(id=report.nodeid, outcome="failed", why=why, used_ours=False, took_s=0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = {"outcome": "passed", "why": "", "took_s": 0.0, "before": used.total()}
        self._write(id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        note = self._outcome
        note["took_s"] = round(note["took_s"] + report.duration, 3)
        if report.passed or note["outcome"] == "failed":
            return
        if hasattr(report, "wasxfail"):
            note.update(outcome="xfailed", why=report.wasxfail)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            note.update(outcome="skipped", why=reason.removeprefix("Skipped: "))
        else:
            note.update(outcome="failed", why=_last_line(report.longreprtext), text=report.longreprtext)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        note = self._outcome
        self._write(id=nodeid, used_ours=used.total() > note.pop("before"), **note)

    def pytest_sessionfinish(self) -> None:
        self._write(id=END)


def _last_line(text: str) -> str:
    said = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return next(iter(said), text.strip().rpartition("\n")[2])[:300]


def main() -> None:
    # A rank that a launcher has started runs the same test as the first, and leaves noting to it.
    plugins = [AsEver()] if "LOCAL_RANK" in os.environ else [AsEver(), Notes(Path(sys.argv[2]))]
    sys.exit(pytest.main(sys.argv[3:], plugins))


if len(sys.argv) > 1 and sys.argv[1] == OURS:
    put_ours_in_place()

if __name__ == "__main__":
    main()
