"""Whether anything grows in a long run: trains for as long as one says, and looks at the processes from outside.

Two ranks train a small model with everything on: ``SafeDDP()``, ``safe_callbacks()`` with TensorBoard, validation
twice an epoch, checkpoints. Each minute prints the medians of that minute: resident memory of each rank, threads, open
files and children of all ranks, keys on the job's store, bytes of our own files on disk. The first five minutes are
for filling what is bounded. From then on every quantity has to be flat: the last quarter of the time has no more than
the first, within 1 %, or for bytes 5 MB, or one thing. If one has, the exit code is 1, and how fast it grew is said.

python tests/programs/benchmarks/soak.py --minutes 60
python tests/programs/benchmarks/soak.py --minutes 60 --step-ms 40
python tests/programs/benchmarks/soak.py --minutes 15 --with stock
python tests/programs/benchmarks/soak.py --judge samples.json
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from started_ranks import all_have_measured, started_ranks

SOAK_RANK = Path(__file__).with_name("soak_rank.py")
KINDS = ("stock", "safe", "all")
SAMPLE_EVERY_S = 5.0
SETTLED_AFTER_S = 300.0
FLAT_SHARE = 0.01
FLAT_BYTES = 5e6
# One that is there at one time and not at another.
FLAT_COUNT = 1
MB = 1e6
# What is counted in bytes; everything else is a number of things.
IN_BYTES = ("memory", "disk")

Sample = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one quantity did once the run had settled.

    Attributes:
        name: Which.
        first: Median of the first quarter of the minutes.
        last: Median of the last quarter.
        most: The highest minute.
        per_hour: Slope of a line through all of them.
    """

    name: str
    first: float
    last: float
    most: float
    per_hour: float

    @property
    def is_flat(self) -> bool:
        least = FLAT_BYTES if self.name.startswith(IN_BYTES) else FLAT_COUNT
        return self.last - self.first <= max(FLAT_SHARE * self.first, least)


def minutes_of(samples: Sequence[Sample]) -> list[Sample]:
    """The medians of each whole minute, by quantity."""
    by_minute: dict[int, list[Sample]] = {}
    for sample in samples:
        by_minute.setdefault(int(sample["s"] // 60), []).append(sample)
    # The last is not whole: the ranks end in it.
    return [
        {name: statistics.median(sample[name] for sample in of_one) for name in of_one[0]}
        for of_one in [*by_minute.values()][:-1]
    ]


def growths(minutes: Sequence[Sample]) -> list[Growth]:
    """What each quantity did after the first five minutes; nothing of a run that was not longer."""
    settled = [minute for minute in minutes if minute["s"] >= SETTLED_AFTER_S]
    if len(settled) < 2:
        return []
    hours = [minute["s"] / 3600 for minute in settled]
    found = []
    for name in settled[0].keys() - {"s", "steps"}:
        values = [minute[name] for minute in settled]
        slope, _ = statistics.linear_regression(hours, values)
        quarter = max(len(values) // 4, 1)
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        found.append(Growth(name=name, first=first, last=last, most=max(values), per_hour=slope))
    return sorted(found, key=lambda growth: growth.name)


def words(name: str, value: float) -> str:
    return f"{value / MB:,.1f} MB" if name.startswith(IN_BYTES) else f"{value:,.0f}"


def verdict(found: Sequence[Growth]) -> list[str]:
    """One line for each quantity that grew; or one that says how flat all of them were."""
    if not found:
        return ["too short to tell: there has to be more than a minute after the first five"]
    return [
        f"{growth.name} grew from {words(growth.name, growth.first)} to {words(growth.name, growth.last)}, by "
        f"{words(growth.name, growth.per_hour)} an hour"
        for growth in found
        if not growth.is_flat
    ]


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder; they come and go meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.lstat().st_size if path.is_file() else 0
    return found


def sample(processes: Sequence[psutil.Process], folder: Path, began_s: float) -> Sample | None:
    """What there is now; None before the first steps, and once a rank has ended."""
    with suppress(FileNotFoundError, psutil.Error):
        steps, keys = map(int, (folder / "told").read_text().split())
        return {
            "s": time.monotonic() - began_s,
            "steps": steps,
            **{f"memory of rank {rank}": process.memory_info().rss for rank, process in enumerate(processes)},
            "threads": sum(process.num_threads() for process in processes),
            "open files": sum(process.num_fds() for process in processes),
            "children": sum(len(process.children(recursive=True)) for process in processes),
            "keys on the store": keys,
            "disk": size_of(folder / "own"),
        }
    return None


def soak(options: argparse.Namespace) -> list[Sample]:
    """Trains; prints a line each minute, and returns all samples."""
    ranks = options.ranks
    passed = ("kind", "minutes", "epoch_steps", "step_ms", "ranks")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in passed]
    with tempfile.TemporaryDirectory(prefix="ncclsafe-soak-") as made:
        folder = Path(made)
        results = [folder / f"rank{rank}.json" for rank in range(ranks)]

        def of_rank(rank: int) -> list[str]:
            return [str(SOAK_RANK), *arguments, f"--result={results[rank]}"]

        with (folder / "output.txt").open("w+") as output, started_ranks(ranks, of_rank, output=output) as started:
            samples = watch([psutil.Process(process.pid) for process in started], started, folder, options.json)
            if not all_have_measured(started, results):
                output.seek(0)
                raise SystemExit(f"A rank has failed. What the ranks have printed:\n{output.read()}")
    return samples


def watch(
    processes: Sequence[psutil.Process],
    started: Sequence["subprocess.Popen[bytes]"],
    folder: Path,
    json_file: Path | None,
) -> list[Sample]:
    samples: list[Sample] = []
    began_s = 0.0
    while all(process.poll() is None for process in started):
        time.sleep(SAMPLE_EVERY_S)
        began_s = began_s or (time.monotonic() if (folder / "told").exists() else 0.0)
        found = sample(processes, folder, began_s) if began_s else None
        if found is None:
            continue
        is_new_minute = bool(samples) and found["s"] // 60 > samples[-1]["s"] // 60
        samples.append(found)
        if is_new_minute:
            show(minutes_of(samples)[-1])
            if json_file is not None:
                json_file.write_text(json.dumps(samples))
    return samples


def show(minute: Sample) -> None:
    parts = [words(name, value).rjust(9) for name, value in minute.items() if name != "s"]
    print(f"{minute['s'] / 60:6.1f} min", *parts, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--with", dest="kind", choices=KINDS, default="all", help="stock, SafeDDP() alone, or all")
    parser.add_argument("--epoch-steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=0.0, help="the least that a step takes, for a steady rate")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where all samples are written, each minute")
    parser.add_argument("--judge", type=Path, help="judges the samples of an earlier run in place of a new one")
    options = parser.parse_args()
    # So that the ranks end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.judge is not None:
        samples = json.loads(options.judge.read_text())
        for minute in minutes_of(samples):
            show(minute)
    else:
        columns = "time, steps, memory of each rank, threads, open files, children, keys on the store, disk"
        print("columns:", columns, flush=True)
        samples = soak(options)
    found = growths(minutes_of(samples))
    grown = verdict(found)
    for growth in found:
        first, last, most = (words(growth.name, value) for value in (growth.first, growth.last, growth.most))
        print(f"{growth.name}: {first} after 5 minutes, {last} at the end, {most} at most")
    print("\n".join(grown) or "flat")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
