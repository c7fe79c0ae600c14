"""Shares the memory of a node among the processes of a job.

Started once per node. Processes that take more than their share are paused until they are back
below it, so that the kernel does not have to kill one.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import psutil


def members(folder):
    for path in sorted(Path(folder).glob("*.pid")):
        try:
            yield psutil.Process(int(path.read_text()))
        except (psutil.NoSuchProcess, ValueError):
            path.unlink(missing_ok=True)


def govern(folder, share, interval):
    paused = set()
    while os.getppid() != 1 and list(members(folder)):
        for process in members(folder):
            used = process.memory_info().rss
            if used > share and process.pid not in paused:
                os.kill(process.pid, signal.SIGSTOP)  # <- here
                paused.add(process.pid)
            elif used < 0.9 * share and process.pid in paused:
                os.kill(process.pid, signal.SIGCONT)
                paused.discard(process.pid)
        time.sleep(interval)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--share-mb", type=int, default=900)
    parser.add_argument("--interval", type=float, default=0.5)
    args = parser.parse_args()
    govern(args.folder, args.share_mb * 2**20, args.interval)
