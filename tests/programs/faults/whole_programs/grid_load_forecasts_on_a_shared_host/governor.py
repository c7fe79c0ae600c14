"""Keeps a shared host usable: work of low priority rests for a moment, again and again.

Whatever wants to be governed announces itself with a file in the folder; this is a process of its own.
"""

import os
import signal
import sys
import time
from pathlib import Path


def announce(folder, priority):
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / f"{os.getpid()}.pid").write_text(priority)


def announced(folder):
    return {int(path.stem): path.read_text() for path in Path(folder).glob("*.pid")}


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def govern(folder, rest=0.2, every=1.0, report_every=8):
    rounds = 0
    with open(Path(folder) / "usage.log", "a") as log:
        while True:
            time.sleep(every)
            rounds += 1
            work = announced(folder)
            resting = [pid for pid, priority in work.items() if priority == "low" and Path(f"/proc/{pid}").exists()]
            for pid in resting:
                os.kill(pid, signal.SIGSTOP)  # <- here
            if rounds % report_every == 0:
                usage = {pid: cpu_seconds(pid) for pid in work}
                log.write(f"{time.time():.0f} {usage}\n")
                log.flush()
            time.sleep(rest)
            for pid in resting:
                os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    govern(sys.argv[1])
