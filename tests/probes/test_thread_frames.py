"""Asking for the frames of all threads: nothing is collected meanwhile, which could hang the training."""

import gc
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_ncclsafe
from lightning_ncclsafe.probes.process import thread_frames
from lightning_ncclsafe.probes.process.thread_frames import current_exceptions, current_frames

PACKAGE = Path(lightning_ncclsafe.__file__).parent
CALL = re.compile(r"sys\._current_(?:frames|exceptions)\b")


@pytest.fixture
def collected() -> Iterator[list[str]]:
    """Grows when garbage is collected: with each new object that is tracked, if it may be."""
    phases: list[str] = []
    threshold = gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    gc.set_threshold(1)
    yield phases
    gc.set_threshold(*threshold)
    gc.callbacks.remove(note)


def test_frames_and_exceptions_are_those_of_python() -> None:
    try:
        raise ValueError("now")
    except ValueError as error:
        handled = current_exceptions()[threading.get_ident()]
        assert error in (handled if isinstance(handled, tuple) else (handled,))
    assert current_frames()[threading.get_ident()] is sys._getframe()
    release = threading.Event()
    waiting = threading.Thread(target=release.wait)
    waiting.start()
    assert current_frames()[waiting.ident or 0].f_back is not None
    release.set()
    waiting.join()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_whether_garbage_is_collected_stays_as_it_is(is_enabled: bool) -> None:
    def fails() -> None:
        raise RuntimeError("no frames")

    (gc.enable if is_enabled else gc.disable)()
    try:
        current_frames()
        assert gc.isenabled() is is_enabled
        with pytest.raises(RuntimeError, match="no frames"):
            thread_frames._without_collecting(fails)
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("may_collect", [True, False])
def test_nothing_is_collected_in_the_call(
    monkeypatch: pytest.MonkeyPatch, collected: list[str], may_collect: bool
) -> None:
    """What is created here stands for a frame."""
    monkeypatch.setattr(thread_frames, "_MAY_COLLECT", may_collect)

    def read() -> bool:
        before = len(collected)
        kept: list[Any] = []
        for _ in range(99):
            kept = [kept, []]
        return len(collected) > before

    assert thread_frames._without_collecting(read) is not may_collect


def test_python_is_asked_here_only() -> None:
    asking = [path for path in PACKAGE.rglob("*.py") if CALL.search(path.read_text())]
    assert asking == [Path(thread_frames.__file__)]
