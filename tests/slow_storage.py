"""A slow storage: an fsspec file system (``slow://``) over a local directory, which answers late, or not for a while.

What is slow is said by the environment, so that processes that are started inherit it:

- ``SLOW_STORAGE_LATENCY_S``: how long each write takes, and each flush of an open file.
- ``SLOW_STORAGE_STALL``: a file; for as long as it exists, nothing that would write returns.
"""

import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "slow"
LATENCY_S = "SLOW_STORAGE_LATENCY_S"
STALL = "SLOW_STORAGE_STALL"


def wait_for_storage() -> None:
    """What a write to this storage costs."""
    time.sleep(float(os.environ.get(LATENCY_S, "0")))
    stall = os.environ.get(STALL, "")
    while stall and Path(stall).exists():
        time.sleep(0.01)


class SlowFileSystem(LocalFileSystem):
    """Local files; a file is opened for writing, or written whole, only after the latency."""

    protocol = PROTOCOL

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(os.fspath(path).removeprefix(f"{PROTOCOL}://"))

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode[0] != "r":
            wait_for_storage()
        return super().open(path, mode=mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        wait_for_storage()
        super().pipe_file(path, value, **kwargs)


fsspec.register_implementation(PROTOCOL, SlowFileSystem, clobber=True)
