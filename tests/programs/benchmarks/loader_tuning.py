"""LoaderTuner beside every setting that the budget allows, Lightning's suggestion, and no workers at all.

One rank with steps that wait as for a device, and loaders that compute, that sleep, that do both, and whose samples
vary a thousandfold; epochs of 100 batches. First each setting is tried for two epochs; then the best of them,
LoaderTuner (which begins without workers, and has found what it keeps by the 14th epoch), Lightning's suggestion and
the default take turns. Rates are those of whole epochs, with all that starting workers takes: of LoaderTuner, from the
14th epoch on.

python tests/programs/benchmarks/loader_tuning.py
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from started_ranks import run_ranks

SCRIPT = Path(__file__).with_name("loader_rank.py")
# Processor time and waiting time of a batch, spread of the samples, time of a step; milliseconds.
KINDS = {
    "computes, ahead with one worker": {"cpu_ms": 6, "sleep_ms": 0, "spread": 0, "step_ms": 10},
    "computes, needs both cores": {"cpu_ms": 16, "sleep_ms": 0, "spread": 0, "step_ms": 10},
    "sleeps": {"cpu_ms": 0, "sleep_ms": 16, "spread": 0, "step_ms": 10},
    "sleeps longer than workers make up for": {"cpu_ms": 0, "sleep_ms": 60, "spread": 0, "step_ms": 10},
    "computes and sleeps": {"cpu_ms": 5, "sleep_ms": 8, "spread": 0, "step_ms": 10},
    "sleeps, samples vary a thousandfold": {"cpu_ms": 0, "sleep_ms": 10, "spread": 1.6, "step_ms": 10},
}
PREFETCH = (1, 2, 4, 8)
BATCHES = 100
SETTLED_BY = 14


def settings(cores: int) -> Iterable[tuple[int, int]]:
    yield 0, 0
    for workers in range(1, cores + 1):
        yield from ((workers, prefetch) for prefetch in PREFETCH)


def measure(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cases.json")
        path.write_text(json.dumps(cases))
        ((*found,),) = run_ranks(SCRIPT, [f"--cases={path}"], 1, folder)
    return found


def compare(kind: dict[str, Any], cores: int, options: argparse.Namespace) -> dict[str, Any]:
    def case(workers: int, prefetch: int, *, by: str = "safe", name: str = "") -> dict[str, Any]:
        from_epoch = SETTLED_BY if by == "tuned" else 1
        times = {"epochs": from_epoch + options.epochs, "from_epoch": from_epoch, "batches": BATCHES}
        return {**kind, **times, "workers": workers, "prefetch": prefetch, "by": by, "name": name}

    swept = measure([case(*setting) for setting in settings(cores)])
    best = max(swept, key=lambda found: found["rate"])
    turn = [
        case(best["workers"], best["prefetch"], name="best"),
        case(0, 0, by="tuned", name="tuned"),
        case(max(cores - 1, 0), 2 if cores > 1 else 0, name="suggested"),
        case(0, 0, name="default"),
    ]
    found = measure(turn * options.turns)
    return {"best": best, "turns": found}


def show(name: str, found: dict[str, Any]) -> None:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for turn in found["turns"]:
        by_name.setdefault(turn["name"], []).append(turn)
    rate = {name: statistics.median(turn["rate"] for turn in turns) for name, turns in by_name.items()}
    ratios = [tuned["rate"] / best["rate"] for tuned, best in zip(by_name["tuned"], by_name["best"], strict=True)]
    best, tuned = found["best"], by_name["tuned"]
    ends = sorted({turn["workers_at_end"] for turn in tuned})
    print(
        f"| {name} | {best['workers']}, {best['prefetch']}: {rate['best']:.1f} | {ends}: {rate['tuned']:.1f} |"
        f" {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) |"
        f" {max(turn['settled_s'] for turn in tuned):.1f} s | {max(turn['most_workers'] for turn in tuned)} |"
        f" {rate['suggested']:.1f} | {rate['default']:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="of which each is measured")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="kinds with this in their name")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print("| loader | best: steps/s | tuned: steps/s | tuned / best | settled | most workers | suggested | default |")
    print("|---|---|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        if options.only in name:
            show(name, compare(kind, cores, options))


if __name__ == "__main__":
    main()
