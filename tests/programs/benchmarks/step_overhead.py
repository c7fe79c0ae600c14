"""What our strategies cost next to Lightning's own while nothing is wrong: time per step, and memory.

Both train the same small model in the same processes, in turns: stock, safe, safe, stock make one block, so that
what the machine does at the side hits both alike, and a steady drift cancels out. A block gives one ratio of median
step times and one of mean step times. The mean is the honest one: it has the watchdog's polls in it, four a second,
which a median never sees. The mean CPU time, of all threads of a rank, has them as well, and next to nothing of what
the machine does at the side: where the interval of the others is too wide to tell, look there. For memory each
strategy has processes of its own.

python tests/programs/benchmarks/step_overhead.py
python tests/programs/benchmarks/step_overhead.py --blocks 60 --json
python tests/programs/benchmarks/step_overhead.py --data stream --batch-size 8192
python tests/programs/benchmarks/step_overhead.py --guarded timer --steps 600 --blocks 20
python tests/programs/benchmarks/step_overhead.py --guarded recommended --steps 600 --blocks 20
python tests/programs/benchmarks/step_overhead.py --guarded saved --steps 600 --blocks 20
python tests/programs/benchmarks/step_overhead.py --guarded timer-broadcast --steps 600 --blocks 20
python tests/programs/benchmarks/step_overhead.py --strategy model-parallel --guarded safe-broadcast
"""

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from started_ranks import run_ranks

ONE_RANK = Path(__file__).with_name("one_rank.py")
# What stands for "safe" may be SafeDDP with more, or less: see GUARDED.
BLOCK = ("stock", "safe", "safe", "stock")
# What may be compared with stock, and how much of its step time that may take with data of known length.
GUARDED = {
    "safe": 0.90,
    "saved": 0.91,
    "timer": 0.90,
    "recommended": 0.91,
    "safe-broadcast": 1.01,
    "timer-broadcast": 1.01,
}
# The steps of these have more collectives, of which the broadcast is a smaller part.
SHARDED = {"safe": 0.95, "timer": 0.95, "recommended": 0.96, "safe-broadcast": 1.01, "timer-broadcast": 1.01}
STRATEGIES = {"ddp": "DDPStrategy", "fsdp": "FSDPStrategy", "model-parallel": "ModelParallelStrategy"}
# Of every training: caches fill, and the group's connections wake up.
WARM_UP_STEPS = 20
MEMORY_LAUNCHES = 3
MEMORY_LIMIT_MB = 30.0

Trainings = Sequence[Sequence[float]]  # step times of each training, in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Step time of safe over stock: the median over all blocks, and the interval that has it with 95 %."""

    ratio: float
    low: float
    high: float
    stock_ms: float
    safe_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one training is: its steps, its ranks, the kind and the size of its batches."""

    steps: int
    ranks: int
    data: str
    batch_size: int
    guarded: str = "safe"
    strategy: str = "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    training: Training
    blocks: int
    median: Ratio
    mean: Ratio
    cpu: Ratio
    memory_mb: tuple[float, ...]
    """Peak memory of safe minus stock, for each rank."""


def compare(trainings: Trainings, summary: Callable[[Sequence[float]], float]) -> Ratio:
    """Compares the trainings of all blocks, each of which ``summary`` makes one number of."""
    times = [summary(steps[WARM_UP_STEPS:]) for steps in trainings]
    blocks = list(zip(*[iter(times)] * len(BLOCK), strict=True))
    stock = [(block[0] + block[3]) / 2 for block in blocks]
    safe = [(block[1] + block[2]) / 2 for block in blocks]
    ratios = [b / a for a, b in zip(stock, safe, strict=True)]
    low, high = bootstrap(ratios)
    return Ratio(
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        stock_ms=statistics.median(stock),
        safe_ms=statistics.median(safe),
    )


def bootstrap(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """Where the median of such values lies with 95 %."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]


def launch(strategies: Sequence[str], training: Training) -> list[dict[str, Any]]:
    """Runs the trainings on all ranks; what each rank has written down."""
    names = [training.guarded if name == "safe" else name for name in strategies]
    arguments = [*names, f"--steps={training.steps + WARM_UP_STEPS}", f"--data={training.data}"]
    arguments.append(f"--strategy={training.strategy}")
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(ONE_RANK, [*arguments, f"--batch-size={training.batch_size}"], training.ranks, folder)


def added_memory_mb(training: Training) -> tuple[float, ...]:
    """Peak memory of safe minus stock for each rank; the median of some launches, which differ by a megabyte or two."""
    peaks: dict[str, list[list[float]]] = {"stock": [], "safe": []}
    for _ in range(MEMORY_LAUNCHES):
        for name, found in peaks.items():
            found.append([rank["peak_mb"] for rank in launch([name], training)])
    stock, safe = ([statistics.median(rank) for rank in zip(*found, strict=True)] for found in peaks.values())
    return tuple(b - a for a, b in zip(stock, safe, strict=True))


def measure(training: Training, blocks: int) -> Result:
    # The first block warms up the processes and is left out. The ranks go in step, the first one speaks for all.
    first_rank, *_ = launch(BLOCK * (1 + blocks), training)
    trainings = first_rank["steps_ms"][len(BLOCK) :]
    wall, cpu = ([training[clock] for training in trainings] for clock in ("wall", "cpu"))
    return Result(
        training=training,
        blocks=blocks,
        median=compare(wall, statistics.median),
        mean=compare(wall, statistics.fmean),
        cpu=compare(cpu, statistics.fmean),
        memory_mb=added_memory_mb(training),
    )


def limit(training: Training, ratio: Ratio) -> float:
    """Where ranks vote before each batch, a step of a few milliseconds may take somewhat longer."""
    if training.data == "stream":
        return 1.05 if ratio.stock_ms < 10 else 1.01
    return (GUARDED if training.strategy == "ddp" else SHARDED)[training.guarded]


def show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", STRATEGIES[result.training.strategy], result.training.guarded, "ratio", "95 %", "allowed")
    for name, ratio in (("median step", result.median), ("mean step", result.mean), ("mean CPU time", result.cpu)):
        interval = f"{ratio.low:.3f}-{ratio.high:.3f}"
        times = f"{ratio.stock_ms:.3f} ms", f"{ratio.safe_ms:.3f} ms"
        table.add_row(name, *times, f"{ratio.ratio:.3f}", interval, f"{limit(result.training, ratio):g}")
    memory = ", ".join(f"{added:+.1f}" for added in result.memory_mb)
    table.add_row("peak memory", "", f"{memory} MB", "", "", f"+{MEMORY_LIMIT_MB:g} MB")
    training = result.training
    table.caption = (
        f"{training.ranks} ranks, {result.blocks} blocks of {len(BLOCK)} trainings of {training.steps} steps, data: "
        f"{training.data}"
    )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps of one training, about 0.5 s")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of four trainings")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--data", choices=["known", "stream"], default="known", help="stream: of unknown length, so that ranks vote"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="16: a step of about 3 ms; 8192: about 20 ms")
    parser.add_argument("--guarded", choices=GUARDED, default="safe", help="with callbacks, with the broadcast")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp", help="fsdp on CPUs: with checks left out")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args()
    training = Training(
        steps=options.steps,
        ranks=options.ranks,
        data=options.data,
        batch_size=options.batch_size,
        guarded=options.guarded,
        strategy=options.strategy,
    )
    result = measure(training, options.blocks)
    if options.json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        show(result)


if __name__ == "__main__":
    main()
