"""How often the five example hangs are named right: ``python tests/examples/hit_rate.py --runs 20``."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANGS = Path(__file__).parents[2] / "examples" / "hangs"
_MARK = "# <- "


@dataclass(frozen=True)
class Truth:
    """What is really wrong with an example.

    Attributes:
        rule: The cause.
        rank: The rank that causes it; None where it differs from run to run.
    """

    rule: str
    rank: int | None


TRUTHS = {
    "rank0_evaluation": Truth("rank-zero-only-work", 0),
    "unseeded_split": Truth("uneven-batches", None),
    "slow_log_storage": Truth("slow-logger", 0),
    "loader_stall": Truth("data-stall", 1),
    "late_rank0": Truth("late-at-init", 0),
}


def errors(name: str, report: dict[str, Any]) -> list[str]:
    """What the report's first finding has wrong."""
    finding, truth = report["findings"][0], TRUTHS[name]
    ranks = [truth.rank] if truth.rank is not None else short_ranks(report)
    place = marked_place(name)
    wrong = []
    if finding["rule"] != truth.rule:
        wrong.append(f"cause {finding['rule']}")
    if finding["ranks"] != ranks:
        wrong.append(f"ranks {finding['ranks']}, not {ranks}")
    if place not in finding["location"]:
        wrong.append(f"location {finding['location']!r}, not {place}")
    return wrong


def short_ranks(report: dict[str, Any]) -> list[int]:
    """The ranks that came to the end of their data first, by their own counts."""
    ranks = report["job"]["ranks"]
    reached = {facts["rank"]: (facts["progress"]["epoch"], facts["loaders"][0]["batches"]) for facts in ranks}
    ahead = max(epoch for epoch, _ in reached.values())
    if any(epoch < ahead for epoch, _ in reached.values()):
        return [rank for rank, (epoch, _) in reached.items() if epoch == ahead]
    fewest = min(batches for _, batches in reached.values())
    return [rank for rank, (_, batches) in reached.items() if batches == fewest]


def marked_place(name: str) -> str:
    """``file:line`` of the line marked in the example; of the call of ``fit`` where no single line hangs."""
    script = HANGS / f"{name}.py"
    marked = [number for number, line in enumerate(script.read_text().splitlines(), 1) if _MARK in line]
    if marked:
        return f"{script}:{marked[0]} "
    training = HANGS.parent / "digits.py"
    lines = training.read_text().splitlines()
    return f"{training}:{next(number for number, line in enumerate(lines, 1) if 'trainer.fit(' in line)} "


@contextmanager
def running(name: str, folder: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """The example in a session of its own, of which nothing is left afterwards."""
    command = [sys.executable, str(HANGS / f"{name}.py"), "--root-dir", str(folder), *options]
    output = subprocess.STDOUT
    with (folder / "output").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=output, text=True, start_new_session=True)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_report(name: str, folder: Path, *options: str, within_s: float = 45) -> dict[str, Any]:
    """Runs the example until it has reported; ``delay_s`` is added: from ``suspect_after`` to the written report."""
    with running(name, folder, "--suspect-after", "2", *options):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for path in folder.glob("ncclsafe/*/report.json"):
                report: dict[str, Any] = json.loads(path.read_text())
                incident = report["job"]["incident"]
                waited_s = path.stat().st_mtime - incident["opened_ns"] / 1e9 + incident["idle_s"]
                return report | {"delay_s": waited_s - incident["suspect_after_s"]}
            time.sleep(0.1)
    raise TimeoutError(f"{name} has not reported within {within_s:g} s:\n{(folder / 'output').read_text()}")


def main() -> None:
    """Runs every example as often as asked, and prints what was wrong and how often nothing was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("names", nargs="*", default=[*TRUTHS])
    options = parser.parse_args()
    for name in options.names:
        right, delays_s = 0, [0.0]
        for run in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    report = first_report(name, Path(folder), "--devices", str(options.devices))
                    delays_s.append(report["delay_s"])
                    wrong = errors(name, report)
                except (TimeoutError, IndexError) as error:
                    wrong = [repr(error)]
            right += not wrong
            if wrong:
                print(f"{name}, run {run}: {'; '.join(wrong)}", flush=True)
        print(f"{name}: {right} of {options.runs} right, reported at most {max(delays_s):.2f} s late", flush=True)


if __name__ == "__main__":
    main()
