"""File locks: the one that this process's main thread waits for, who holds it, and those that this process holds."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any

import psutil

from lightning_ncclsafe.code.libraries import EXISTING_LOCK_FILES, FILE_LOCKS, PATHS_OF_FILE_LOCKS
from lightning_ncclsafe.facts import FileLockFacts, LockHolder
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.host.resources import filesystem_of
from lightning_ncclsafe.probes.host.swap import is_network_filesystem
from lightning_ncclsafe.probes.process.caught import handled_now
from lightning_ncclsafe.probes.process.main_thread import system_call
from lightning_ncclsafe.probes.process.open_files import open_files
from lightning_ncclsafe.probes.process.stacks import main_thread_frames, training_thread
from lightning_ncclsafe.probes.process.thread_frames import current_frames
from lightning_ncclsafe.probes.source.scopes import scope_at, scope_of, user_files
from lightning_ncclsafe.probes.source.transactions import left_open_at, runs_sql

_PROC = Path("/proc")
_LOCKS = ("FLOCK", "POSIX", "OFDLCK")
_WAITING_COMMANDS = (7, 38)  # F_SETLKW and F_OFD_SETLKW
_MOST_HOLDERS = 8
_MOST_WORDS, _MOST_CHARACTERS, _LEAST_CHARACTERS = 4, 60, 20

# Device and inode, as the kernel's list and stat() name a file.
_File = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Lock:
    """A lock that a process of this host holds or waits for.

    Attributes:
        number: The lock's number in the kernel's list, which a wait for it shares.
        is_exclusive: Whether it also excludes readers.
        pid: Process id; not above 0 for a process in another container or on another host.
    """

    number: str
    kind: str
    is_awaited: bool
    is_exclusive: bool
    pid: int
    file: _File


def waited_for() -> FileLockFacts | None:
    """The file lock that the main thread waits for; None if it waits for none. May block on storage."""
    lock = _awaited()
    return lock and replace(lock, is_on_network=is_network_filesystem(filesystem_of(os.path.realpath(lock.path))))


def transaction_left_open() -> str:
    """If the main thread waits for a database, the change that may have left it locked; reads source files."""
    frames = [(frame.f_code, frame.f_lineno or 0) for frame in main_thread_frames()]
    if not frames or not runs_sql(scope_of(frames[0][0]), frames[0][1]):
        return ""
    return left_open_at(user_files(), {(code.co_filename, code.co_name) for code, _ in frames})


def _awaited() -> FileLockFacts | None:
    owner = _library_lock()
    if owner is not None:
        return owner
    call, arguments = system_call()
    if call == "flock":
        return _in_call(arguments[0], ("FLOCK",))
    if call == "fcntl" and arguments[1] in _WAITING_COMMANDS:
        return _in_call(arguments[0], ("POSIX", "OFDLCK"))
    sleeps = call == "sleep" or (call == "select" and arguments[0] == 0)
    return (_attempted() or _retried()) if sleeps else None


def awaited_lock(pid: int, proc: Path = _PROC) -> FileLockFacts | None:
    """The lock that another process waits for in a system call; None if it waits for none, or that is unknown.

    Asks the file system of each file that the process has open, which may not answer.
    """
    entries = [*_entries(proc)]
    wait = next((entry for entry in entries if entry.is_awaited and entry.pid == pid), None)
    if wait is None:
        return None
    holder = next((entry.pid for entry in entries if not entry.is_awaited and entry.number == wait.number), 0)
    inode = wait.file[2]
    # A layered file system has another device number.
    opened = (path for link, path in open_files(pid, proc) if _inode(link) == inode)
    return FileLockFacts(path=next(opened, ""), holders=_holders([holder] if holder > 0 else []))


def held() -> tuple[str, ...]:
    """Paths of the files on which this process holds a lock."""
    mine = {lock.file for lock in _locks() if lock.pid == os.getpid()}
    return tuple(sorted({path for path, file in _regular_files() if _among(file, mine)})) if mine else ()


def _library_lock() -> FileLockFacts | None:
    """The lock of a library that retries: between two attempts, only the library's frames show the wait."""
    for frame in main_thread_frames(FILE_LOCKS):
        owner = frame.f_locals.get("self")
        path = _path_of(owner)
        if path:
            return _existing(path) if _is_by_existence(frame, owner) else lock_on(path)
    return None


def _path_of(owner: Any) -> str:
    values = (getattr(owner, name, None) for name in PATHS_OF_FILE_LOCKS)
    return next((os.fsdecode(value) for value in values if isinstance(value, (str, bytes, os.PathLike))), "")


def _is_by_existence(frame: Any, owner: Any) -> bool:
    """Whether a library's lock is a file's existence, by the waiting function or by the library's methods."""
    tries = (getattr(value, "__code__", None) for kind in type(owner).__mro__ for value in vars(kind).values())
    codes = (frame.f_code, *(code for code in tries if code is not None))
    return any(EXISTING_LOCK_FILES.has(code.co_filename, code.co_name) for code in codes)


def _existing(path: str) -> FileLockFacts | None:
    status = or_none(lambda: os.stat(path))
    if status is None:
        return None
    age_s = round(max(time.time() - status.st_mtime, 0.0), 1)
    holders = _holders(_having_open(path))
    return FileLockFacts(path=path, holders=holders, by_existence=True, age_s=age_s)


def _in_call(descriptor: int, kinds: Iterable[str]) -> FileLockFacts | None:
    place = f"/proc/self/fd/{descriptor}"
    path = or_none(lambda: os.readlink(place))
    return lock_on(path, kinds, place) if path is not None else None


def _attempted() -> FileLockFacts | None:
    """The file that exists already, if the thread sleeps where it handles that, in a loop that tries to create it."""
    error = handled_now()
    if not isinstance(error, FileExistsError) or error.__traceback__ is None:
        return None
    # A link to a file of its own is made with two names, of which the second is that of the lock.
    path = error.filename2 or error.filename
    frame = current_frames().get(training_thread().ident or 0)
    if frame is not error.__traceback__.tb_frame or not isinstance(path, (str, bytes)):
        return None
    code = frame.f_code
    lines = frame.f_lineno or 0, error.__traceback__.tb_lineno
    scope = scope_at(code.co_filename, code.co_name, lines[0])
    again = scope.loops_around(lines)
    is_again = bool(again) and again[0] == scope.loops_around(lines[:1])[0]
    return _existing(os.path.abspath(os.fsdecode(path))) if is_again else None


def _retried() -> FileLockFacts | None:
    """The lock that a loop with sleeps may wait for: of a file that it has open and that another process has locked."""
    locks = [*_locks()]
    mine = {lock.file for lock in locks if lock.pid == os.getpid()}
    others = {lock.file for lock in locks if lock.pid > 0 and lock.is_exclusive} - mine
    found = (one for one in _regular_files() if _among(one[1], others)) if others else iter(())
    path, _ = next(found, ("", None))
    return replace(lock_on(path), is_certain=False) if path else None


def lock_on(path: str, kinds: Iterable[str] = _LOCKS, place: str = "") -> FileLockFacts:
    """The lock on a file with its holders; if this process is one, also who may have inherited the file from it.

    Args:
        place: Another path of the file.
    """
    status = or_none(lambda: os.stat(place or path))
    if status is None:
        return FileLockFacts(path=path)
    file = _file_of(status)
    pids = {lock.pid for lock in _locks() if lock.kind in kinds and _among(file, {lock.file}) and lock.pid > 0}
    if os.getpid() in pids:
        return FileLockFacts(path=path, holders=_holders([*sorted(pids), *_having_open(path)]))
    return FileLockFacts(path=path, holders=_holders(keeper for pid in sorted(pids) for keeper in _keepers(pid, path)))


def _keepers(pid: int, path: str) -> list[int]:
    """The processes that keep a lock that this one has taken: itself; if it has closed the file, those it has forked.

    The kernel goes on listing the lock as that of the process that has taken it.
    """
    opened, real = {other for _, other in open_files(pid)}, os.path.realpath(path)
    if not opened or real in opened:
        return [pid]
    return [one for one in _having_open(path) if pid in _holder(one).parents] or [pid]


def _holders(pids: Iterable[int]) -> tuple[LockHolder, ...]:
    return tuple(_holder(pid) for pid in list(dict.fromkeys(pids))[:_MOST_HOLDERS])


def _holder(pid: int) -> LockHolder:
    process = or_none(lambda: psutil.Process(pid))
    if process is None:
        return LockHolder(pid=pid)
    parents = or_none(lambda: tuple(parent.pid for parent in process.parents())) or ()
    return LockHolder(pid=pid, command=command_words(or_none(process.cmdline) or []), parents=parents)


def command_words(arguments: list[str]) -> str:
    """The program and what it runs, without further arguments, which may be secrets."""
    if not arguments:
        return ""
    words = [PurePath(arguments[0]).name]
    for word in arguments[1:_MOST_WORDS]:
        words.append(word)
        if word == "-c" or not word.startswith("-"):
            break
    return _fitting(words)


def _fitting(words: list[str]) -> str:
    """The words in one, cut from the left of the last one, whose end is the name of the file that is run."""
    *before, last = words
    start = "".join(f"{word} " for word in before)
    if len(start) + len(last) <= _MOST_CHARACTERS:
        return start + last
    room = _MOST_CHARACTERS - len(start) - 1
    # Of a path, whole parts.
    cut = last[-room:] if before and room >= _LEAST_CHARACTERS else ""
    whole = cut[cut.find("/") :] if "/" in cut[:-1] else cut
    return f"{start}…{whole}" if cut else (start + last)[:_MOST_CHARACTERS]


def _locks() -> Iterator[_Lock]:
    """All locks that are held on this host, except in other containers, whose locks the kernel does not list."""
    return (entry for entry in _entries(_PROC) if not entry.is_awaited)


def _entries(proc: Path) -> Iterator[_Lock]:
    """The kernel's list of locks; waits follow the lock: ``"3: -> FLOCK ADVISORY WRITE 4711 08:01:131104 0 EOF"``."""
    for line in (proc / "locks").read_text(encoding="utf-8", errors="replace").splitlines():
        number, *words = line.split() or [""]
        is_awaited = words[:1] == ["->"]
        kind, _, access, pid, file, *_ = (*words[is_awaited:], *[""] * 5)
        if kind in _LOCKS:
            with suppress(ValueError):
                major, minor, inode = file.split(":")
                yield _Lock(
                    number=number,
                    kind=kind,
                    is_awaited=is_awaited,
                    is_exclusive=access == "WRITE",
                    pid=int(pid),
                    file=(int(major, 16), int(minor, 16), int(inode)),
                )


def _file_of(status: os.stat_result) -> _File:
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _among(file: _File, others: Iterable[_File]) -> bool:
    """Whether a file is one of these; file systems without a device (major 0) give one file several device numbers."""
    return any(file == other or (file[2] == other[2] and file[0] == other[0] == 0) for other in others)


def _regular_files() -> Iterator[tuple[str, _File]]:
    """Path and file of each regular file that this process has open."""
    for place, path in open_files(os.getpid()):
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/")):
            with suppress(OSError):
                status = os.stat(place)
                if S_ISREG(status.st_mode):
                    yield path, _file_of(status)


def _having_open(path: str) -> list[int]:
    """Other processes that have a file open, as far as this user may see; does not access storage."""
    real, own = os.path.realpath(path), os.getpid()
    pids = sorted(int(folder.name) for folder in _PROC.iterdir() if folder.name.isdigit())
    return [pid for pid in pids if pid != own and any(real == other for _, other in open_files(pid, _PROC))]


def _inode(link: Path) -> int | None:
    return or_none(lambda: link.stat().st_ino)
