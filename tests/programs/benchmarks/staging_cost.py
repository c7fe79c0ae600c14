"""What staging in files costs and loses, beside the same staging in SQLite: see docs/cost/staging.md.

``SqliteStore`` keeps every promise that ``Store`` makes, in one database in WAL mode. Both are given the same frames,
and the programs that use them are killed, run out of disk and lose files alike.

- rate: points staged a second, and points delivered a second one call at a time, as a server is sent them.
- call: what one ``log_metrics`` of 10 scalars takes on the training thread; also where each write to staging takes
  0.5 s, and where each write to the destination does.
- bytes: what is written for a point, and what lies on disk at most, while a destination does not answer.
- kill: points lost and doubled by SIGKILL at a random instant, many times.
- full: how much a disk of 8 MiB takes, and how much of it is free again when half of that is delivered.
- cleaner: points lost when the oldest file of staging is removed from under a running program.
- damage: points that can still be read after one byte has changed.

python tests/programs/benchmarks/staging_cost.py
python tests/programs/benchmarks/staging_cost.py kill --kills 1000
"""

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import slow_storage
from lightning.pytorch.loggers import CSVLogger

from lightning_ncclsafe import LoggerOffload
from lightning_ncclsafe.loggers import starting
from lightning_ncclsafe.loggers.destinations import LocalDestination
from lightning_ncclsafe.loggers.files import FilesSink
from lightning_ncclsafe.loggers.segments import Portion, StagedFrame
from lightning_ncclsafe.loggers.store import Store

POINTS = 25
"""Points of a frame: what a quarter of a second's steps log."""

FULL_DISK = 8 << 20


class SqliteStore:
    """What :class:`~lightning_ncclsafe.loggers.store.Store` does, in one SQLite database.

    Args: see there.
    """

    def __init__(self, folder: Path, *, spill_bytes: int = 1 << 26, claim: Any = None, on_fault: Any = None) -> None:
        self.folder = folder
        self.dropped_points = self.dropped_records = 0
        self.anchors: dict[str, dict[str, Any]] = {}
        self.pending_bytes = 0
        self._spill_bytes = spill_bytes
        self._claim = claim
        self._on_fault = on_fault
        # What could not be written down yet.
        self._spilled: deque[StagedFrame] = deque()
        # Up to here all is delivered, whether or not the disk had room to write that down.
        self._released = 0
        self._number = 0
        self._lock = threading.RLock()
        self._path = folder / "frames.db"
        self._open()
        self.anchors = {file: json.loads(text) for file, text in self._db.execute("SELECT file, anchor FROM anchors")}
        self.pending_bytes, self._number = self._db.execute(
            "SELECT ifnull(sum(length(body)), 0), ifnull(max(number), 0) FROM frames"
        ).fetchone()

    def append(self, frames: Sequence[StagedFrame]) -> None:
        """Writes frames down in one transaction; on a full disk they stay in memory."""
        with self._lock:
            self._spilled.extend(frames)
            self.pending_bytes += sum(len(frame.body) for frame in frames)
            try:
                self._keep_file()
                self._insert(self._rows())
                self._number += len(self._spilled)
                self._spilled.clear()
            except sqlite3.Error as error:
                if self._on_fault is not None:
                    self._on_fault(OSError(str(error)))
                while sum(len(frame.body) for frame in self._spilled) > self._spill_bytes:
                    self.count_dropped(self._spilled.popleft())

    def read(self, most_bytes: int = 4 << 20) -> Portion | None:
        """The oldest frames that have not been released."""
        with self._lock:
            frames, end, size = [], 0, 0
            rows = self._db.execute(
                "SELECT number, head, body FROM frames WHERE number > ? ORDER BY number", (self._released,)
            )
            for number, head, body in rows:
                frames.append(StagedFrame(body=body, **json.loads(head)))
                end, size = number, size + len(body)
                if size >= most_bytes:
                    break
            if frames:
                return Portion(tuple(frames), 0, end)
            return Portion(tuple(self._spilled), -1, len(self._spilled)) if self._spilled else None

    def release(self, portion: Portion) -> None:
        """These frames have been delivered: they and the anchors change in one transaction."""
        with self._lock:
            self.pending_bytes -= sum(len(frame.body) for frame in portion.frames)
            if portion.segment < 0:
                for _ in range(portion.end):
                    self._spilled.popleft()
            else:
                self._released = portion.end
            with suppress(sqlite3.Error), self._db:
                self._db.execute("BEGIN")
                self._db.execute("DELETE FROM frames WHERE number <= ?", (self._released,))
                self._write_anchors()

    def drop_oldest(self) -> bool:
        """Not asked for here."""
        return False

    def count_dropped(self, frame: StagedFrame) -> None:
        """Counts a frame that was not to be staged, or not any more."""
        self.dropped_points += frame.points
        self.dropped_records += frame.records
        self.pending_bytes -= len(frame.body)

    def note(self) -> None:
        """Writes the anchors down."""
        with self._lock, suppress(sqlite3.Error), self._db:
            self._db.execute("BEGIN")
            self._write_anchors()

    def vacate(self) -> None:
        """The database stays: to make a new one for each quarter of a second would cost more."""

    def close(self) -> bool:
        """Gives the folder up, and removes it if everything has been delivered."""
        with self._lock:
            self._db.close()
            if not self.pending_bytes:
                shutil.rmtree(self.folder, ignore_errors=True)
            if self._claim is not None:
                self._claim.give_up()
            return not self.pending_bytes

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        # Exclusive, so that a second program is refused and no memory is mapped; OFF, as a process that is killed loses
        # nothing that the system has: the same promise as that of a file that is not synchronised.
        # A small log and vacuuming give room back early.
        for pragma in ("auto_vacuum=FULL", "locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("PRAGMA wal_autocheckpoint=64")
        self._db.execute("CREATE TABLE IF NOT EXISTS frames (number INTEGER PRIMARY KEY, head TEXT, body BLOB)")
        self._db.execute("CREATE TABLE IF NOT EXISTS anchors (file TEXT PRIMARY KEY, anchor TEXT)")
        self._inodes = self._files()

    def _files(self) -> list[int]:
        return [os.stat(path).st_ino for path in (self._path, f"{self._path}-wal")]

    def _keep_file(self) -> None:
        """Makes the database again if somebody has removed it; what was in it can be read for as long as it is open."""
        with suppress(FileNotFoundError):
            if self._files() == self._inodes:
                return
        old, rows = self._db, []
        with suppress(sqlite3.Error):
            rows = old.execute("SELECT number, head, body FROM frames WHERE number > ?", (self._released,)).fetchall()
        for path in self.folder.glob("frames.db*"):
            path.unlink()
        self._open()
        old.close()
        self._insert(rows)

    def _rows(self) -> list[tuple[int, str, bytes]]:
        """What waits in memory, as rows. Their numbers are never given again, as SQLite would where none is left."""
        names = ("kind", "file", "points", "records", "keep", "details")
        return [
            (number, json.dumps({name: getattr(one, name) for name in names}), one.body)
            for number, one in enumerate(self._spilled, self._number + 1)
        ]

    def _insert(self, rows: Sequence[tuple[int, str, bytes]]) -> None:
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO frames VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _write_anchors(self) -> None:
        self._db.executemany(
            "REPLACE INTO anchors VALUES (?, ?)", [(file, json.dumps(one)) for file, one in self.anchors.items()]
        )


STORES: dict[str, Any] = {"files": Store, "sqlite": SqliteStore}
AnyStore = Store | SqliteStore


def frame(number: int, points: int = POINTS) -> StagedFrame:
    """Lines of numbers, which begin with this one."""
    lines = b"".join(b"%08d %032d\n" % (one, one) for one in range(number, number + points))
    return StagedFrame(kind="append", file="points", body=lines, points=points)


def deliver_all(store: AnyStore, to: Path, most_bytes: int = 4 << 20) -> None:
    """Brings what is staged to a directory, as an offload or a recovery does."""
    sink = FilesSink(LocalDestination(str(to)), store.anchors, store.note)
    while (portion := store.read(most_bytes)) is not None:
        sink.deliver(portion.frames)
        store.release(portion)


def numbers_in(folder: Path) -> list[int]:
    """The numbers that have arrived, in order."""
    path = folder / "points"
    return [int(line.split()[0]) for line in path.read_bytes().splitlines()] if path.exists() else []


def size_of(folder: Path) -> int:
    """What lies in a folder, in bytes of blocks."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    return 0


def rate(kind: str, folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Points a second."""
    found: dict[str, Any] = {}
    for name, points, frames in (("a frame each write", POINTS, 1), ("100 calls each write", 1, 100)):
        writes = 4000 // frames
        batches = [[frame(points * (frames * n + m), points) for m in range(frames)] for n in range(writes)]
        took = []
        for attempt in range(5):
            store = STORES[kind](folder / f"{name} {attempt}")
            began = time.perf_counter()
            for batch in batches:
                store.append(batch)
            took.append(time.perf_counter() - began)
        found[f"{name}, points/s"] = round(writes * frames * points / statistics.median(took))
        began, cpu = time.perf_counter(), time.process_time()
        deliver_all(store, folder / "to" / name, most_bytes=1)
        found[f"{name}: read, delivered and released one by one, frames/s"] = round(
            writes * frames / (time.perf_counter() - began)
        )
        found[f"{name}: CPU of that, us a frame"] = round(1e6 * (time.process_time() - cpu) / writes / frames)
        assert numbers_in(folder / "to" / name) == list(range(writes * frames * points))
    return found


def call(kind: str, folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of one call on the training thread."""
    found = {}
    settings = LoggerOffload(staging_dir=folder / "staging").settings
    append = STORES[kind].append

    def slow_append(*args: Any) -> None:
        time.sleep(0.5)
        append(*args)

    for name, to, is_slow in (("", "", False), ("slow staging", "", True), ("slow destination", "slow://", False)):
        os.environ[slow_storage.LATENCY_S] = "0.5"
        starting.Store = STORES[kind]  # type: ignore[misc]
        logger = CSVLogger(f"{to}{folder}/logs", name=name or "plain")
        logger.experiment  # noqa: B018
        offload = starting.start_offload(logger, settings)
        STORES[kind].append = slow_append if is_slow else append
        took = []
        for step in range(4000):
            began = time.perf_counter()
            logger.log_metrics({f"scalar{n}": float(step) for n in range(10)}, step)
            logger.save()
            # The first waits for its file, for half a second at most.
            if step >= 10:
                took.append(1e6 * (time.perf_counter() - began))
            time.sleep(0.001)
        STORES[kind].append = append
        offload.ending = True
        logger.finalize("success")
        took.sort()
        title = f"{name}, us: median, 99.9 %, longest".removeprefix(", ")
        found[title] = [round(one) for one in (statistics.median(took), took[-len(took) // 1000], took[-1])]
    return found


def written_bytes() -> int:
    """What this process has asked the system to write."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


def bytes_on_disk(kind: str, folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """A minute of four frames a second; then 200 MiB of media for which the destination does not answer."""
    found: dict[str, Any] = {}
    store = STORES[kind](folder / "points")
    began = written_bytes()
    most = 0
    for number in range(240):
        store.append([frame(POINTS * number)])
        most = max(most, size_of(folder / "points"))
        if number % 4 == 3:
            deliver_all(store, folder / "to")
    own = os.path.getsize(folder / "to" / "points")
    found["written for each byte of points"] = round((written_bytes() - began - own) / own, 2)
    found["on disk at most, delivered each second, bytes"] = most
    store = STORES[kind](folder / "media")
    began = written_bytes()
    for _ in range(100):
        store.append([StagedFrame(kind="append", file="points", body=os.urandom(2 << 20), records=1)])
        most = max(most, size_of(folder / "media"))
    found["written for each byte of media"] = round((written_bytes() - began) / (200 << 20), 2)
    found["on disk at most, for each byte of media"] = round(most / (200 << 20), 2)
    return found


def log_until_killed(kind: str, folder: Path, report: int) -> None:
    """A program that stages and delivers, and says what is staged."""
    store = STORES[kind](folder / "staging")

    def deliver() -> None:
        chance = random.Random(os.getpid())
        while True:
            deliver_all(store, folder / "to", most_bytes=chance.choice((1, 4000, 4 << 20)))
            time.sleep(chance.random() * 0.01)

    threading.Thread(target=deliver, daemon=True).start()
    number = 0
    while True:
        store.append([frame(number)])
        number += POINTS
        os.write(report, b"%08d" % number)


def kill(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Points lost and doubled by SIGKILL."""
    chance = random.Random(7)
    staged = lost = doubled = disordered = left = 0
    for attempt in range(options.kills):
        here = folder / str(attempt)
        reading, report = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            with suppress(BaseException):
                log_until_killed(kind, here, report)
            os._exit(1)
        os.close(report)
        said = os.read(reading, 8)
        time.sleep(chance.random() * 0.06)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as pipe:
            said += pipe.read()
        promised = int(said[-8:])
        left += len(numbers_in(here / "to")) < promised
        store = STORES[kind](here / "staging")
        deliver_all(store, here / "to")
        store.close()
        found = numbers_in(here / "to")
        staged += promised
        lost += len(set(range(promised)) - set(found))
        doubled += len(found) - len(set(found))
        disordered += found != sorted(found)
        shutil.rmtree(here)
    return {
        "kills": options.kills,
        "of which left something to recover": left,
        "points staged": staged,
        "lost": lost,
        "doubled": doubled,
        "out of order, kills": disordered,
    }


def full(kind: str, folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """On a disk of 8 MiB; in a mount namespace of its own."""
    command = ["unshare", "--mount", sys.executable, __file__, "--full-disk", kind, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode:
        return {"no small disk can be mounted": ended.stderr.strip().splitlines()[-1:]}
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def fill_disk(kind: str, folder: Path) -> dict[str, Any]:
    """Stages more than a disk takes, delivers half of it, stages more."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK}", "none", str(disk)], check=True)
    faults: list[OSError] = []
    store = STORES[kind](disk / "staging", on_fault=faults.append)
    number = 0
    size = len(frame(0, 1000).body)
    while not faults:
        store.append([frame(number, 1000)])
        number += 1000
    taken = number // 1000 - 1
    # What waits in memory by then.
    for _ in range(5):
        store.append([frame(number, 1000)])
        number += 1000
    sink = FilesSink(LocalDestination(str(folder / "to")), store.anchors, store.note)
    for _ in range(taken // 2):
        portion = store.read(1)
        assert portion is not None
        sink.deliver(portion.frames)
        store.release(portion)
    space = os.statvfs(disk)
    faults.clear()
    time.sleep(5.1)
    for _ in range(taken // 2 - 5 - 1):
        store.append([frame(number, 1000)])
        number += 1000
    again = len(faults)
    deliver_all(store, folder / "to")
    found = numbers_in(folder / "to")
    return {
        "of 8 MiB, taken": f"{taken * size / FULL_DISK:.0%}",
        "half of that delivered: free for others": f"{space.f_bavail * space.f_bsize / FULL_DISK:.0%}",
        "refused when as much was staged again": again,
        "lost": len(set(range(number)) - set(found)),
        "doubled": len(found) - len(set(found)),
    }


def cleaner(kind: str, folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """The oldest file that holds points is removed; the program goes on, or is killed thereafter."""
    found = {}
    for name, goes_on in (("program goes on", True), ("program is killed 1 s later", False)):
        store = STORES[kind](folder / name)
        for number in range(8000):
            store.append([frame(number * POINTS)])
        data = [path for path in (folder / name).iterdir() if path.suffix == ".frames" or "frames.db" in path.name]
        # A database's main file is older than its log.
        min(data, key=lambda path: (path.stat().st_mtime, path.name)).unlink()
        for number in range(8000, 8004):
            store.append([frame(number * POINTS)])
        if not goes_on:
            shutil.copytree(folder / name, folder / f"{name} killed")
            store = STORES[kind](folder / f"{name} killed")
        deliver_all(store, folder / "to" / name)
        there = set(numbers_in(folder / "to" / name))
        found[f"{name}: lost of {8004 * POINTS} points"] = 8004 * POINTS - len(there)
    return found


def damage(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One byte of staging changes; 20 times."""
    chance = random.Random(7)
    left, silent = [], 0
    store = STORES[kind](folder / "staged")
    for number in range(4000):
        store.append([frame(number * POINTS)])
    every = 4000 * POINTS
    for attempt in range(20):
        here = folder / str(attempt)
        shutil.copytree(folder / "staged", here)
        data = [path for path in here.iterdir() if path.suffix == ".frames" or path.name.startswith("frames.db")]
        path = chance.choices(data, [path.stat().st_size for path in data])[0]
        with path.open("r+b") as file:
            place = chance.randrange(path.stat().st_size)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 0xFF]))
        with suppress(sqlite3.Error):
            deliver_all(STORES[kind](here), folder / "to" / str(attempt))
        path = folder / "to" / str(attempt) / "points"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        right = set(frame(0, every).body.splitlines(keepends=True))
        silent += sum(line not in right for line in lines)
        left.append(len(right.intersection(lines)))
        shutil.rmtree(here)
    return {
        f"of {every} points left: median": statistics.median(left),
        "least": min(left),
        "wrong points delivered": silent,
    }


CASES: dict[str, Callable[[str, Path, argparse.Namespace], dict[str, Any]]] = {
    "rate": rate,
    "call": call,
    "bytes": bytes_on_disk,
    "kill": kill,
    "full": full,
    "cleaner": cleaner,
    "damage": damage,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--kills", type=int, default=200, help="how often a program is killed")
    parser.add_argument("--full-disk", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.full_disk:
        kind, folder = options.full_disk
        print(json.dumps(fill_disk(kind, Path(folder))))
        return
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = {kind: CASES[name](kind, Path(folder) / kind, options) for kind in STORES}
        for what in next(iter(found.values())):
            print(f"{name}: {what}: " + "; ".join(f"{kind} {found[kind].get(what)}" for kind in STORES), flush=True)


if __name__ == "__main__":
    main()
