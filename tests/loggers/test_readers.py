"""Something is done before this program reads below a directory, by whatever means, and only then."""

import csv
import glob
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas
import pytest

from lightning_ncclsafe.loggers import readers


class Heard:
    count = 0

    def hear(self) -> None:
        self.count += 1


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    made = Heard()
    (tmp_path / "logs" / "below").mkdir(parents=True)
    (tmp_path / "logs2").mkdir()
    for folder in ("logs", "logs2"):
        (tmp_path / folder / "metrics.csv").write_text("a,step\n1.0,0\n")
    readers.watch(str(tmp_path / "logs"), ("metrics.csv", "hparams"), made.hear)
    yield made
    readers.leave(made.hear)


def by_mmap(path: Path) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0):
        pass


def not_there(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        path.open()


READS: dict[str, Callable[[Path], object]] = {
    "open": lambda folder: open(folder / "metrics.csv").close(),
    "os.open": lambda folder: os.close(os.open(folder / "metrics.csv", os.O_RDONLY)),
    "bytes": lambda folder: open(os.fsencode(folder / "metrics.csv")).close(),
    "pathlib": lambda folder: (folder / "metrics.csv").read_text(),
    "csv": lambda folder: list(csv.reader((folder / "metrics.csv").open())),
    "pandas": lambda folder: pandas.read_csv(folder / "metrics.csv"),
    "mmap": lambda folder: by_mmap(folder / "metrics.csv"),
    "copy": lambda folder: shutil.copy(folder / "metrics.csv", folder.parent / "copy"),
    "listdir": os.listdir,
    "scandir": lambda folder: os.scandir(folder).close(),
    "iterdir": lambda folder: list(folder.iterdir()),
    "glob": lambda folder: glob.glob(str(folder / "*.csv")),
    "rglob": lambda folder: list(folder.parent.rglob("metrics.*")),
    "walk": lambda folder: list(os.walk(folder)),
    "below": lambda folder: os.listdir(folder / "below"),
    "not yet there": lambda folder: not_there(folder / "below" / "hparams.yaml"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_way_of_reading_is_detected(tmp_path: Path, heard: Heard, read: Callable[[Path], object]) -> None:
    read(tmp_path / "logs")
    assert heard.count


def test_a_relative_path_is_recognised(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs/metrics.csv").read_text()
    assert heard.count == 1
    monkeypatch.chdir(tmp_path / "logs")
    Path("metrics.csv").read_text()
    assert heard.count == 2


def test_reading_in_another_thread_is_detected(tmp_path: Path, heard: Heard) -> None:
    thread = threading.Thread(target=(tmp_path / "logs/metrics.csv").read_text)
    thread.start()
    thread.join()
    assert heard.count == 1


def test_writing_or_reading_elsewhere_is_ignored(tmp_path: Path, heard: Heard) -> None:
    (tmp_path / "logs2" / "metrics.csv").read_text()
    os.listdir(tmp_path)
    (tmp_path / "logs" / "model.ckpt").write_bytes(b"weights")
    assert (tmp_path / "logs" / "model.ckpt").read_bytes() == b"weights"
    with (tmp_path / "logs" / "metrics.csv").open("a") as file:
        file.write("2.0,1\n")
    os.close(os.open(tmp_path / "logs" / "other", os.O_WRONLY | os.O_CREAT))
    handle = os.open(tmp_path, os.O_RDONLY)
    os.listdir(handle)
    os.close(handle)
    assert heard.count == 0


def test_a_failing_hook_does_not_break_reading(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("a bug of ours")

    (tmp_path / "metrics.csv").write_text("a")
    readers.watch(str(tmp_path), ("metrics.csv",), fail)
    try:
        assert (tmp_path / "metrics.csv").read_text() == "a"
        assert os.listdir() is not None
    finally:
        readers.leave(fail)


def test_two_watchers_can_share_a_directory(tmp_path: Path, heard: Heard) -> None:
    other = Heard()
    readers.watch(str(tmp_path / "logs"), ("events",), other.hear)
    (tmp_path / "logs" / "metrics.csv").read_text()
    assert (heard.count, other.count) == (1, 0)
    os.listdir(tmp_path / "logs")
    assert (heard.count, other.count) == (2, 1)
    readers.leave(other.hear)
    os.listdir(tmp_path / "logs")
    assert (heard.count, other.count) == (3, 1)


def test_leaving_stops_the_watch(tmp_path: Path, heard: Heard) -> None:
    readers.leave(heard.hear)
    (tmp_path / "logs" / "metrics.csv").read_text()
    assert heard.count == 0
