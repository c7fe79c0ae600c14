"""Makes small trainings go wrong in every known way, and prints how often the cause is named: ``make faults``.

Each case is judged by the first report that SafeDDP writes after it went wrong. Healthy ones, which take their time,
have to stay quiet. What is right is written in the scenarios themselves.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER)]

from catalogue import CASES  # noqa: E402
from recorded import recorded_cases, score_recording, score_report  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import LAUNCHERS, SUSPECT_AFTER_S, Outcome, run_case  # noqa: E402
from scores import (  # noqa: E402
    Row,
    Score,
    calibration,
    exit_code,
    planned,
    plans,
    row,
    rows,
    score_fault,
    score_healthy,
)
from truths import Case  # noqa: E402
from warm import Warm  # noqa: E402
from whole_programs import whole_programs  # noqa: E402

# Ranks mostly wait; more at once than this, and they wait for the machine.
AT_ONCE = 3
# Of the table in a file.
WIDTH = 130
# What was said of each training from a public thread when it was run for the first time.
FIRST_RUN = FOLDER / "first_run.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How cases are run.

    Attributes:
        strategy: The strategy's name.
        suspect_after_s: After how many seconds ranks are asked.
        on_gpu: Whether the ranks of a case share one GPU and communicate with NCCL.
        on_hosts: Whether they are spread over hosts.
        launcher: What starts them; empty if each is started by itself.
        has_defaults: Whether Trainers have what they have by default.
        reports: Where the report on each case is kept; None where none is.
    """

    strategy: str
    suspect_after_s: float
    on_gpu: bool = False
    on_hosts: bool = False
    launcher: str = ""
    has_defaults: bool = False
    reports: Path | None = None


def judged(warm: Warm, case: Case, how: Options) -> Score:
    """Runs a case and compares what was said with the truth."""
    outcome = run_case(
        warm,
        case,
        strategy=how.strategy,
        suspect_after_s=how.suspect_after_s,
        on_gpu=how.on_gpu,
        on_hosts=how.on_hosts,
        launcher=how.launcher,
        has_defaults=how.has_defaults,
    )
    if how.reports is not None:
        _keep(outcome, how.reports / case.name)
    if outcome.skipped:
        return Score(case=case.name, causes=case.scenario.causes, skipped=outcome.skipped)
    if case.is_healthy:
        return score_healthy(case, outcome.report, outcome.exit_codes, outcome.said, started=outcome.started)
    said = [line for line in outcome.output.splitlines() if "Error" in line or line.startswith("[ncclsafe]")]
    why_none = f"no report; exit codes {[*outcome.exit_codes]}; {' | '.join(said[-2:])}"
    start = planned(outcome.report) if outcome.report is not None else None
    return score_fault(case, outcome.report, outcome.delay_s, why_none, start)


def _keep(outcome: Outcome, path: Path) -> None:
    """What ranks have said, and the report if there is one, as ``NAME.log`` and ``NAME.json``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".log").write_text(outcome.output)
    if outcome.report is not None:
        path.with_suffix(".json").write_text(json.dumps(outcome.report))


def judged_anew(cases: Iterable[Case], folder: Path) -> Iterator[Score]:
    """The scores of the faults of which a report has been kept there."""
    kept = ((case, folder / f"{case.name}.json") for case in cases if not case.is_healthy)
    return (score_report(case, path) for case, path in kept if path.exists())


def scored(cases: Iterable[Case], how: Options, at_once: int) -> Iterator[Score]:
    """The scores of trainings, as they come."""
    warm = Warm()
    try:
        with ThreadPoolExecutor(at_once) as pool:
            waiting = [pool.submit(judged, warm, case, how) for case in cases]
            for one in as_completed(waiting):
                yield one.result()
    finally:
        warm.close()


def table(found: list[Row]) -> Table:
    """The scoreboard."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("cause", no_wrap=True)
    for name in ("cases", "cause", "ranks", "line", "told", "phase", "plan", "entirely", "median", "longest", "alarms"):
        made.add_column(name, justify="right", no_wrap=True)
    for one in found:
        skipped = f" + {one.skipped} skipped" if one.skipped else ""
        shares = [_of(share) for share in (one.cause, one.ranks, one.line, one.told, one.phase, one.plan, one.entirely)]
        times = [_seconds(one.median_s), _seconds(one.longest_s)]
        made.add_row(one.name, f"{one.scores}{skipped}", *shares, *times, _of(one.false_alarms, alarms=True))
    return made


def first_run() -> Row | None:
    """What was right when the trainings from public threads were run for the first time."""
    if not FIRST_RUN.exists():
        return None
    plain = [one | {"causes": tuple(one["causes"])} for one in json.loads(FIRST_RUN.read_text())]
    return row("their first run", (score for score in (Score(**one) for one in plain) if score.causes))


def _of(share: tuple[int, int], *, alarms: bool = False) -> str:
    """``"3 of 4"``, in red where it is not as it should be."""
    count, of = share
    if not of:
        return "-"
    wrong = count if alarms else of - count
    return f"[red]{count} of {of}[/red]" if wrong else f"{count} of {of}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def line_of(score: Score) -> str:
    """What was wrong with a case, in one line."""
    if score.skipped:
        return f"{score.case}: skipped: {score.skipped}"
    checks = {"ranks": score.ranks_right, "line": score.line_right, "phase": score.phase_right}
    checks[f"plan ({score.plan}, the fault is of: {score.fault_of})"] = score.plan_right
    wrong = [name for name, right in checks.items() if right is False]
    if score.false_alarm:
        told = "not quiet"
    elif score.cause_right is False:
        told = f"named {score.named or 'nothing'}, not {' or '.join(score.causes)}"
    else:
        told = f"{', '.join(wrong)} wrong"
    return f"{score.case}: {told}: {score.answer}"


def chosen(names: list[str], strategy: str, *, undeclared: bool = False, whole: bool = False) -> list[Case]:
    """Of all cases those that a name stands for: of a case, a scenario, or a cause; all if there is none.

    Args:
        names: Those names.
        strategy: The strategy's name.
        undeclared: Whether cases count that are declared for other strategies only.
        whole: Whether whole programs are chosen from, and nothing else.

    Raises:
        SystemExit: Nothing is called so.
    """
    every = whole_programs() if whole else [*CASES.values(), *recorded_cases()]
    of_strategy = [case for case in every if undeclared or strategy in case.scenario.strategies]
    found = [case for case in of_strategy if not names or not _names(case).isdisjoint(names)]
    if not found:
        raise SystemExit(f"no case, scenario or cause is called {' or '.join(names)} with {strategy}")
    return found


def _names(case: Case) -> set[str]:
    healthy = {"healthy"} if case.is_healthy else set()
    return {case.name, case.scenario.name, *case.scenario.causes, *healthy}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores there, too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, scenarios or causes")
    parser.add_argument("--from-threads", action="store_true", help="only those written after public threads")
    whole = "instead of all those, trainings that are programs of their own, as users write and start them"
    parser.add_argument("--whole-programs", action="store_true", help=whole)
    parser.add_argument("--strategy", choices=["SafeDDP", "SafeModelParallel", "SafeFSDP"], default="SafeDDP")
    undeclared = "also those that are declared for other strategies only, where some have another truth"
    parser.add_argument("--undeclared", action="store_true", help=undeclared)
    parser.add_argument("--suspect-after", type=float, default=SUSPECT_AFTER_S, help="seconds (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="ranks share one GPU and communicate with NCCL")
    parser.add_argument("--hosts", action="store_true", help="ranks are spread over hosts (as root, in namespaces)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="", help="what starts all ranks of a training")
    defaults = "Trainers have a logger, checkpoints, a progress bar and a sanity check"
    parser.add_argument("--trainer-defaults", action="store_true", help=defaults)
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep each case's report and output there")
    again = "run nothing: judge the reports anew that --reports has kept there, of those faults that have one"
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help=again)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases that run at a time (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="how often each training is run (default: 1)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    cases = chosen(options.only, options.strategy, undeclared=options.undeclared, whole=options.whole_programs)
    if options.from_threads:
        cases = [case for case in cases if case.scenario.source]
    recorded = [case for case in cases if case.scenario.needs == "recording"]
    trainings = [case for case in cases if case not in recorded for _ in range(options.repeat)]
    scores = []
    how = Options(
        strategy=options.strategy,
        suspect_after_s=options.suspect_after,
        on_gpu=options.gpu,
        on_hosts=options.hosts,
        launcher=options.launcher,
        has_defaults=options.trainer_defaults,
        reports=options.reports,
    )
    run = chain(map(score_recording, recorded), scored(trainings, how, options.at_once))
    for score in run if options.judge is None else judged_anew(cases, options.judge):
        scores.append(score)
        if not score.is_right:
            console.print(line_of(score), markup=False, highlight=False, soft_wrap=True)
    scores.sort(key=lambda score: score.case)
    told = rows(scores)
    if any(score.is_unrehearsed for score in scores) and (first := first_run()):
        told.insert(-1, first)
    console.print(table(told))
    for confidence, share in calibration(scores).items():
        console.print(f"of the answers that say {confidence}, right in cause, ranks and line: {_of(share)}")
    for side, counted in plans(scores).items():
        told = ", ".join(f"{count} {plan}" for plan, count in counted.most_common()) or "none"
        console.print(f"plans for faults of {side}: {told}", highlight=False)
    if options.json:
        plain = {"rows": [asdict(one) for one in rows(scores)], "scores": [asdict(one) for one in scores]}
        options.json.write_text(json.dumps(plain, indent=2) + "\n")
    raise SystemExit(exit_code(scores))


if __name__ == "__main__":
    main()
