"""What code of ours does on a rank is written down, wherever it is done, so that nobody is called late for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe.code import own_work
from lightning_ncclsafe.code.own_work import OwnWork, take_own_work
from lightning_ncclsafe.loaders import collecting
from lightning_ncclsafe.loaders.collecting import LoaderCollector
from lightning_ncclsafe.loggers.intake import MARKER
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.offload import Offload
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.settings import AgreementSettings

MS = 1_000_000


def work(*_: Any) -> None:
    time.sleep(0.001)


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    take_own_work()
    yield
    take_own_work()


def busy_ns() -> int:
    return sum(end_ns - begin_ns for begin_ns, end_ns in take_own_work())


def test_own_work_is_returned_once() -> None:
    before_ns = time.time_ns()
    with OwnWork():
        work()
    ((begin_ns, end_ns),) = take_own_work()
    assert before_ns <= begin_ns <= end_ns - MS and end_ns <= time.time_ns()
    assert take_own_work() == []


def test_own_work_of_threads_and_failures_counts() -> None:
    def fails() -> None:
        with suppress(ZeroDivisionError), OwnWork():
            work()
            raise ZeroDivisionError

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join(20)
    assert busy_ns() >= MS


def test_very_short_own_work_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_work, "_LEAST_NS", 3_600 * 1000 * MS)
    with OwnWork():
        pass
    assert take_own_work() == []


def test_own_work_is_bounded_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_work, "_LEAST_NS", 0)
    for _ in range(5000):
        with OwnWork():
            pass
    assert len(take_own_work()) == 4096


class Loader:
    def __iter__(self) -> Iterator[int]:
        return iter((1, 2, 3))


def collector(**more: Any) -> LoaderCollector:
    return LoaderCollector(
        trainer=None,
        strategy=None,
        agreement=None,
        settings=AgreementSettings(),
        combined=tuple,
        tracker=ActionTracker(),
        timeout_s=1.0,
        **more,
    )


def test_comparing_and_tuning_loaders_is_own_work() -> None:
    collector(on_stage=work).prepared(Loader())
    assert busy_ns() >= MS


def test_starting_an_epoch_of_a_tuned_loader_is_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    iterates: list[Any] = []
    monkeypatch.setattr(collecting, "ReplacedIteration", lambda _, iterate, **__: iterates.append(iterate))
    tuner = SimpleNamespace(take=lambda *_, **__: [lambda begin: (work(), begin())[1]])
    collector(tuner=tuner).prepared(Loader())
    take_own_work()
    assert [*iterates[0](lambda: iter((1, 2, 3)))] == [1, 2, 3]
    assert busy_ns() >= MS


def test_putting_entries_into_the_offload_is_own_work() -> None:
    """The caller may have to wait if the queue is full."""
    offload = Offload.__new__(Offload)
    vars(offload).update(_intake=SimpleNamespace(put=work), _is_forked=False, ledger=Ledger("CSVLogger", print))
    offload.put(MARKER)
    assert busy_ns() >= MS
