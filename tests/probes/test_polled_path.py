"""The value of which a rank makes the path that it waits for, by the source of the loop in which it waits."""

import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe.probes.process import polled_path
from lightning_ncclsafe.probes.process.polled_path import own_path_at
from lightning_ncclsafe.probes.source import own_values
from lightning_ncclsafe.probes.source.own_values import hashes_text_alike

SOURCE = """
import os, time, zlib
from abc import ABCMeta
from pathlib import Path
from subprocess import call
from time import sleep

ROOT = Path("/nonexistent")
{first}

class Cache:
    def __init__(self, config, strategy):
        self.config = config
        key = {key}
        {and_then}
        self.path = ROOT / f"stats-{{key}}.json"
        self.other = ROOT / "fixed.json"

    def wait(self):
        while {test}:
            {pause}

    def wait_elsewhere(self):
        wait_for(self.path, 5.0)

    def wait_by_name(self):
        folder = "folder-" + str({key})
        return self.wait_in(folder)

    def wait_in(self, folder):
        wait_for(path=f"/nonexistent/{{folder}}")

    def only_pause(self):
        if not self.path.exists():
            sleep(0)
        while not self.other.exists():
            break

    def wait_for_another(self):
        while not self.path.exists():
            break
        while not self.other.exists():
            sleep(0)

def wait_for(path, patience=1.0):
    while not os.path.exists(path):
        sleep(0)

{last}
"""
HASH, EXISTS = "hash(config.lower())", "not self.path.exists()"
AT_KEY, AT_FOLDER = "14 in __init__", "27 in wait_by_name"


@pytest.fixture(autouse=True)
def hashed_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_values, "hashes_text_alike", lambda: False)


class Strategy:
    def broadcast(self, value: object) -> object:
        return value

    def now(self) -> str:
        return "17"


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, method: str = "wait", **parts: str) -> str:
    """What is found while a method pauses; the frames of the test are not there."""
    file = folder / "cache.py"
    filled = {"key": HASH, "test": EXISTS, "pause": "sleep(0)", "first": "", "and_then": "", "last": ""} | parts
    file.write_text(SOURCE.format(**filled))
    answers: list[str] = []

    def frames() -> Iterator[Any]:
        every = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
        there = (frame for frame in every if frame.f_code.co_filename == str(file))
        # Without f_locals: to read them keeps all of a function's variables alive.
        return (SimpleNamespace(f_code=one.f_code, f_lineno=one.f_lineno, f_globals=one.f_globals) for one in there)

    def pause(_: float) -> None:
        answers.append(own_path_at())
        raise TimeoutError

    monkeypatch.setattr(polled_path, "main_thread_frames", frames)
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    names["sleep"] = names["answer"] = pause
    with pytest.raises(TimeoutError):
        getattr(names["Cache"]("a", Strategy()), method)()
    return answers[0].removeprefix(f"{file}:")


@pytest.mark.parametrize(
    ("parts", "method", "place"),
    [
        ({}, "wait", AT_KEY),
        ({"key": "hash(str(config)) & 0xFFFF"}, "wait", AT_KEY),
        ({"key": "hash(('run', config))"}, "wait", AT_KEY),
        ({"key": "time.strftime('%H%M%S')"}, "wait", AT_KEY),
        ({"key": "str(time.time_ns())"}, "wait", AT_KEY),
        ({"test": "not os.path.isfile(self.path)"}, "wait", AT_KEY),
        ({"test": "time.time() < 1e12 and not self.path.exists()"}, "wait", AT_KEY),
        ({}, "wait_elsewhere", AT_KEY),
        ({"key": "hash(f'{self.config}')"}, "wait_by_name", AT_FOLDER),
    ],
)
def test_a_value_that_each_process_has_for_itself_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str], method: str, place: str
) -> None:
    assert found(tmp_path, monkeypatch, method, **parts) == place


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"key": "config.lower()"}, id="the same in all"),
        pytest.param({"key": "zlib.crc32(config.encode())"}, id="a hash that is the same in all"),
        pytest.param({"key": "hash((3, 224))"}, id="numbers have one hash"),
        pytest.param({"key": "hash(config)"}, id="perhaps a number"),
        pytest.param({"key": "time.strftime('%Y%m%d')"}, id="a date"),
        pytest.param({"key": "time.strftime('%H', time.gmtime(0))"}, id="a given time"),
        pytest.param({"key": "int(time.time() // 1e12)"}, id="a coarse time"),
        pytest.param({"key": "strategy.now()"}, id="a clock of its own"),
        pytest.param({"pause": "sleep(0); self.config = self.config"}, id="a loop that does more"),
        pytest.param({"first": "def hash(text): return len(text)"}, id="a hash of one's own"),
        pytest.param({"key": "strategy.broadcast(time.strftime('%H'))"}, id="sent to all"),
        pytest.param({"key": "config", "and_then": "began = time.time()"}, id="beside it"),
        pytest.param({"key": "config", "and_then": "key, began = 'a', time.time()"}, id="on the same line"),
        pytest.param({"key": "dict(began=time.time())['began']"}, id="in what is made of it"),
        pytest.param({"key": "os.getpid()"}, id="meant to be its own"),
        pytest.param({"and_then": "call(['true', str(key)])"}, id="told to a process"),
        pytest.param({"test": "not self.other.exists()"}, id="another path"),
        pytest.param({"test": "self.config and not self.other.exists()"}, id="still another"),
        pytest.param({"test": "self.path and hash('a')"}, id="nothing is asked about"),
        pytest.param({"test": "self.config.join('')  or self.path.parent"}, id="until it is gone"),
        pytest.param({"pause": "answer(0)"}, id="more than a pause"),
    ],
)
def test_any_other_wait_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str]) -> None:
    assert found(tmp_path, monkeypatch, **parts) == ""


@pytest.mark.parametrize("method", ["only_pause", "wait_for_another"])
def test_a_pause_outside_of_the_loop_does_not_wait_for_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    assert found(tmp_path, monkeypatch, method) == ""


def test_code_of_others_in_between_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_path, "is_user_code", lambda file: False)
    assert found(tmp_path, monkeypatch) == ""


@pytest.mark.parametrize(
    ("environment", "is_alike"),
    [(b"A=1\0PYTHONHASHSEED=0\0", True), (b"PYTHONHASHSEED=random\0", False), (b"A=1\0", False), (b"", False)],
)
def test_with_a_seed_from_the_start_text_hashes_alike(tmp_path: Path, environment: bytes, is_alike: bool) -> None:
    file = tmp_path / "environ"
    file.write_bytes(environment)
    assert hashes_text_alike(file) == is_alike


def test_with_a_seed_no_hash_is_a_value_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_values, "hashes_text_alike", lambda: True)
    assert found(tmp_path, monkeypatch) == ""


def test_of_several_classes_the_objects_own_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = "class Below(Cache): pass"
    assert found(tmp_path, monkeypatch, last=below) == ""


def test_the_processes_that_are_forked_from_one_have_computed_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    assert found(tmp_path, monkeypatch, key="time.strftime('%H%M%S')") == ""
