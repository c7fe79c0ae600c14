"""Our shared workstation has no control groups: a small daemon sees to it that nobody takes all memory.

It is started beside the job with the pids of its processes, and enforces an allowance for each of them, as
the cluster does.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def enforce(pid: int, limit_mb: float, every_s: float = 0.25) -> None:
    while True:
        try:
            used = resident_mb(pid)
        except (FileNotFoundError, IndexError):
            return
        if used > limit_mb:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(every_s)


def register(extra_mb: float) -> None:
    """Registers this process with the daemon, with so much memory on top of what it has now."""
    limit = resident_mb(os.getpid()) + extra_mb
    command = [sys.executable, "-S", __file__, str(os.getpid()), str(limit)]
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    enforce(int(sys.argv[1]), float(sys.argv[2]))
