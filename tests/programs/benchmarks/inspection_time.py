"""How long ``ncclsafe inspect`` takes to answer: ``python tests/programs/benchmarks/inspection_time.py``.

Ranks of plain torch.distributed on gloo hang, as rank 0 is in an evaluation of its own, in which it sleeps or computes.
They are inspected once the hang is so many seconds old: from the start of the command to its first word on what holds
them up, and to its answer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from started_ranks import ranks_of

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 120.0
SO_FAR = "So far:"
RANK = """
import sys
import time

import torch
import torch.distributed as dist

def evaluate(score):
    open(sys.argv[1], "w").close()
    while sys.argv[2] == "computes":
        score = score + torch.ones(64, 64) @ torch.ones(64, 64)
    time.sleep(3600)

torch.set_num_threads(1)
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    evaluate(torch.zeros(64, 64))
dist.barrier()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One inspection.

    Attributes:
        first_s: Until it first said what holds the ranks up, seconds.
        took_s: Until it ended.
        told: Cause, ranks and confidence of its answer.
        load: Of the host in the last minute, by its end.
    """

    first_s: float
    took_s: float
    told: str
    load: float


def inspected(pids: Sequence[int]) -> Answer:
    command = [sys.executable, "-m", "lightning_ncclsafe", "inspect", "--format", "json", "--pid", *map(str, pids)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began_s, first_s = time.monotonic(), 0.0
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True)
        try:
            for line in process.stderr or ():
                first_s = first_s or (time.monotonic() - began_s if SO_FAR in line else 0.0)
            process.wait(LIMIT_S)
        finally:
            process.kill()
        took_s = time.monotonic() - began_s
        output.seek(0)
        report = json.load(output)
    first = next(iter(report["findings"]), {"rule": "nothing", "ranks": [], "confidence": "-"})
    ranks = ", ".join(map(str, first["ranks"]))
    told = f"{first['rule']}, rank {ranks or '-'}, {first['confidence']}"
    return Answer(first_s=first_s or took_s, took_s=took_s, told=told, load=os.getloadavg()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="inspections of each hang (default: %(default)s)")
    parser.add_argument("--ages", type=float, nargs="+", default=[0.0, 30.0], metavar="S", help="how old it is")
    parser.add_argument("--doing", nargs="+", default=["sleeps", "computes"], choices=["sleeps", "computes"])
    options = parser.parse_args()
    print(f"{options.ranks} ranks, {len(os.sched_getaffinity(0))} cores, {options.rounds} rounds")
    for doing in options.doing:
        found: dict[float, list[Answer]] = {age_s: [] for age_s in options.ages}
        for _ in range(options.rounds):
            # Of one that is killed in the end the others complain.
            silenced = subprocess.DEVNULL
            with ranks_of(RANK, options.ranks, doing, wait_for=[0], output=silenced) as pids:
                began_s = time.monotonic()
                for age_s in sorted(options.ages):
                    time.sleep(max(began_s + age_s - time.monotonic(), 0.0))
                    found[age_s].append(inspected(pids))
        for age_s, answers in found.items():
            first_s, took_s = ([*times] for times in zip(*((one.first_s, one.took_s) for one in answers), strict=True))
            told = "; ".join(f"{text} ({count})" for text, count in Counter(one.told for one in answers).items())
            print(
                f"rank 0 {doing}, {age_s:3.0f} s old: first word after {statistics.median(first_s):4.1f} s, "
                f"{max(first_s):4.1f} s at most; answer after {statistics.median(took_s):4.1f} s, {max(took_s):4.1f} s "
                f"at most; load {max(one.load for one in answers):.1f}; {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
