"""Lets a training go wrong at random instants, and prints how often it resumes, and to what: ``make restarts``."""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from lightning_ncclsafe.errors import STOP_CODE
from lightning_ncclsafe.report.json import PLAN_FILE, read_plan

PROGRAM = Path(__file__).with_name("restarted_rank.py")
FAULTS = (
    "killed",
    "stopped",
    "gil-held",
    "raised",
    "stalled-writer",
    "stuck-loader",
    "lost-store",
    "sigterm",
    "sigterm-agent",
)
RANKS = (2, 3, 4)
MAX_RESTARTS, REQUEUES = 3, 3
# Of a training of some seconds, all its starts included.
LIMIT_S = 240.0
# Batches of each rank in the training, by the number of ranks.
BATCHES = {2: 80, 3: 56, 4: 40}
AIM = {"share": 0.98, "steps": 1, "seconds": 15.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What goes wrong, and when.

    Attributes:
        number: Of the campaign.
        fault: What.
        ranks: On how many ranks.
        rank: On which of them.
        batch: From the beginning of which batch, of all epochs together.
        delay_s: How long after that.
    """

    number: int
    fault: str
    ranks: int
    rank: int = 0
    batch: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a case.

    Attributes:
        case: It.
        outcome: ``"resumed"``, ``"stopped"``, ``"lost"``, or ``"missed"`` where the fault came after the end.
        why: Of one that was lost or stopped.
        starts: How often the ranks were started.
        weights: A digest of those at the end.
        steps_again: Optimizer steps that were made twice.
        verdict_to_step_s: From the last plan before a start to its first step, less the time that imports took.
    """

    case: Case
    outcome: str
    why: str = ""
    starts: int = 0
    weights: str = ""
    steps_again: int = 0
    verdict_to_step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of ``events``."""

    at_s: float
    rank: int
    pid: int
    kind: str
    values: tuple[str, ...]


def cases(first: int, count: int, only: list[str], seed: int) -> Iterator[Case]:
    """All faults in turn, at instants that the seed decides, from one of them on."""
    every = _every_case(only, seed)
    return itertools.islice(every, first, first + count)


def _every_case(only: list[str], seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for number in itertools.count():
        ranks, fault = draw.choice(RANKS), (only or FAULTS)[number % len(only or FAULTS)]
        rank = draw.randrange(ranks)
        yield Case(
            number=number,
            fault=fault,
            ranks=ranks,
            # The others write nothing.
            rank=0 if fault == "stalled-writer" else rank,
            # Not in the last window, after which nothing is left to go wrong.
            batch=draw.randrange(1, BATCHES[ranks] - 6),
            delay_s=round(draw.uniform(0.0, 0.06), 4),
        )


def run(case: Case, folder: Path) -> int:
    """Starts the training until it is done or is not to be started again; its last exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "NCCLSAFE_JOB": f"case-{case.number}", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    torchrun += [f"--max-restarts={MAX_RESTARTS}", str(PROGRAM), str(folder), case.fault]
    torchrun += [str(case.rank), str(case.batch), str(case.delay_s)]
    deadline, status = time.monotonic() + LIMIT_S, 0
    with (folder / "output").open("ab") as output:
        for _ in range(REQUEUES + 1):
            job = subprocess.Popen(
                torchrun, stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
            )
            try:
                status = job.wait(max(deadline - time.monotonic(), 1.0))
                # Ranks that torchrun has left behind, as one that was killed does, may come to the end by themselves.
                left_behind(folder, deadline)
            except subprocess.TimeoutExpired:
                status = -signal.SIGKILL
            finally:
                end(folder)
            is_over = any(event.kind == "end" for event in events(folder))
            if is_over or (status == -signal.SIGKILL and time.monotonic() > deadline) or "78" in statuses(folder):
                break
    return status


def left_behind(folder: Path, deadline: float) -> None:
    while time.monotonic() < deadline and [*members(folder)]:
        time.sleep(0.2)


def members(folder: Path) -> Iterator[psutil.Process]:
    """What runs of a case: each rank that torchrun starts has a session of its own, and the folder as an argument."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if {str(PROGRAM), str(folder)} <= {*process.cmdline()} and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end(folder: Path) -> None:
    """Nothing that this case has started is left."""
    for process in members(folder):
        with suppress(psutil.Error):
            process.kill()


def events(folder: Path) -> list[Event]:
    with suppress(FileNotFoundError):
        parts = (line.split() for line in (folder / "events").read_text().splitlines())
        return [
            Event(at_s=float(at), rank=int(rank), pid=int(pid), kind=kind, values=tuple(values))
            for at, rank, pid, kind, *values in parts
        ]
    return []


def statuses(folder: Path) -> set[str]:
    """Exit statuses that torchrun has told of."""
    lines = (folder / "output").read_text(errors="replace").splitlines()
    return {line.split()[2] for line in lines if line.split()[:2] == ["exitcode", ":"]}


def result_of(case: Case, folder: Path, undisturbed: str) -> Result:
    """What came of it, by what it has left."""
    found = events(folder)
    starts = sum(event.kind == "start" for event in found) // case.ranks
    plans = sorted(
        (path.stat().st_mtime, plan)
        for path in (folder / "ncclsafe").glob(f"*/{PLAN_FILE}")
        if (plan := read_plan(path)) is not None
    )
    steps = [(event.at_s, event.pid, int(event.values[0])) for event in found if event.kind == "step"]
    made = [number for _, _, number in steps]
    again = len(made) - len(set(made))
    base = {"case": case, "starts": starts, "steps_again": again, "verdict_to_step_s": latency(found, plans, steps)}
    ends = [event for event in found if event.kind == "end"]
    if ends:
        weights = {event.values[1] for event in ends}
        if weights == {undisturbed}:
            struck = any(event.kind == "struck" for event in found)
            return Result(outcome="resumed" if struck else "missed", weights=undisturbed, **base)
        return Result(outcome="lost", why=f"other weights: {', '.join(sorted(weights))}", **base)
    if str(STOP_CODE) in statuses(folder) and plans:
        return Result(outcome="stopped", why=f"{plans[-1][1].plan.value}: {plans[-1][1].answer}", **base)
    return Result(outcome="lost", why=f"no end; {len(plans)} plans, statuses {sorted(statuses(folder))}", **base)


def latency(found: list[Event], plans: list[tuple[float, object]], steps: list[tuple[float, int, int]]) -> float | None:
    """From the first plan to the first step of the start after it, less what that start's imports have taken."""
    if not plans:
        return None
    verdict_s = plans[0][0]
    begun = [event for event in found if event.kind == "start" and event.rank == 0 and event.at_s > verdict_s]
    first = next((at for at, pid, _ in steps if begun and pid == begun[0].pid), None)
    if first is None:
        return None
    return first - verdict_s - (begun[0].at_s - float(begun[0].values[0]))


def table(results: list[Result]) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("fault", "cases", "resumed", "stopped", "lost", "repeated steps, maximum", "verdict to step, maximum"):
        made.add_column(name, justify="left" if name == "fault" else "right")
    rows: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        rows[one.case.fault].append(one)
    for name, of in {**rows, "all": results}.items():
        counts = [sum(one.outcome == outcome for one in of) for outcome in ("resumed", "stopped", "lost")]
        times = [one.verdict_to_step_s for one in of if one.verdict_to_step_s is not None]
        again = max((one.steps_again for one in of), default=0)
        struck = sum(one.outcome != "missed" for one in of)
        made.add_row(name, str(struck), *map(str, counts), str(again), f"{max(times):.1f} s" if times else "-")
    return made


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[], metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--seed", type=int, default=0, help="of the instants (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there, too")
    parser.add_argument("--add-up", nargs="+", type=Path, metavar="FILE", help="only the table of these results")
    parser.add_argument("--root-dir", type=Path, default=Path("runs/restarts"), help="default: %(default)s")
    return parser.parse_args()


def run_all(options: argparse.Namespace, console: Console) -> Iterator[Result]:
    """What comes of each case, as it is known."""
    root, undisturbed = options.root_dir.absolute(), dict[int, str]()
    for case in cases(options.first, options.faults, options.only, options.seed):
        if case.ranks not in undisturbed:
            folder = root / f"undisturbed-{case.ranks}"
            # Of one campaign in several parts, the first has it.
            if not (options.first and folder.exists()):
                run(Case(number=-case.ranks, fault="none", ranks=case.ranks), folder)
            ends = {event.values[1] for event in events(folder) if event.kind == "end"}
            if len(ends) != 1:
                raise SystemExit(f"undisturbed, {case.ranks} ranks came to {ends or 'no end'}: {folder / 'output'}")
            (undisturbed[case.ranks],) = ends
        folder = root / f"{case.number:03}-{case.fault}"
        run(case, folder)
        result = result_of(case, folder, undisturbed[case.ranks])
        where = f"rank {case.rank} of {case.ranks}, batch {case.batch} + {case.delay_s} s"
        told = f"{result.outcome} after {result.starts} starts{f': {result.why}' if result.why else ''}"
        console.print(f"{case.number:3} {case.fault}, {where}: {told}", markup=False, highlight=False, soft_wrap=True)
        yield result


def read_results(paths: list[Path]) -> list[Result]:
    plain = [one for path in paths for one in json.loads(path.read_text())]
    return [Result(**one | {"case": Case(**one["case"])}) for one in plain]


def main() -> None:
    options = parse_options()
    console = Console(width=None if sys.stdout.isatty() else 130)
    results = read_results(options.add_up or [])
    for result in () if options.add_up else run_all(options, console):
        results.append(result)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    console.print(table(results))
    struck = [one for one in results if one.outcome != "missed"]
    good = [one for one in struck if one.outcome in ("resumed", "stopped")]
    times = [one.verdict_to_step_s for one in struck if one.verdict_to_step_s is not None]
    if times:
        console.print(f"verdict to first step: median {statistics.median(times):.1f} s, longest {max(times):.1f} s")
    is_good = len(good) >= AIM["share"] * len(struck)
    is_good &= all(one.steps_again <= AIM["steps"] for one in struck)
    is_good &= all(one < AIM["seconds"] for one in times)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
