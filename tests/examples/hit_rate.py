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
from typing import IO, Any

HANGS = Path(__file__).parents[2] / "examples" / "hangs"
_MARK = "# <- "


@dataclass(frozen=True)
class Truth:
    """What is really wrong with an example.

    Attributes:
        rules: The cause; several where chance decides which of them it is.
        rank: The rank that causes it; None where all of them do.
        reason: What the summary says of it; empty where a line is at fault, for the finding then names that line.
    """

    rules: tuple[str, ...]
    rank: int | None
    reason: str = ""


TRUTHS = {
    "rank0_evaluation": Truth(("rank-zero-only-work",), 0),
    # Once in a thousand runs or so the ranks draw equally many samples, and only what is in them differs.
    "unseeded_split": Truth(("unequal-samples", "different-data"), None, "the split was probably drawn from numpy"),
    "slow_log_storage": Truth(("slow-logger",), 0),
    "loader_stall": Truth(("data-stall",), 1),
    "late_rank0": Truth(("late-at-init",), 0),
}


def errors(name: str, report: dict[str, Any]) -> list[str]:
    """What the report's first finding has wrong."""
    finding, truth = report["findings"][0], TRUTHS[name]
    ranks = [truth.rank] if truth.rank is not None else [*range(report["job"]["world_size"])]
    said, meant = (finding["summary"], truth.reason) if truth.reason else (finding["location"], marked_place(name))
    wrong = []
    if finding["rule"] not in truth.rules:
        wrong.append(f"cause {finding['rule']}")
    if finding["ranks"] != ranks:
        wrong.append(f"ranks {finding['ranks']}, not {ranks}")
    if meant not in said:
        wrong.append(f"{said!r}, not {meant}")
    return wrong


def marked_place(name: str) -> str:
    """``file:line`` of the line marked in the example."""
    script = HANGS / f"{name}.py"
    lines = script.read_text().splitlines()
    return f"{script}:{next(number for number, line in enumerate(lines, 1) if _MARK in line)} "


@contextmanager
def running(script: Path, folder: Path, *options: str, output: int | IO[str]) -> Iterator["subprocess.Popen[str]"]:
    """The script in a session of its own, of which nothing is left afterwards."""
    command = [sys.executable, str(script), "--root-dir", str(folder), *options]
    errors = subprocess.STDOUT
    process = subprocess.Popen(command, stdout=output, stderr=errors, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def first_report(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Runs the example until it has reported."""
    script = HANGS / f"{name}.py"
    with (folder / "output").open("w") as file, running(script, folder, "--suspect-after", "2", *options, output=file):
        return wait_for_report(folder)


def wait_for_report(folder: Path, *, within_s: float = 45) -> dict[str, Any]:
    """The report of the example that runs; ``delay_s`` is added: from ``suspect_after`` to the written report."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for path in folder.glob("ncclsafe/*/report.json"):
            report: dict[str, Any] = json.loads(path.read_text())
            incident = report["job"]["incident"]
            waited_s = path.stat().st_mtime - incident["opened_ns"] / 1e9 + incident["idle_s"]
            return report | {"delay_s": waited_s - incident["suspect_after_s"]}
        time.sleep(0.1)
    raise TimeoutError(f"no report within {within_s:g} s:\n{(folder / 'output').read_text()}")


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
