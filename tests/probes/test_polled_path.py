"""The value of which a rank makes the path that it waits for, by the source of the loop in which it waits."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.probes.process import polled_path
from lightning_ncclsafe.probes.process.polled_path import own_path_at

SOURCE = """
import glob, os, tempfile, time
from pathlib import Path

ROOT = Path("/nonexistent")

class Cache:
    def __init__(self, config):
        key = {key}
        self.path = ROOT / f"stats-{{key}}.json"
        self.other = ROOT / "fixed.json"

    def wait(self):
        while {test}:
            pause()

    def wait_elsewhere(self):
        wait_for(self.path, 5.0)

    def wait_by_name(self):
        folder = {key}
        return self.wait_in(folder)

    def wait_in(self, folder):
        wait_for(path=f"/nonexistent/{{folder}}")

    def pause(self):
        if not self.path.exists():
            pause()

def wait_for(path, patience=1.0):
    while not os.path.exists(path):
        pause()
"""
HASH, EXISTS = "hash(config)", "not self.path.exists()"


def found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str = HASH, test: str = EXISTS, method: str = "wait"
) -> str:
    """What is found while a method pauses; the frames of the test are not there."""
    file = folder / "cache.py"
    file.write_text(SOURCE.format(key=key, test=test))
    answers: list[str] = []

    def frames() -> Iterator[Any]:
        every = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
        return (frame for frame in every if frame.f_code.co_filename == str(file))

    def pause() -> None:
        answers.append(own_path_at())
        raise TimeoutError

    monkeypatch.setattr(polled_path, "main_thread_frames", frames)
    names: dict[str, Any] = {"pause": pause, "config": "a"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(TimeoutError):
        getattr(names["Cache"]("a"), method)()
    return answers[0].removeprefix(f"{file}:")


@pytest.mark.parametrize(
    ("key", "test", "method", "place"),
    [
        (HASH, EXISTS, "wait", "9 in __init__"),
        ("hash(config) & 0xFFFF", "not os.path.isfile(self.path)", "wait", "9 in __init__"),
        ("time.strftime('%H%M%S')", "not self.path.is_file()", "wait", "9 in __init__"),
        ("os.getpid()", "not [*ROOT.glob(str(self.path.name))]", "wait", "9 in __init__"),
        (HASH, EXISTS, "wait_elsewhere", "9 in __init__"),
        (HASH, EXISTS, "wait_by_name", "21 in wait_by_name"),
    ],
)
def test_a_value_that_each_process_has_for_itself_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, test: str, method: str, place: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert found(tmp_path, monkeypatch, key, test, method) == place


@pytest.mark.parametrize(
    ("key", "test", "method"),
    [
        pytest.param("config.lower()", EXISTS, "wait", id="the same in all"),
        pytest.param("len(config)", EXISTS, "wait_elsewhere", id="given on"),
        pytest.param(HASH, "not self.other.exists()", "wait", id="another path"),
        pytest.param(HASH, "time.time() < hash('a') or self.path", "wait", id="no path is asked about"),
        pytest.param(HASH, EXISTS, "pause", id="no loop"),
    ],
)
def test_any_other_wait_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, test: str, method: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert found(tmp_path, monkeypatch, key, test, method) == ""


@pytest.mark.parametrize(("seed", "is_found"), [("0", False), ("random", True)])
def test_with_a_seed_all_processes_hash_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: str, is_found: bool
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert bool(found(tmp_path, monkeypatch)) == is_found
