"""What of a dataset several processes cannot use at once is found by looking alone."""

import gzip
import io
import logging
import multiprocessing
import queue
import socket
import sqlite3
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_ncclsafe.loaders.tuning.eligibility import forks, unforkable


class Digits(Dataset[int]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


class Slotted:
    __slots__ = ("__private", "unset")

    def __init__(self, value: Any) -> None:
        self.__private = value


class Refusing:
    """Whatever of it is called fails the test."""

    def __init__(self) -> None:
        self.items = [1]

    def __getattribute__(self, name: str) -> Any:
        pytest.fail(f"{name} was called")

    def __iter__(self) -> Any:
        pytest.fail("it was iterated")

    def __eq__(self, other: object) -> bool:
        pytest.fail("it was compared")

    @property
    def file(self) -> Any:
        pytest.fail("its property was called")


def opened(folder: Path, *arguments: Any) -> Any:
    return Path.open(folder / "a", *arguments)


def zip_file(folder: Path) -> Any:
    return zipfile.ZipFile(folder / "a.zip", "w")


def tar_file(folder: Path) -> Any:
    return tarfile.open(folder / "a.tar", "w")


HELD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "binary": (lambda folder: opened(folder, "wb"), "an open file (Digits.held)"),
    "unbuffered": (lambda folder: opened(folder, "wb", 0), "an open file (Digits.held)"),
    "text": (lambda folder: opened(folder, "w"), "an open file (Digits.held)"),
    "gzip": (lambda folder: gzip.GzipFile(folder / "a", "wb"), "an open file (Digits.held.myfileobj)"),
    "zip": (zip_file, "an open zip file (Digits.held)"),
    "tar": (tar_file, "an open tar file (Digits.held)"),
    "database": (lambda folder: sqlite3.connect(folder / "a.db"), "a database connection (Digits.held)"),
    "socket": (lambda _: socket.socket(), "a socket (Digits.held)"),
}
SHARED: dict[str, tuple[Callable[[], Any], str]] = {
    "lock": (threading.Lock, "a thread lock (Digits.held)"),
    "reentrant lock": (threading.RLock, "a thread lock (Digits.held)"),
    "condition": (threading.Condition, "a thread lock (Digits.held)"),
    "queue": (queue.Queue, "a thread queue (Digits.held)"),
    "simple queue": (queue.SimpleQueue, "a thread queue (Digits.held)"),
    "executor": (lambda: ThreadPoolExecutor(1), "a pool of threads or processes (Digits.held)"),
    "in a slot": (lambda: Slotted(threading.Lock()), "a thread lock (Digits.held._Slotted__private)"),
    "in a list": (lambda: [1, "a", threading.Lock()], "a thread lock (Digits.held[2])"),
    "in a dict": (lambda: {"a": (threading.Lock(),)}, "a thread lock (Digits.held['a'][0])"),
    "by a method": (lambda: Digits(lock=threading.Lock()).__len__, "(Digits.held.__self__.lock)"),
}


@pytest.mark.parametrize("kind", HELD)
def test_open_handles_are_found_and_closed_ones_are_not(kind: str, tmp_path: Path) -> None:
    make, words = HELD[kind]
    held = make(tmp_path)
    assert unforkable(Digits(held=held)) == f"its dataset holds {words}"
    held.close()
    # Only sqlite3 does not tell.
    assert (unforkable(Digits(held=held)) == "") == (kind != "database")


@pytest.mark.parametrize("kind", SHARED)
def test_thread_primitives_are_found(kind: str) -> None:
    make, words = SHARED[kind]
    found = unforkable(Digits(held=make()))
    assert found.startswith("its dataset holds a ") and found.endswith(words)


def test_wrapper_datasets_do_not_count_as_levels(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        dataset: Any = Digits(reader=Digits(inner=Digits(file=file)))
        for _ in range(6):
            dataset = ConcatDataset([Subset(dataset, [0, 1]), Subset(Digits(), [1])])
        assert unforkable(dataset).endswith(".reader.inner.file)")


SURVIVES: dict[str, Callable[[], Any]] = {
    "in memory": lambda: io.BytesIO(b"abc"),
    "standard error": lambda: sys.stderr,
    "logger": lambda: logging.getLogger("x"),
    "lock between processes": multiprocessing.Lock,
    "tensor": lambda: torch.zeros(3),
    "refusing": Refusing,
    "list": lambda: [Refusing()],
    "class": lambda: {Refusing: Refusing},
    "local": threading.local,
}


@pytest.mark.parametrize("kind", SURVIVES)
def test_fork_safe_objects_are_allowed(kind: str) -> None:
    logging.getLogger("x").addHandler(logging.StreamHandler(sys.stderr))
    assert unforkable(Digits(held=Slotted(SURVIVES[kind]()))) == ""
    assert unforkable(TensorDataset(torch.zeros(4))) == ""


def test_a_shut_down_pool_is_allowed() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    assert unforkable(Digits(held=executor)) == ""


def test_a_thread_is_found_while_it_runs() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    found = unforkable(Digits(held=thread))
    over.set()
    thread.join()
    assert found == "its dataset holds a thread (Digits.held)"
    assert not unforkable(Digits(held=thread)).startswith("its dataset holds a thread")


def test_the_search_is_bounded() -> None:
    loops: dict[str, Any] = {}
    loops["self"] = loops
    dataset = Digits(loops=loops, many=[[Digits(a=[1]) for _ in range(64)] for _ in range(64)])
    dataset.many[60][60].a.append(threading.Lock())  # type: ignore[attr-defined] # beyond what is looked at
    assert unforkable(dataset) == ""


def test_workers_are_forked_by_the_start_method_of_the_loader_or_the_system() -> None:
    default = multiprocessing.get_start_method(allow_none=True)
    assert forks(DataLoader(Digits(), num_workers=1, multiprocessing_context="fork"))
    assert not forks(DataLoader(Digits(), num_workers=1, multiprocessing_context="spawn"))
    assert forks(DataLoader(Digits())) == ((default or multiprocessing.get_all_start_methods()[0]) == "fork")
    assert multiprocessing.get_start_method(allow_none=True) == default
