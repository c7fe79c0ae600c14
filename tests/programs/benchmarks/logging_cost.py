"""What logging costs a step: without a logger, with Lightning's own, and with that one off the training thread.

All train the same small model in the same processes, in turns, so that what the machine does at the side hits all of
them alike. Step times are means, which have the work of background threads in them.

- local: TensorBoard on a local disk, 10 scalars every step. Allowed: half of what Lightning's own adds.
- slow: the same to a storage each write to which takes 200 ms. Allowed: 1.05 x the step without a logger.
- stall: a storage that does not answer for 60 s in the middle. Allowed: 1.05 x.
- image: an image of 512 x 512 every 5 steps, in a step of Python code. Allowed: 1.2 x the step without.
- end: 60 steps of 10 scalars to a storage of 20 ms a write; what the end of the run takes. Allowed: 1 s.
- dead: a storage that never answers again; what the end takes. Allowed: its deadline, 30 s, and a second.

python tests/programs/benchmarks/logging_cost.py
python tests/programs/benchmarks/logging_cost.py local image --blocks 20
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from started_ranks import run_ranks
from step_overhead import WARM_UP_STEPS, bootstrap

LOGGING_RANK = Path(__file__).with_name("logging_rank.py")
# In this order and back again, so that a steady drift cancels out.
TURNS = ("none", "offload", "stock")
FEW_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        steps: Steps of one training.
        with_stock: Whether Lightning's own logger is measured in turn with the others; on a slow storage, where a step
            takes seconds, one training of a few steps says enough.
        ranks: Ranks of a training.
        scheme: ``"slow://"`` where the logger's directory is slow.
        once: Whether one training of each says enough.
        training: What else the trainings have in common.
    """

    steps: int
    with_stock: bool = True
    ranks: int = 2
    scheme: str = ""
    once: bool = False
    training: dict[str, Any]


CASES = {
    "local": Case(steps=300, training={}),
    "slow": Case(steps=300, with_stock=False, scheme="slow://", training={"latency_s": 0.2}),
    "stall": Case(steps=12_000, with_stock=False, scheme="slow://", once=True, training={"stall_s": 60.0}),
    "image": Case(steps=300, ranks=1, training={"media": True}),
    "end": Case(steps=60, with_stock=False, scheme="slow://", once=True, training={"latency_s": 0.02}),
    "dead": Case(steps=60, with_stock=False, scheme="slow://", once=True, training={"stall_s": -1.0}),
}


def trainings_of(case: Case, blocks: int, folder: str) -> list[dict[str, Any]]:
    """The trainings of some blocks, the first of which is to be left out."""
    turns = [how for how in TURNS if how != "stock" or case.with_stock]
    order = (turns if case.once else [*turns, *reversed(turns)]) * (1 if case.once else 1 + blocks)
    common = {"to": f"{case.scheme}{folder}/logs", **case.training}
    trainings = [{"how": how, "steps": case.steps + WARM_UP_STEPS, **common} for how in order]
    if not case.with_stock and not case.once:
        trainings.append({"how": "stock", "steps": FEW_STEPS, **common})
    return trainings


def launch(case: Case, blocks: int) -> list[tuple[str, dict[str, Any]]]:
    """How each training was logged, and what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        trainings = trainings_of(case, blocks, folder)
        measured, *_ = run_ranks(LOGGING_RANK, [json.dumps(trainings)], case.ranks, folder)
    return [(training["how"], found) for training, found in zip(trainings, measured, strict=True)]


def ratios(measured: Sequence[tuple[str, dict[str, Any]]], clock: str) -> dict[str, list[float]]:
    """Mean step times of each block by how it was logged, in milliseconds."""
    times: dict[str, list[float]] = {}
    for how, found in measured:
        few = len(found[clock]) <= FEW_STEPS
        times.setdefault(how, []).append(statistics.fmean(found[clock][1 if few else WARM_UP_STEPS :]))
    if len(times["none"]) == 1:
        return times
    # The few steps of a stock logger on a slow storage stand beside every block.
    times = {how: values * len(times["none"]) if len(values) == 1 else values for how, values in times.items()}
    # Two trainings of each kind make one block; the first block warms up.
    pairs = {how: zip(*[iter(values)] * 2, strict=True) for how, values in times.items()}
    return {how: [statistics.fmean(pair) for pair in both][1:] for how, both in pairs.items()}


def lines(name: str, case: Case, blocks: int) -> list[str]:
    """What was measured, in words."""
    measured = launch(case, blocks)
    if name in ("end", "dead"):
        return [f"the end took {found['end_s']:.2f} s" for how, found in measured if how == "offload"]
    told = []
    for clock in ("wall", "cpu"):
        times = ratios(measured, clock)
        parts = [f"{how} {statistics.median(values):.3f} ms" for how, values in times.items()]
        for how in ("offload", "stock"):
            if how in times:
                found = [b / a for a, b in zip(times["none"], times[how], strict=True)]
                low, high = bootstrap(found)
                parts.append(f"{how}/none {statistics.median(found):.3f} ({low:.3f}-{high:.3f})")
        if name == "local":
            added = {how: statistics.median(times[how]) - statistics.median(times["none"]) for how in times}
            parts.append(f"added by offload/by stock {added['offload'] / added['stock']:.2f}")
        told.append(f"{clock}: " + ", ".join(parts))
    slowest = {how: max(max(found["wall"][1:]) for who, found in measured if who == how) for how in times}
    told.append("slowest step: " + ", ".join(f"{how} {value:.0f} ms" for how, value in slowest.items()))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of two trainings of each kind")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in options.cases or CASES:
        for line in lines(name, CASES[name], options.blocks):
            print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
