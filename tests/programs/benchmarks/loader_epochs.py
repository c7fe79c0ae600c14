"""20 epochs with what a user has set: stock, with SafeDDP, and with LoaderTuner, in turn in the same processes.

Short and longer epochs, cheap and dear batches, with and without workers, forked and spawned, persistent or not. What
all 20 epochs take, from the beginning of the first to the end of the last, and the processor time of all processes.
"epoch" compares the median epochs of all turns from the third on, which varies least on a machine that is not quiet.
With ``--seed`` each is seeded, with random augmentation; the last column says how many different weights came of it.

python tests/programs/benchmarks/loader_epochs.py --turns 5
python tests/programs/benchmarks/loader_epochs.py --ranks 2 --seed 5
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from started_ranks import run_ranks

SCRIPT = Path(__file__).with_name("loader_rank.py")
SHORT, LONGER = {"batches": 40}, {"batches": 200}
CHEAP = {"cpu_ms": 1, "sleep_ms": 0, "spread": 0, "step_ms": 3}
DEAR = {"cpu_ms": 0, "sleep_ms": 20, "spread": 0, "step_ms": 10}
COMPUTED = {"cpu_ms": 10, "sleep_ms": 0, "spread": 0, "step_ms": 10}
NONE, ONE = {"workers": 0, "prefetch": 0}, {"workers": 1, "prefetch": 2}
PERSISTS = {"workers": 1, "prefetch": 2, "persists": True}
SPAWN = {"method": "spawn"}
CASES: dict[str, dict[str, Any]] = {
    "40 cheap batches, no workers": SHORT | CHEAP | NONE,
    "40 cheap batches, no workers, spawn": SHORT | CHEAP | NONE | SPAWN,
    "40 cheap batches, 1 worker": SHORT | CHEAP | ONE,
    "40 cheap batches, 1 worker, persistent": SHORT | CHEAP | PERSISTS,
    "40 cheap batches, 1 worker, persistent, spawn": SHORT | CHEAP | PERSISTS | SPAWN,
    "40 dear batches, no workers": SHORT | DEAR | NONE,
    "40 dear batches, no workers, spawn": SHORT | DEAR | NONE | SPAWN,
    "40 dear batches, 1 worker": SHORT | DEAR | ONE,
    "40 dear batches, 1 worker, persistent": SHORT | DEAR | PERSISTS,
    "200 computed batches, no workers": LONGER | COMPUTED | NONE,
    "200 cheap batches, no workers": LONGER | CHEAP | NONE,
}
KINDS = ("stock", "safe", "tuned")


def measure(case: dict[str, Any], options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    # Each of the three comes first equally often.
    ranks = options.ranks
    every = {**case, "epochs": options.epochs, "ranks": ranks, "seed": options.seed}
    orders = [KINDS[turn % 3 :] + KINDS[: turn % 3] for turn in range(options.turns)]
    # The first fit of a process pays for what all of them need.
    cases = [{**every, "by": "stock", "epochs": 1}]
    cases += [{**every, "by": by} for order in orders for by in order]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cases.json")
        path.write_text(json.dumps(cases))
        found: list[dict[str, Any]] = run_ranks(SCRIPT, [f"--cases={path}"], ranks, folder)[0][1:]
    return [
        sorted(found[start : start + 3], key=lambda one: KINDS.index(one["by"])) for start in range(0, len(found), 3)
    ]


def ratios(turns: Sequence[Sequence[dict[str, Any]]], name: str, above: int, below: int) -> str:
    found = [turn[above][name] / turn[below][name] for turn in turns]
    return f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})"


def epochs_ratio(turns: Sequence[Sequence[dict[str, Any]]]) -> str:
    safe, tuned = (statistics.median(s for turn in turns for s in turn[kind]["epochs_s"][2:]) for kind in (1, 2))
    return f"{tuned / safe:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, help="of each fit; none by default")
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    print("| loader | stock, s | safe, s | tuned, s | tuned / safe | epoch | CPU | tuned / stock | workers | weights |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if options.only not in name:
            continue
        turns = measure(case, options)
        walls = [statistics.median(turn[kind]["wall_s"] for turn in turns) for kind in range(3)]
        print(
            f"| {name} | {' | '.join(f'{wall:.2f}' for wall in walls)} | {ratios(turns, 'wall_s', 2, 1)} |"
            f" {epochs_ratio(turns)} | {ratios(turns, 'cpu_s', 2, 1)} | {ratios(turns, 'wall_s', 2, 0)} |"
            f" {sorted({turn[2]['workers_at_end'] for turn in turns})} |"
            f" {len({tuple(fit['weights']) for turn in turns for fit in turn})} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
