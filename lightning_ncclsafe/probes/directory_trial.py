"""A program that tries one directory, and writes the result to its standard output, as JSON.

It runs in its own process, as the directory may hang, and imports only the standard library, so that it starts in some
hundredths of a second: ``directory_trial.py write|read DIRECTORY SECONDS``.
"""

import errno
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

_APPENDS = 20
_BLOCK_BYTES = 4096
_FILES = 8
_ENTRIES = 200


def try_writing(path: str, ends_s: float) -> dict[str, Any]:
    """Appends to a temporary file as a logger does; creates no directory, and leaves no file.

    Args:
        path: The directory; if it does not exist, the nearest one above it is tried.
        ends_s: When to stop, by ``time.monotonic()``; one append is always made.
    """
    folder = _nearest(path)
    found: dict[str, Any] = {"folder": os.path.realpath(folder), **_space(folder)}
    try:
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        found.update(_appended(folder, ends_s))
    except OSError as error:
        found["problem"] = f"{error.strerror}{f' in {folder}' if folder != path else ''}"
    return found


def _nearest(path: str) -> str:
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def _appended(folder: str, ends_s: float) -> dict[str, float]:
    name = os.path.join(folder, f".ncclsafe-trial-{os.getpid()}-{random.getrandbits(64):016x}")
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    try:
        # Unlinked before anything can hang: the file exists for as long as it is open.
        os.unlink(name)
        return _append_times(file, ends_s)
    finally:
        os.close(file)


def _append_times(file: int, ends_s: float) -> dict[str, float]:
    block = bytes(_BLOCK_BYTES)
    appends: list[float] = []
    syncs: list[float] = []
    while not appends or (len(appends) < _APPENDS and time.monotonic() < ends_s):
        begin = time.perf_counter()
        os.write(file, block)
        appended = time.perf_counter()
        os.fsync(file)
        appends.append(appended - begin)
        syncs.append(time.perf_counter() - appended)
    return {
        "append_s": statistics.median(appends),
        "append_worst_s": max(appends),
        "fsync_s": statistics.median(syncs),
    }


def try_reading(path: str, ends_s: float) -> dict[str, Any]:
    """Opens some files of a directory, or the given file, and reads 4 KiB of each at a random place."""
    found: dict[str, Any] = {"folder": os.path.realpath(path), **_space(path)}
    try:
        files = [path] if os.path.isfile(path) else list(itertools.islice(_files(path), _ENTRIES))
        times: list[float] = []
        for file in random.sample(files, min(_FILES, len(files))):
            if not times or time.monotonic() < ends_s:
                times.append(_read_time(file))
        if times:
            found["read_s"] = statistics.median(times)
    except OSError as error:
        found["problem"] = str(error.strerror)
    return found


def _files(path: str) -> Iterator[str]:
    """Plain files of a directory and its subdirectories, among the first 200 entries: some data sets have millions."""
    folders, left = [path], _ENTRIES
    while folders and left > 0:
        with os.scandir(folders.pop(0)) as entries:
            for entry in itertools.islice(entries, left):
                left -= 1
                if entry.is_file():
                    yield entry.path
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _read_time(path: str) -> float:
    begin = time.perf_counter()
    # If it has become a pipe, opening it must not wait for a writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        size = os.fstat(file).st_size
        os.pread(file, _BLOCK_BYTES, random.randrange(max(size - _BLOCK_BYTES, 0) + 1))
    finally:
        os.close(file)
    return time.perf_counter() - begin


def _space(folder: str) -> dict[str, int]:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return {}
    # A file system with dynamic inodes (btrfs, most on a network) reports none.
    inodes = {"free_inodes": stats.f_favail} if stats.f_files else {}
    return {"free_bytes": stats.f_bavail * stats.f_frsize, **inodes}


if __name__ == "__main__":
    trial = {"write": try_writing, "read": try_reading}[sys.argv[1]]
    print(json.dumps(trial(sys.argv[2], time.monotonic() + float(sys.argv[3]))))
