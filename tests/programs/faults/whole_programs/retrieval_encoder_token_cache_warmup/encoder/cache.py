"""Token cache on the project's disk, shared by all jobs. NFS has no flock there, hence the lock files."""

import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def exclusive(path: Path, poll: float = 0.2):
    lock = path.with_suffix(path.suffix + ".lock")
    while True:
        try:
            fd = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            time.sleep(poll)  # <- here
    os.write(fd, f"{socket.gethostname()} {os.getpid()}\n".encode())
    os.close(fd)
    try:
        yield
    finally:
        lock.unlink()


class TokenCache:
    def __init__(self, folder: str = "cache"):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)

    def get(self, part: int, build) -> torch.Tensor:
        path = self.folder / f"part-{part:03d}.pt"
        with exclusive(path):
            if not path.exists():
                tmp = path.with_suffix(".tmp")
                torch.save(build(part), tmp)
                tmp.rename(path)
        return torch.load(path)
