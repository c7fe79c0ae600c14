"""Every byte and every row reaches its file exactly once, whatever fails when."""

import copy
import csv
import errno
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.loggers.csv_logs import _ExperimentWriter

from lightning_ncclsafe.loggers.destinations import LocalDestination, RemoteDestination, open_destination
from lightning_ncclsafe.loggers.files import Anchors, FilesSink
from lightning_ncclsafe.loggers.segments import StagedFrame

CSV = "metrics.csv"
ROWS: list[dict[str, Any]] = [
    {"loss": 0.0, "step": 0},
    {"loss": 1.5, "step": 1},
    {"step": 2},
    {"acc": float("nan"), "loss": 1e-12, "step": 3},
    {"note": 'a "quoted",\nlong\r\ntext, and "another"', "step": 4},
    {"acc": float("inf"), "loss": None, "note": "", "step": 5},
    {"step": 6, "zeta": True},
    {"loss": 0.1 + 0.2, "step": 7},
]


class Faulty(LocalDestination):
    """Fails when it has written so many bytes more."""

    left: float = float("inf")

    def append(self, file: str, data: bytes) -> None:
        written = data[: int(min(self.left, len(data)))]
        self.left -= len(data)
        super().append(file, written)
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")

    def replace(self, file: str, data: bytes) -> None:
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        super().replace(file, data)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def memory() -> Iterator[str]:
    """A directory of fsspec's memory."""
    yield "memory://logs/version_0"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def appended(text: str, file: str = "events") -> StagedFrame:
    return StagedFrame(kind="append", file=file, body=text.encode())


def rows_frame(*rows: dict[str, Any], file: str = CSV) -> StagedFrame:
    return StagedFrame(kind="rows", file=file, body=b"\n".join(json.dumps(row).encode() for row in rows))


def whole(text: str, if_absent: bool = False) -> StagedFrame:
    return StagedFrame(
        kind="whole", file="h.yaml", body=text.encode(), details={"if_absent": True} if if_absent else {}
    )


def lightning_writes(folder: Path, *saves: list[dict[str, Any]]) -> bytes:
    """What Lightning's own writer makes of these rows."""
    writer = _ExperimentWriter(str(folder))
    for rows in saves:
        for row in rows:
            writer.metrics.append(dict(row))
        writer.save()
    return (folder / CSV).read_bytes()


def parsed(data: bytes) -> list[dict[str, str]]:
    return [
        {key: value for key, value in row.items() if value}
        for row in csv.DictReader(io.StringIO(data.decode(), newline=""))
    ]


class Again:
    """A delivery that failed is tried again: by the same sink, or by another process with what was noted."""

    def __init__(self, destination: Faulty, crashes: bool) -> None:
        self.anchors: Anchors = {}
        self.folder = Path(destination.path)
        self._destination = destination
        self._crashes = crashes
        self._noted: Anchors = {}
        self._sink = FilesSink(destination, self.anchors, self.note)

    def note(self) -> None:
        self._noted = copy.deepcopy(self.anchors)

    def deliver(self, frames: list[StagedFrame]) -> None:
        self._sink.deliver(frames)
        self.note()

    def fail(self, frames: list[StagedFrame], after: int) -> None:
        self._destination.left = after
        with pytest.raises(OSError, match="Input/output"):
            self._sink.deliver(frames)
        self._destination.left = float("inf")
        if self._crashes:
            self.anchors = copy.deepcopy(self._noted)
            self._sink = FilesSink(self._destination, self.anchors, self.note)


@pytest.fixture(params=[False, True], ids=["fault", "crash"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Again]:
    return lambda name: Again(Faulty(str(tmp_path / name)), request.param)


def test_bytes_reach_their_files_in_order(logs: Path) -> None:
    sink = FilesSink(LocalDestination(str(logs)), {})
    sink.deliver([appended("a"), appended("1", "sub/other"), appended("b")])
    sink.deliver([appended("c"), appended("2", "sub/other")])
    assert (logs / "events").read_text() == "abc"
    assert (logs / "sub" / "other").read_text() == "12"


def test_many_frames_become_one_write_for_each_file(logs: Path) -> None:
    destination = LocalDestination(str(logs))
    written: list[tuple[str, bytes]] = []
    destination.append = lambda file, data: written.append((file, data))  # type: ignore[method-assign]
    FilesSink(destination, {}).deliver([appended("a"), appended("1", "other"), appended("b")])
    assert written == [("events", b"ab"), ("other", b"1")]


@pytest.mark.parametrize("before", ["", "before "])
def test_a_fault_after_any_byte_neither_loses_nor_doubles_bytes(again: Callable[[str], Again], before: str) -> None:
    first, more = [appended("hello "), appended("world ")], [appended("and "), appended("more")]
    for after in range(12):
        one = again(str(after))
        if before:
            one.deliver([appended(before)])
        one.fail(first, after)
        one.fail(first, 0)
        one.deliver(first + more)
        one.fail([appended(" Again")], after // 2)
        one.deliver([appended(" Again"), appended(".")])
        assert (one.folder / "events").read_text() == f"{before}hello world and more Again."


def test_faults_in_a_row_neither_lose_nor_double_bytes(again: Callable[[str], Again]) -> None:
    one = again("logs")
    frames: list[StagedFrame] = []
    for number in range(8):
        frames.append(appended(f"record {number};"))
        one.fail(frames, 5)
    one.deliver(frames)
    assert (one.folder / "events").read_text() == "".join(f"record {number};" for number in range(8))


def test_a_fault_in_the_second_file_does_not_double_the_first(again: Callable[[str], Again]) -> None:
    frames = [appended("one", "a"), appended("two", "b"), rows_frame({"loss": 0, "step": 0}), whole("h")]
    size = len("onetwo") + len("loss,step\r\n0,0\r\n") + len("h")
    for after in range(size):
        one = again(str(after))
        one.fail(frames, after)
        one.deliver([*frames, appended("!", "a")])
        folder = one.folder
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            "a": b"one!",
            "b": b"two",
            CSV: b"loss,step\r\n0,0\r\n",
            "h.yaml": b"h",
        }


def test_a_removed_file_gets_only_undelivered_data(again: Callable[[str], Again]) -> None:
    for after in range(6):
        one = again(str(after))
        one.deliver([appended("before"), rows_frame({"loss": 1, "step": 1}, {"loss": 2, "step": 2})])
        folder = one.folder
        (folder / "events").unlink()
        (folder / CSV).unlink()
        one.fail([appended("behind")], 0)
        one.fail([appended("behind")], after)
        one.deliver([appended("behind"), rows_frame({"loss": 3, "step": 3})])
        assert (folder / "events").read_text() == "behind"
        assert (folder / CSV).read_bytes() == b"loss,step\r\n3,3\r\n"


class Asked(Faulty):
    """Knows for which files it was asked."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.asked: list[str] = []
        self.read_files: list[str] = []

    def size(self, file: str) -> int | None:
        # Of rows, it is whether they are still there.
        self.asked += [] if file == CSV else [file]
        return super().size(file)

    def read(self, file: str, start: int = 0) -> bytes:
        self.asked.append(file)
        self.read_files.append(file)
        return super().read(file, start)


def test_storage_is_read_only_after_a_fault(logs: Path) -> None:
    destination = Asked(str(logs))
    sink = FilesSink(destination, {})
    frames = [appended("a"), rows_frame({"loss": 1, "step": 1})]
    sink.deliver(frames)
    sink.deliver(frames)
    assert (destination.asked, destination.read_files) == (["events", CSV], [CSV])
    destination.left = 0
    with pytest.raises(OSError, match="Input/output"):
        sink.deliver(frames)
    destination.left = float("inf")
    sink.deliver(frames)
    assert (destination.asked, destination.read_files) == (["events", CSV] * 2, [CSV] * 2)


@pytest.mark.parametrize("together", [1, 2, 3, len(ROWS)])
def test_rows_match_lightning_byte_for_byte(tmp_path: Path, logs: Path, together: int) -> None:
    saves = [ROWS[first : first + together] for first in range(0, len(ROWS), together)]
    sink = FilesSink(LocalDestination(str(logs)), {})
    for rows in saves:
        sink.deliver([rows_frame(row) for row in rows])
    assert (logs / CSV).read_bytes() == lightning_writes(tmp_path / "lightning", *saves)


def test_a_fault_after_any_byte_neither_loses_nor_doubles_rows(again: Callable[[str], Again], tmp_path: Path) -> None:
    done, rows, more = ROWS[:2], ROWS[:1] + ROWS[4:5] + ROWS[:1], ROWS[6:]
    # Once the columns are known, so that rows are appended.
    done = [*done, {"note": "x", "step": -1}]
    expected = lightning_writes(tmp_path / "lightning", done, rows, more)
    size = len(lightning_writes(tmp_path / "part", done, rows)) - len(lightning_writes(tmp_path / "done", done))
    for after in range(size):
        one = again(str(after))
        one.deliver([rows_frame(*done)])
        one.fail([rows_frame(*rows)], after)
        one.deliver([rows_frame(*rows), rows_frame(*more)])
        folder = one.folder
        assert [path.name for path in folder.iterdir()] == [CSV]
        assert (folder / CSV).read_bytes() == expected, after


def test_a_new_column_rewrites_the_file_atomically(again: Callable[[str], Again], tmp_path: Path) -> None:
    one = again("logs")
    one.deliver([rows_frame(*ROWS[:3])])
    before = (one.folder / CSV).read_bytes()
    one.fail([rows_frame(ROWS[3])], 10)
    assert (one.folder / CSV).read_bytes() == before
    one.deliver([rows_frame(ROWS[3])])
    expected = lightning_writes(tmp_path / "lightning", ROWS[:3], ROWS[3:4])
    assert (one.folder / CSV).read_bytes() == expected


def test_a_torn_last_row_is_rewritten(logs: Path) -> None:
    anchors: Anchors = {}
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame({"loss": 0, "step": 0})])
    with open(logs / CSV, "ab") as file:
        file.write(b'1,1\r\n"2,')
    sink = FilesSink(LocalDestination(str(logs)), anchors)
    sink.deliver([rows_frame({"loss": 1, "step": 1}, {"loss": 2, "step": 2})])
    assert (logs / CSV).read_bytes() == b"loss,step\r\n0,0\r\n1,1\r\n2,2\r\n"
    assert anchors[CSV]["rows"] == 3


@pytest.mark.parametrize("first", [{"loss": 0, "step": 0}, {"loss": 0.0, "step": None}, {"loss": False, "step": 1}])
def test_a_first_row_of_zeros_is_recognised(logs: Path, first: dict[str, Any]) -> None:
    anchors: Anchors = {}
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame(first)])
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame({"loss": 1, "step": 1})])
    assert [path.name for path in logs.iterdir()] == [CSV]
    assert len(parsed((logs / CSV).read_bytes())) == 2


def test_a_file_of_another_run_is_left_alone(again: Callable[[str], Again]) -> None:
    foreign = b"loss,step\r\n9,9\r\n"
    for after in range(25):
        one = again(str(after))
        one.deliver([rows_frame({"loss": 0, "step": 0})])
        folder = one.folder
        (folder / CSV).write_bytes(foreign)
        one.fail([appended("x", "a")], 0)
        one.fail([rows_frame({"loss": 1, "step": 1})], min(after, 15))
        one.deliver([rows_frame({"loss": 1, "step": 1})])
        one.deliver([rows_frame({"loss": 2, "step": 2})])
        assert (folder / CSV).read_bytes() == foreign
        assert (folder / f"recovered-{CSV}").read_bytes() == b"loss,step\r\n1,1\r\n2,2\r\n"


def test_an_earlier_file_of_another_run_is_left_alone(logs: Path) -> None:
    destination, anchors = Faulty(str(logs)), Anchors()
    destination.left = 0
    sink = FilesSink(destination, anchors)
    with pytest.raises(OSError, match="Input/output"):
        sink.deliver([rows_frame({"loss": 0, "step": 0})])
    destination.left = float("inf")
    logs.mkdir()
    (logs / CSV).write_bytes(b"loss,step\r\n9,9\r\n")
    sink.deliver([rows_frame({"loss": 0, "step": 0})])
    assert (logs / CSV).read_bytes() == b"loss,step\r\n9,9\r\n"
    assert (logs / f"recovered-{CSV}").read_bytes() == b"loss,step\r\n0,0\r\n"


def test_the_file_of_an_earlier_stage_is_continued(again: Callable[[str], Again]) -> None:
    for after in range(6):
        one = again(str(after))
        folder = one.folder
        folder.mkdir()
        (folder / CSV).write_bytes(b"loss,step\r\n0,0\r\n1,1\r\n")
        one.fail([rows_frame({"loss": 2, "step": 2})], min(after, 4))
        one.deliver([rows_frame({"loss": 2, "step": 2})])
        one.deliver([rows_frame({"loss": 3, "step": 3})])
        assert (folder / CSV).read_bytes() == b"loss,step\r\n0,0\r\n1,1\r\n2,2\r\n3,3\r\n"


def test_rows_removed_by_others_are_not_rewritten(again: Callable[[str], Again]) -> None:
    rows = [{"loss": number, "step": number} for number in range(8)]
    for after in range(16):
        one = again(str(after))
        one.deliver([rows_frame(*rows[:4])])
        (one.folder / CSV).write_bytes(b"loss,step\r\n0,0\r\n")
        one.fail([appended("x")], 0)
        one.fail([rows_frame(*rows[4:])], after)
        one.deliver([rows_frame(*rows[4:])])
        assert [row["step"] for row in parsed((one.folder / CSV).read_bytes())] == ["0", "4", "5", "6", "7"]


def test_the_last_whole_file_wins(logs: Path) -> None:
    sink = FilesSink(LocalDestination(str(logs)), {})
    sink.deliver([whole("a"), whole("b")])
    assert (logs / "h.yaml").read_text() == "b"
    sink.deliver([whole("c")])
    assert (logs / "h.yaml").read_text() == "c"
    assert [path.name for path in logs.iterdir()] == ["h.yaml"]


@pytest.mark.parametrize(
    ("there", "frames", "then"),
    [
        (None, [whole("a", if_absent=True)], "a"),
        (None, [whole("a", if_absent=True), whole("b", if_absent=True)], "a"),
        ("x", [whole("a", if_absent=True)], "x"),
        (None, [whole("a"), whole("b", if_absent=True)], "a"),
        ("x", [whole("a"), whole("b", if_absent=True)], "a"),
        ("x", [whole("a", if_absent=True), whole("b")], "b"),
    ],
)
def test_an_existing_file_is_kept_on_request(
    logs: Path, there: str | None, frames: list[StagedFrame], then: str
) -> None:
    destination = LocalDestination(str(logs))
    if there is not None:
        destination.replace("h.yaml", there.encode())
    FilesSink(destination, {}).deliver(frames)
    assert (logs / "h.yaml").read_text() == then


def test_calls_write_no_files(logs: Path) -> None:
    FilesSink(LocalDestination(str(logs)), {}).deliver([StagedFrame(kind="call", file="log_metrics", body=b"{}")])
    assert not logs.exists()


@pytest.mark.parametrize("write", [LocalDestination.append, LocalDestination.replace])
def test_a_removed_directory_is_recreated(logs: Path, write: Callable[..., None]) -> None:
    destination = LocalDestination(str(logs))
    assert (destination.size("f"), destination.read("f")) == (None, b"")
    write(destination, "sub/f", b"data")
    (logs / "sub" / "f").unlink()
    (logs / "sub").rmdir()
    logs.rmdir()
    write(destination, "sub/f", b"data")
    assert (destination.size("sub/f"), destination.read("sub/f", 2)) == (4, b"ta")


@pytest.mark.parametrize("write", [LocalDestination.append, LocalDestination.replace])
def test_nothing_is_written_below_an_unmounted_mount_point(logs: Path, write: Callable[..., None]) -> None:
    destination = LocalDestination(str(logs))
    destination.device += 1
    with pytest.raises(OSError, match=f"the file system that {logs} was on is no longer mounted"):
        write(destination, "f", b"data")
    assert not logs.exists()


def test_a_failed_replace_keeps_the_old_file(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = LocalDestination(str(logs))
    destination.replace("f", b"old")

    def refused(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="Input/output"):
        destination.replace("f", b"new")
    assert os.listdir(logs) == ["f"]
    assert (logs / "f").read_text() == "old"


def test_a_path_with_a_protocol_is_remote(memory: str, logs: Path) -> None:
    assert isinstance(open_destination(memory), RemoteDestination)
    local = open_destination(str(logs))
    assert isinstance(local, LocalDestination)
    assert local.device == logs.parent.stat().st_dev


def test_a_remote_file_system_is_supported(memory: str) -> None:
    destination = RemoteDestination(memory)
    sink = FilesSink(destination, {})
    sink.deliver([appended("a"), rows_frame({"loss": 0, "step": 0}), whole("h")])
    sink.deliver([appended("b", "sub/f"), appended("b"), rows_frame({"loss": 1, "step": 1}, {"acc": 1, "step": 2})])
    assert destination.read("events") == b"ab"
    assert destination.read("events", 1) == destination.read("sub/f") == b"b"
    assert destination.read(CSV) == b"acc,loss,step\r\n,0,0\r\n,1,1\r\n1,,2\r\n"
    assert destination.read("h.yaml") == b"h"
    assert (destination.size("events"), destination.size("none"), destination.read("none")) == (2, None, b"")


class WithoutAppend(MemoryFileSystem):  # type: ignore[misc]
    """As some object stores are."""

    protocol = "withoutappend"
    fails_after_writing = False
    refusals = 0

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "ab":
            WithoutAppend.refusals += 1
            raise NotImplementedError("no append")
        return super()._open(path, mode, *args, **kwargs)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        super().pipe_file(path, value, *args, **kwargs)
        if WithoutAppend.fails_after_writing:
            raise TimeoutError("no answer")


class OnlyToWhatIsThere(MemoryFileSystem):  # type: ignore[misc]
    """As fsspec's memory was until 2025."""

    protocol = "onlytowhatisthere"

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "ab" and not self.exists(path):
            raise FileNotFoundError(path)
        return super()._open(path, mode, *args, **kwargs)


def test_a_file_is_created_first_if_append_requires_it(memory: str) -> None:
    fsspec.register_implementation("onlytowhatisthere", OnlyToWhatIsThere, clobber=True)
    destination = RemoteDestination("onlytowhatisthere://logs/version_0")
    destination.append("events", b"a")
    destination.append("events", b"b")
    assert len(MemoryFileSystem.store) == 1
    assert destination.read("events") == b"ab"


@pytest.fixture
def without_append(memory: str, monkeypatch: pytest.MonkeyPatch) -> str:
    fsspec.register_implementation("withoutappend", WithoutAppend, clobber=True)
    return "withoutappend://logs/version_0"


def numbered(path: str) -> dict[str, bytes]:
    destination = RemoteDestination(path)
    return {name.rpartition("/")[2]: destination.read(name.rpartition("/")[2]) for name in MemoryFileSystem.store}


def test_files_are_numbered_without_append_support(without_append: str) -> None:
    anchors: Anchors = {}
    sink = FilesSink(RemoteDestination(without_append), anchors)
    sink.deliver([appended("a")])
    sink.deliver([appended("bc")])
    FilesSink(RemoteDestination(without_append), anchors).deliver([appended("d")])
    assert numbered(without_append) == {"events.1": b"a", "events.2": b"bc", "events.3": b"d"}
    assert anchors == {"events": {"size": 4}}


@pytest.mark.parametrize("crashes", [False, True])
def test_a_numbered_file_written_despite_an_error_is_not_duplicated(
    without_append: str, crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchors: Anchors = {}
    sink = FilesSink(RemoteDestination(without_append), anchors)
    sink.deliver([appended("a")])
    with monkeypatch.context() as patched:
        patched.setattr(WithoutAppend, "fails_after_writing", True)
        with pytest.raises(TimeoutError):
            sink.deliver([appended("b")])
    if crashes:
        sink = FilesSink(RemoteDestination(without_append), anchors)
    sink.deliver([appended("b"), appended("c")])
    assert b"".join(data for _, data in sorted(numbered(without_append).items())) == b"abc"


def test_the_next_number_is_not_searched_from_the_start_each_time(
    without_append: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = RemoteDestination(without_append)
    asked: list[str] = []

    def exists(file_system: MemoryFileSystem, path: str) -> bool:
        asked.append(path)
        return path in file_system.store

    monkeypatch.setattr(WithoutAppend, "exists", exists)
    monkeypatch.setattr(WithoutAppend, "refusals", 0)
    for _ in range(20):
        destination.append("events", b"x")
    assert len(asked) <= 40
    assert WithoutAppend.refusals == 1
    assert destination.size("events") == 20


class Rejected(list[tuple[list[bytes], Exception]]):
    """What a sink has left out."""

    def __call__(self, frames: Sequence[StagedFrame], error: Exception) -> None:
        self.append(([frame.body for frame in frames], error))


def add_rows(folder: Path, text: bytes) -> None:
    with open(folder / CSV, "ab") as file:
        file.write(text)


def test_rows_added_by_another_program_replace_none_of_ours(again: Callable[[str], Again]) -> None:
    rows = [{"loss": number, "step": number} for number in range(4)]
    one = again("logs")
    one.deliver([rows_frame(rows[0])])
    one.fail([rows_frame(*rows[1:3])], 0)
    add_rows(one.folder, b"7,7\r\n8,8\r\n")
    one.deliver([rows_frame(*rows[1:])])
    assert [row["step"] for row in parsed((one.folder / CSV).read_bytes())] == ["0", "7", "8", "1", "2", "3"]


def test_rows_added_after_half_a_delivery_replace_none_of_ours(again: Callable[[str], Again]) -> None:
    rows = [{"loss": number, "note": None, "step": number} for number in range(4)]
    one = again("logs")
    one.deliver([rows_frame(rows[0])])
    one.fail([rows_frame(*rows[1:3])], len("1,,1\r\n"))
    add_rows(one.folder, b"8,,8\r\n")
    one.deliver([rows_frame(*rows[1:])])
    assert [row["step"] for row in parsed((one.folder / CSV).read_bytes())] == ["0", "1", "8", "2", "3"]


def test_rows_added_between_deliveries_replace_none_of_ours(logs: Path) -> None:
    sink = FilesSink(LocalDestination(str(logs)), {})
    sink.deliver([rows_frame({"loss": 0, "step": 0})])
    add_rows(logs, b"1,1\r\n")
    for _ in range(2):
        sink.deliver([rows_frame({"loss": 1, "step": 1})])
    assert [row["step"] for row in parsed((logs / CSV).read_bytes())] == ["0", "1", "1", "1"]


def test_an_impossible_file_does_not_block_the_others(logs: Path) -> None:
    destination, rejected = Faulty(str(logs)), Rejected()
    sink = FilesSink(destination, {}, reject=rejected)
    frames = [appended("a", "a"), appended("never", "m" * 300), rows_frame({"loss": 0, "step": 0}), whole("h")]
    for _ in range(2):
        with pytest.raises(OSError, match="File name too long"):
            sink.deliver(frames)
    assert {path.name: path.read_bytes() for path in logs.iterdir()} == {
        "a": b"a",
        CSV: b"loss,step\r\n0,0\r\n",
        "h.yaml": b"h",
    }
    assert rejected == []
    sink.deliver([*frames, appended("b", "a")])
    assert [bodies for bodies, _ in rejected] == [[b"never"]]
    assert (logs / "a").read_bytes() == b"ab"
    sink.deliver([appended("c", "a"), rows_frame({"loss": 1, "step": 1})])
    assert (logs / "a").read_bytes() == b"abc"
    assert (logs / CSV).read_bytes() == b"loss,step\r\n0,0\r\n1,1\r\n"


def test_without_a_reject_function_it_is_retried_forever(logs: Path) -> None:
    sink = FilesSink(LocalDestination(str(logs)), {})
    for _ in range(5):
        with pytest.raises(OSError, match="File name too long"):
            sink.deliver([appended("never", "m" * 300)])


def test_a_transient_failure_rejects_nothing(logs: Path) -> None:
    destination, rejected = Faulty(str(logs)), Rejected()
    sink = FilesSink(destination, {}, reject=rejected)
    frames = [appended("never", "m" * 300), appended("x", "z")]
    destination.left = 0
    for _ in range(5):
        with pytest.raises(OSError, match=r"Input/output|too long"):
            sink.deliver(frames)
    assert rejected == []
    destination.left = float("inf")
    sink.deliver(frames)
    assert len(rejected) == 1
    assert (logs / "z").read_bytes() == b"x"


def test_an_outage_without_an_oserror_rejects_nothing(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        """As clients of object stores raise."""

    def unreachable(*_: Any) -> None:
        raise ClientError

    destination, rejected = LocalDestination(str(logs)), Rejected()
    sink = FilesSink(destination, {}, reject=rejected)
    with monkeypatch.context() as patched:
        patched.setattr(destination, "append", unreachable)
        for _ in range(5):
            with pytest.raises(ClientError):
                sink.deliver([appended("a")])
    sink.deliver([appended("a")])
    assert (rejected, (logs / "events").read_bytes()) == ([], b"a")


def test_a_partly_written_rejected_frame_does_not_hide_the_next(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(LocalDestination):
        def append(self, file: str, data: bytes) -> None:
            super().append(file, data[:2])
            raise OSError(errno.EINVAL, "Invalid argument")

    rejected = Rejected()
    sink = FilesSink(Half(str(logs)), {}, reject=rejected)
    for _ in range(2):
        with pytest.raises(OSError, match="Invalid"):
            sink.deliver([appended("abcdefgh")])
    sink.deliver([appended("abcdefgh")])
    assert len(rejected) == 1
    sink.destination = LocalDestination(str(logs))
    sink.deliver([appended("next")])
    assert (logs / "events").read_bytes() == b"abcdefnext"


def test_a_lone_surrogate_is_written_once(logs: Path) -> None:
    anchors: Anchors = {}
    row = {"note": "a\ud800", "step": 0}
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame(row)])
    before = copy.deepcopy(anchors)
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame(row)])
    # Of that one nothing was noted.
    FilesSink(LocalDestination(str(logs)), before).deliver([rows_frame(row)])
    assert (logs / CSV).read_bytes() == b"note,step\r\na\\ud800,0\r\na\\ud800,0\r\n"


def test_a_text_beyond_the_csv_limit_is_read_without_changing_the_limit(logs: Path) -> None:
    limit = csv.field_size_limit()
    anchors: Anchors = {}
    for step in range(2):
        row = {"note": "x" * (limit + 1), "step": step}
        FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame(row)])
    assert anchors[CSV]["rows"] == 2
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("removed", ["file", "directory"])
def test_rows_after_a_removed_file_get_a_header(logs: Path, removed: str) -> None:
    sink = FilesSink(LocalDestination(str(logs)), {})
    sink.deliver([rows_frame({"loss": 0, "step": 0})])
    (logs / CSV).unlink()
    if removed == "directory":
        logs.rmdir()
    sink.deliver([rows_frame({"loss": 1, "step": 1})])
    sink.deliver([rows_frame({"loss": 2, "step": 2})])
    assert (logs / CSV).read_bytes() == b"loss,step\r\n1,1\r\n2,2\r\n"


def test_the_recorded_table_size_matches_the_file(logs: Path) -> None:
    anchors: Anchors = {}
    sink = FilesSink(LocalDestination(str(logs)), anchors)
    for number, row in enumerate(ROWS):
        if number == 5:
            add_rows(logs, b"torn")
        sink.deliver([rows_frame(row)])
        assert anchors[CSV]["size"] == (logs / CSV).stat().st_size


def test_anchors_of_an_earlier_version_are_continued(logs: Path) -> None:
    anchors: Anchors = {}
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame({"loss": 0, "step": 0})])
    del anchors[CSV]["size"]
    FilesSink(LocalDestination(str(logs)), anchors).deliver([rows_frame({"loss": 1, "step": 1})])
    assert (logs / CSV).read_bytes() == b"loss,step\r\n0,0\r\n1,1\r\n"


@pytest.mark.parametrize("crashes", [False, True])
def test_rows_stay_in_one_ordered_file_without_append_support(without_append: str, crashes: bool) -> None:
    anchors: Anchors = {}
    sink = FilesSink(RemoteDestination(without_append), anchors)
    for step in range(4):
        sink.deliver([rows_frame({"loss": step, "step": step})])
        if crashes:
            sink = FilesSink(RemoteDestination(without_append), anchors)
    assert numbered(without_append) == {CSV: b"loss,step\r\n0,0\r\n1,1\r\n2,2\r\n3,3\r\n"}
