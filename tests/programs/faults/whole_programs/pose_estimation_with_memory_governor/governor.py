"""Keeps a shared workstation usable: python governor.py PID LIMIT_MB watches one process and throttles it.

A process above its share of memory is paused until the machine has recovered.
"""

import os
import signal
import sys
import time


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    pid, limit = int(sys.argv[1]), float(sys.argv[2])
    baseline = resident_mb(pid)
    paused = False
    while True:
        time.sleep(0.5)
        try:
            used = resident_mb(pid) - baseline
            if not paused and used > limit:
                os.kill(pid, signal.SIGSTOP)  # <- here
                paused = True
            elif paused and used < 0.8 * limit:
                os.kill(pid, signal.SIGCONT)
                paused = False
        except (FileNotFoundError, ProcessLookupError):
            return


if __name__ == "__main__":
    main()
