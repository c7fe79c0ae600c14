"""For how long ranks are paused by ``ncclsafe inspect``: ``python tests/programs/benchmarks/inspection_pauses.py``.

The ranks compute without end, so that each is on a core or in the queue for one, which the kernel both counts; what is
left of the time, it was kept from running. That is compared with nothing being done, and with what else reads stacks.
As the machine's own doings would hide it, what is left is not the time in the queue: that grows with any work on the
host, and is given beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from started_ranks import ranks_of

ROOT = Path(__file__).resolve().parents[3]
PY_SPY = str(Path(sys.executable).with_name("py-spy"))
READING_S, MOST_READINGS = 0.0002, 50
RANK = """
import sys
if sys.argv[2]:
    import torch
open(sys.argv[1], "w").close()

def step(count):
    while True:
        count += 1

step(0)
"""
Doing = Callable[[Sequence[int]], object]


def inspect(pids: Sequence[int]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_ncclsafe", "inspect", "--format", "json", "--pid", *map(str, pids)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def py_spy(*options: str) -> Doing:
    def read(pids: Sequence[int]) -> None:
        for pid in pids:
            command = [PY_SPY, "dump", *options, "--pid", str(pid)]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    return read


def nothing(pids: Sequence[int]) -> None:
    time.sleep(4)


DOINGS: dict[str, Doing] = {
    "nothing, for 4 s": nothing,
    "ncclsafe inspect": inspect,
    "py-spy dump, once": py_spy(),
    "py-spy dump --native, once": py_spy("--native"),
}


def counted(pid: int) -> tuple[float, float, float]:
    """The time, and for how much of it the main thread was on a core, and in the queue for one, milliseconds."""
    file = Path(f"/proc/{pid}/task/{pid}/schedstat")
    readings = []
    # Between the two readings of the clock this process may have to wait for a core itself.
    while not readings or (min(readings)[0] > READING_S and len(readings) < MOST_READINGS):
        before_s = time.monotonic()
        ran_ns, queued_ns, _ = file.read_text().split()
        after_s = time.monotonic()
        readings.append((after_s - before_s, (before_s + after_s) / 2, int(ran_ns), int(queued_ns)))
    _, at_s, ran, queued = min(readings)
    return at_s * 1e3, ran / 1e6, queued / 1e6


def paused(pids: Sequence[int], doing: Doing) -> dict[str, float]:
    """What the ranks lost meanwhile."""
    before = [counted(pid) for pid in pids]
    began_s = time.monotonic()
    doing(pids)
    took_s = time.monotonic() - began_s
    lost, queued = [], []
    for pid, (at_ms, ran_ms, queued_ms) in zip(pids, before, strict=True):
        now_ms, all_ran_ms, all_queued_ms = counted(pid)
        lost.append(now_ms - at_ms - (all_ran_ms - ran_ms) - (all_queued_ms - queued_ms))
        queued.append((all_queued_ms - queued_ms) / (now_ms - at_ms))
    return {"paused_ms": max(lost), "median_ms": statistics.median(lost), "queued": max(queued), "took_s": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-torch", action="store_true", help="ranks that have not loaded torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each round there, too")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in DOINGS}
    loads = "" if options.without_torch else "torch"
    with ranks_of(RANK, options.ranks, loads, wait_for=range(options.ranks)) as pids:
        for _ in range(options.rounds):
            for name, doing in DOINGS.items():
                rounds[name].append(paused(pids, doing))
    print(f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores, {options.rounds} rounds")
    for name, found in rounds.items():
        most, middle = max(one["paused_ms"] for one in found), statistics.median(one["median_ms"] for one in found)
        took_s = statistics.median(one["took_s"] for one in found)
        queued = statistics.median(one["queued"] for one in found)
        print(
            f"{name:28} took {took_s:5.1f} s; kept from running: at most {most:7.1f} ms a rank, {middle:7.1f} ms in the"
            f" middle; in the queue for a core {queued:.0%} of the time"
        )
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
