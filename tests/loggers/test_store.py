"""What is staged is read once and in order, whatever happens to the process or to its disk."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.loggers import staging
from lightning_ncclsafe.loggers import store as store_module
from lightning_ncclsafe.loggers.segments import Portion, StagedFrame, encode
from lightning_ncclsafe.loggers.staging import Claim, Manifest, make_staging
from lightning_ncclsafe.loggers.store import Store

SIZE = len(encode(StagedFrame(kind="append", file="f", body=b"0000", points=1)))


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two frames in each."""
    monkeypatch.setattr(store_module, "_SEGMENT_BYTES", SIZE + 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "staging"


class Disk:
    """Takes so many bytes more, then it is full; for what is written with ``os.write``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: float = float("inf")
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, handle: int, data: Any) -> int:
        if self.free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        # Some at a time, as a disk does that runs full.
        written = self._write(handle, data[: int(min(self.free, 30))])
        self.free -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def frame(number: int, keep: bool = False) -> StagedFrame:
    return StagedFrame(kind="append", file="f", body=b"%04d" % number, points=1, keep=keep)


def append(store: Store, *numbers: int, keep: bool = False) -> None:
    for number in numbers:
        store.append([frame(number, keep)])


def numbers_of(portion: Portion | None) -> list[int]:
    return [int(one.body) for one in portion.frames] if portion is not None else []


def deliver(store: Store, portions: int = 10**9, most_bytes: int = 4 << 20) -> list[int]:
    delivered: list[int] = []
    while portions and (portion := store.read(most_bytes)) is not None:
        delivered += numbers_of(portion)
        store.release(portion)
        portions -= 1
    return delivered


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.frames"))


@pytest.mark.usefixtures("small_segments")
def test_frames_are_in_order_over_many_segments(folder: Path) -> None:
    store = Store(folder)
    append(store, *range(9))
    assert len(files(folder)) == 5
    assert deliver(store) == list(range(9))
    assert store.read() is None
    assert files(folder) == []


def test_unreleased_frames_are_read_again_with_later_ones(folder: Path) -> None:
    store = Store(folder)
    append(store, 0, 1)
    assert numbers_of(store.read()) == [0, 1]
    append(store, 2)
    assert numbers_of(store.read()) == [0, 1, 2]


def test_frames_appended_during_a_delivery_are_not_released_with_it(folder: Path) -> None:
    store = Store(folder)
    append(store, 0)
    portion = store.read()
    append(store, 1)
    assert portion is not None
    store.release(portion)
    assert deliver(store) == [1]


def test_reads_are_limited_to_about_the_requested_size(folder: Path) -> None:
    store = Store(folder)
    append(store, *range(5))
    assert numbers_of(store.read(most_bytes=SIZE + 1)) == [0, 1]
    assert deliver(store, most_bytes=1) == [0, 1, 2, 3, 4]


def test_a_frame_is_read_whole_even_if_larger_than_requested(folder: Path) -> None:
    store = Store(folder)
    sizes = [10, 100_000, 10, 300_000]
    store.append([StagedFrame(kind="append", file="f", body=bytes(size), points=1) for size in sizes])
    read = []
    while (portion := store.read(most_bytes=1)) is not None:
        read.append([len(one.body) for one in portion.frames])
        store.release(portion)
    assert read == [[size] for size in sizes]
    assert store.dropped_points == 0


def test_appending_nothing_writes_nothing(folder: Path) -> None:
    store = Store(folder)
    store.append([])
    assert store.read() is None
    assert store.pending_bytes == 0
    assert files(folder) == []


@pytest.mark.usefixtures("small_segments")
def test_pending_bytes_are_tracked(folder: Path) -> None:
    store = Store(folder)
    append(store, *range(4))
    assert store.pending_bytes == 4 * SIZE
    deliver(store, portions=1, most_bytes=1)
    assert store.pending_bytes == 3 * SIZE
    deliver(store)
    assert store.pending_bytes == 0


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("delivered", range(8))
def test_another_process_continues_right_after_the_last_release(folder: Path, delivered: int) -> None:
    crashed = Store(folder)
    append(crashed, *range(7))
    assert deliver(crashed, portions=delivered, most_bytes=1) == list(range(delivered))
    crashed.read()
    other = Store(folder)
    assert other.pending_bytes == (7 - delivered) * SIZE
    append(other, 7, 8, 9)
    assert deliver(other) == list(range(delivered, 10))


def test_anchors_are_those_of_the_last_release(folder: Path) -> None:
    store = Store(folder)
    append(store, 0)
    portion = store.read()
    store.anchors["f"] = {"size": 4}
    assert Store(folder).anchors == {}
    assert portion is not None
    store.release(portion)
    assert Store(folder).anchors == {"f": {"size": 4}}
    store.anchors["g"] = {"size": 1}
    store.note()
    assert Store(folder).anchors == {"f": {"size": 4}, "g": {"size": 1}}


def test_a_torn_tail_hides_only_itself(tmp_path: Path) -> None:
    for cut in range(1, SIZE):
        folder = tmp_path / str(cut)
        append(Store(folder), 0, 1)
        os.truncate(folder / "00000001.frames", SIZE + cut)
        other = Store(folder)
        append(other, 2)
        assert deliver(other) == [0, 2], cut
        assert (other.dropped_points, other.dropped_records) == (0, 1)
        assert other.close()


@pytest.mark.usefixtures("small_segments")
def test_a_damaged_or_missing_segment_is_skipped_and_counted(folder: Path) -> None:
    faults: list[OSError] = []
    store = Store(folder, on_fault=faults.append)
    append(store, *range(6))
    damaged = bytearray((folder / "00000001.frames").read_bytes())
    damaged[-1] ^= 1
    (folder / "00000001.frames").write_bytes(damaged)
    (folder / "00000002.frames").unlink()
    assert deliver(store) == [0, 4, 5]
    assert (store.dropped_points, store.dropped_records) == (3, 0)
    (fault,) = faults
    assert isinstance(fault, FileNotFoundError)


def test_a_temporarily_unopenable_segment_is_not_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder)
    append(store, 0)

    def too_many(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", too_many)
        with pytest.raises(OSError, match="Too many"):
            store.read()
        assert not store.drop_oldest()
    assert deliver(store) == [0]


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"segment": "x", "released": 0}',
        b'{"segment": null, "released": [], "anchors": []}',
        b'{"segment": 1, "released": -5}',
        b'{"segment": 1, "released": Infinity, "anchors": {"f": 5}}',
        b'{"segment": -1, "released": 1.5, "anchors": null}',
    ],
)
def test_damaged_notes_lose_nothing(folder: Path, damaged: bytes) -> None:
    append(Store(folder), 0, 1)
    (folder / "delivered.json").write_bytes(damaged)
    other = Store(folder)
    assert other.anchors == {}
    assert deliver(other) == [0, 1]


@pytest.mark.usefixtures("small_segments")
def test_the_oldest_frames_are_dropped_except_kept_ones(folder: Path) -> None:
    store = Store(folder)
    append(store, 0)
    append(store, 1, keep=True)
    append(store, 2, 3, 4, 5)
    assert store.drop_oldest()
    assert store.drop_oldest()
    assert store.dropped_points == 3
    assert deliver(store) == [1, 4, 5]


@pytest.mark.usefixtures("small_segments")
def test_frames_being_delivered_are_not_dropped(folder: Path) -> None:
    store = Store(folder)
    append(store, *range(4))
    portion = store.read()
    assert store.drop_oldest()
    assert not store.drop_oldest()
    assert (numbers_of(portion), numbers_of(store.read())) == ([0, 1], [0, 1])
    assert deliver(store) == [0, 1]
    assert store.dropped_points == 2


def test_kept_frames_cannot_be_dropped(folder: Path) -> None:
    store = Store(folder)
    assert not store.drop_oldest()
    append(store, 0, 1, keep=True)
    assert not store.drop_oldest()
    assert deliver(store) == [0, 1]


def test_only_the_undelivered_rest_of_a_segment_is_dropped(folder: Path) -> None:
    store = Store(folder)
    append(store, 0, 1)
    append(store, 2, keep=True)
    append(store, 3)
    assert deliver(store, portions=1, most_bytes=1) == [0]
    assert store.drop_oldest()
    assert (store.dropped_points, store.pending_bytes) == (2, SIZE - 1)
    append(store, 4)
    # As a process would find it that takes over now, and as this one does.
    assert numbers_of(Store(folder).read()) == [2, 4]
    assert deliver(store) == [2, 4]


def test_a_failed_drop_counts_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder)
    append(store, 0, 1)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        assert not store.drop_oldest()
    assert store.dropped_points == 0
    assert deliver(store) == [0, 1]


def test_dropping_a_damaged_segment_counts_all_its_points(folder: Path) -> None:
    store = Store(folder)
    append(store, 0, 1, 2)
    with open(folder / "00000001.frames", "r+b") as file:
        file.seek(2 * SIZE - 1)
        file.write(b"x")
    assert store.drop_oldest()
    assert (store.dropped_points, store.dropped_records) == (3, 0)
    assert store.read() is None


def test_points_and_records_are_counted(folder: Path) -> None:
    store = Store(folder)
    store.count_dropped(StagedFrame(kind="append", file="f", body=b"", points=3, records=2))
    store.count_dropped(StagedFrame(kind="append", file="f", body=b"", points=1))
    assert (store.dropped_points, store.dropped_records) == (4, 2)


@pytest.mark.usefixtures("small_segments")
def test_on_a_full_disk_frames_wait_in_memory_in_order(tmp_path: Path, disk: Disk) -> None:
    for free in range(0, 4 * SIZE, 7):
        folder = tmp_path / str(free)
        faults: list[OSError] = []
        store = Store(folder, on_fault=faults.append)
        disk.free = free
        append(store, *range(6))
        assert [fault.errno for fault in faults] == [errno.ENOSPC]
        # All of what was written down is whole, and nothing of the rest is there.
        assert sum(path.stat().st_size for path in folder.glob("*.frames")) == free // SIZE * SIZE
        disk.free = float("inf")
        append(store, 6)
        assert deliver(store) == list(range(7)), free
        assert (store.dropped_points, store.pending_bytes) == (0, 0)


def test_a_recovered_disk_is_used_again(folder: Path, disk: Disk) -> None:
    store = Store(folder)
    disk.free = 0
    append(store, 0)
    disk.free = float("inf")
    assert deliver(store) == [0]
    append(store, 1)
    assert numbers_of(Store(folder).read()) == [1]
    assert deliver(store) == [1]


def test_memory_is_bounded_by_dropping_the_oldest_except_kept_frames(folder: Path, disk: Disk) -> None:
    store = Store(folder, spill_bytes=5 * 204)
    disk.free = 0
    append(store, 0, keep=True)
    append(store, *range(1, 9))
    assert store.pending_bytes <= 5 * 204
    assert store.dropped_points == 4
    assert deliver(store) == [0, 5, 6, 7, 8]


def test_kept_frames_may_exceed_the_bound(folder: Path, disk: Disk) -> None:
    store = Store(folder, spill_bytes=1)
    disk.free = 0
    append(store, 0, 1, 2, keep=True)
    append(store, 3)
    assert store.dropped_points == 1
    assert deliver(store) == [0, 1, 2]
    assert store.pending_bytes == 0


def test_frames_in_memory_being_delivered_are_not_dropped(folder: Path, disk: Disk) -> None:
    store = Store(folder, spill_bytes=3 * 204)
    disk.free = 0
    append(store, 0, 1, 2)
    portion = store.read()
    append(store, 3, 4)
    assert portion is not None
    assert numbers_of(portion) == numbers_of(store.read())[:3] == [0, 1, 2]
    store.release(portion)
    assert store.dropped_points + len(deliver(store)) == 2
    assert store.pending_bytes == 0


def test_progress_is_noted_once_a_full_disk_has_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_SEGMENT_BYTES", SIZE)
    store = Store(folder)
    append(store, 0, 1)
    write_bytes = Path.write_bytes

    def full_until_a_segment_is_gone(path: Path, data: bytes) -> int:
        if (folder / "00000001.frames").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full_until_a_segment_is_gone)
    store.anchors["f"] = {"size": 4}
    deliver(store, portions=1)
    other = Store(folder)
    assert other.anchors == {"f": {"size": 4}}
    assert deliver(other) == [1]


@pytest.mark.usefixtures("small_segments")
def test_only_this_user_can_read_staged_data(folder: Path) -> None:
    store = Store(folder)
    append(store, 0)
    append(store, 1, keep=True)
    append(store, 2)
    assert store.drop_oldest()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # One that was written again, and one that was not.
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in files(folder)] == [0o600, 0o600]


def test_a_folder_is_removed_only_when_all_is_delivered(folder: Path) -> None:
    store = Store(folder)
    append(store, 0)
    assert not store.close()
    other = Store(folder)
    assert deliver(other) == [0]
    assert other.close()
    assert not folder.exists()


def test_closing_the_store_releases_the_claim(folder: Path) -> None:
    folder.mkdir()
    store = Store(folder, claim=Claim(folder))
    append(store, 0)
    assert not Claim(folder).is_mine
    store.close()
    store.close()
    again = Claim(folder)
    assert again.is_mine
    again.give_up()


def test_an_uncreatable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Store(tmp_path / "file" / "staging")


@pytest.mark.usefixtures("small_segments")
def test_threads_can_append_during_a_delivery(folder: Path) -> None:
    store = Store(folder)
    threads = [threading.Thread(target=append, args=(store, *range(first, first + 50))) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    delivered: list[int] = []
    while len(delivered) < 150:
        is_over = not any(thread.is_alive() for thread in threads)
        delivered += deliver(store)
        if is_over:
            break
    for thread in threads:
        thread.join()
    by_thread = [[number for number in delivered if number // 1000 == place] for place in range(3)]
    assert by_thread == [list(range(first, first + 50)) for first in (0, 1000, 2000)]


def test_notes_are_plain_json(folder: Path) -> None:
    store = Store(folder)
    append(store, 0, 1)
    deliver(store, portions=1, most_bytes=1)
    assert json.loads((folder / "delivered.json").read_text()) == {"segment": 1, "released": SIZE, "anchors": {}}


def test_each_series_of_failures_is_reported_once_and_outside_the_lock(folder: Path, disk: Disk) -> None:
    said: list[tuple[int | None, int]] = []
    # What it asks for would wait for ever if it were called within.
    store = Store(folder, on_fault=lambda error: said.append((error.errno, store.pending_bytes)))
    for _ in range(2):
        disk.free = 0
        append(store, 0, 1, 2)
        disk.free = float("inf")
        deliver(store)
        append(store, 3)
        deliver(store)
    assert [number for number, _ in said] == [errno.ENOSPC] * 2
    assert all(waits > 0 for _, waits in said)


@pytest.fixture
def claimed(tmp_path: Path) -> Iterator[tuple[Path, Claim]]:
    """A folder as a run has it."""
    made = Manifest(logger="CSVLogger", kind="files", destination=str(tmp_path), root="", identity="run/7")
    folder, claim = make_staging(tmp_path / "all", made)
    yield folder, claim
    claim.give_up()


def is_locked(folder: Path) -> bool:
    """As another process finds it."""
    script = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\n"
        "try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: print('locked')"
    )
    command = [sys.executable, "-S", "-c", script, str(folder / "lock")]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout == "locked\n"


@pytest.mark.parametrize("above", [False, True])
def test_a_removed_folder_is_recreated_and_its_frames_counted(claimed: tuple[Path, Claim], above: bool) -> None:
    folder, claim = claimed
    manifest = (folder / "manifest.json").read_bytes()
    faults: list[OSError] = []
    store = Store(folder, claim=claim, on_fault=faults.append)
    append(store, 0, 1, 2)
    store.append([StagedFrame(kind="append", file="f", body=b"0003", records=2)])
    deliver(store, portions=1, most_bytes=1)
    shutil.rmtree(folder.parent if above else folder)
    append(store, 4)
    assert ((folder / "manifest.json").read_bytes(), is_locked(folder)) == (manifest, True)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]
    assert numbers_of(Store(folder).read()) == [4]
    assert deliver(store) == [4]
    assert (store.dropped_points, store.dropped_records) == (2, 2)
    assert [fault.errno for fault in faults] == [errno.ENOENT]
    assert store.close()
    assert not folder.exists()


def test_frames_being_delivered_when_the_folder_is_removed_do_not_count(folder: Path) -> None:
    store = Store(folder)
    append(store, 0, 1)
    portion = store.read(most_bytes=1)
    shutil.rmtree(folder)
    append(store, 2)
    assert portion is not None
    store.release(portion)
    assert deliver(store) == [2]
    assert (store.dropped_points, store.dropped_records) == (1, 0)


def test_a_removed_segment_loses_no_later_frames(folder: Path) -> None:
    store = Store(folder)
    append(store, 0, 1)
    (folder / "00000001.frames").unlink()
    append(store, 2)
    assert deliver(store) == [2]
    assert (store.dropped_points, store.dropped_records) == (2, 0)


def test_a_folder_is_not_recreated_in_a_world_writable_directory(claimed: tuple[Path, Claim]) -> None:
    folder, claim = claimed
    faults: list[OSError] = []
    store = Store(folder, claim=claim, on_fault=faults.append)
    shutil.rmtree(folder.parent)
    folder.parent.mkdir(mode=0o700)
    folder.parent.chmod(0o777)
    append(store, 0)
    assert isinstance(faults[0], PermissionError)
    assert not folder.exists()
    assert deliver(store) == [0]


def test_appending_after_close_creates_no_folder(folder: Path) -> None:
    store = Store(folder)
    assert store.close()
    append(store, 0)
    assert not folder.exists()
    assert deliver(store) == [0]


@pytest.mark.parametrize("removed", [(), ("lock",), ("manifest.json",), ("lock", "manifest.json")])
def test_a_delivery_refreshes_the_folder_against_cleaners(
    claimed: tuple[Path, Claim], removed: tuple[str, ...]
) -> None:
    folder, claim = claimed
    store = Store(folder, claim=claim)
    append(store, 0, 1)
    for name in ("lock", "manifest.json"):
        os.utime(folder / name, (0, 0))
    for name in removed:
        (folder / name).unlink()
    # The other one still waits.
    assert deliver(store, portions=1, most_bytes=1) == [0]
    assert all(time.time() - (folder / name).stat().st_mtime < 100 for name in ("lock", "manifest.json"))
    assert is_locked(folder)


def test_the_folder_exists_only_while_frames_are_pending(claimed: tuple[Path, Claim]) -> None:
    folder, claim = claimed
    store = Store(folder, claim=claim)
    store.vacate()
    assert not folder.exists()
    for number in range(3):
        store.anchors["f"] = {"size": number}
        append(store, number)
        store.vacate()
        assert is_locked(folder)
        # Whoever recovers it knows what is on storage already, which is not to be written again.
        assert Store(folder).anchors == {"f": {"size": number}}
        assert deliver(store) == [number]
        store.note()
        assert not folder.exists()
    assert store.close()


def test_the_staging_directory_is_removed_with_its_last_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tmp_path / "ncclsafe-0" / "logs"
    monkeypatch.setattr(staging, "default_staging_dir", lambda: default)
    manifest = Manifest(logger="A", kind="files", destination="/logs", root="/logs", identity="")
    users, made = tmp_path / "of the user's", tmp_path / "made"
    users.mkdir(mode=0o700)
    for directory in (default, users, made):
        stores = [Store(folder, claim=claim) for folder, claim in (make_staging(directory, manifest) for _ in range(2))]
        assert stores[0].close()
        assert directory.exists()
        assert stores[1].close()
    assert list(tmp_path.iterdir()) == [users]


def test_a_directory_removed_concurrently_is_recreated(
    claimed: tuple[Path, Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, claim = claimed
    store = Store(folder, claim=claim)
    store.vacate()
    lstat, removals = Path.lstat, [2]

    def removed_meanwhile(path: Path) -> Any:
        if path == folder.parent and removals[0]:
            removals[0] -= 1
            path.rmdir()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removed_meanwhile)
    append(store, 0)
    assert removals == [0]
    assert is_locked(folder)


def test_a_lock_created_by_another_process_is_respected(claimed: tuple[Path, Claim]) -> None:
    folder, claim = claimed
    (folder / "lock").unlink()
    with locked_by_another(folder), pytest.raises(OSError, match="unavailable"):
        claim.renew()
    claim.renew()
    assert is_locked(folder)


@contextmanager
def locked_by_another(folder: Path) -> Iterator[None]:
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        " print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", script, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


def can_be_claimed(folder: Path) -> bool:
    """By this process, which knows what it has claimed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    again = Claim(folder)
    again.give_up()
    return again.is_mine


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_closed_store_keeps_no_claim(claimed: tuple[Path, Claim], is_empty: bool) -> None:
    folder, claim = claimed
    store = Store(folder, claim=claim)
    append(store, *([] if is_empty else [0]))
    assert store.close() == is_empty
    assert can_be_claimed(folder)


def test_a_store_that_fails_to_open_keeps_no_claim(
    claimed: tuple[Path, Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, claim = claimed

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "glob", refused)
    with pytest.raises(OSError, match="Input/output"):
        Store(folder, claim=claim)
    assert can_be_claimed(folder)


def test_a_forked_child_closes_nothing(claimed: tuple[Path, Claim], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, claim = claimed
    store = Store(folder, claim=claim)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        # As a thread that was not forked left it.
        with store._lock:
            assert not store.close()
    assert folder.exists() and is_locked(folder)
    append(store, 0)
    assert deliver(store) == [0]
    assert store.close()
