"""What ``ncclsafe inspect`` says of the same faults from outside: ``python tests/programs/faults/inspected.py``.

Each training runs with Lightning's own DDPStrategy, and knows nothing of this package. Ten seconds after it has gone
wrong its processes are looked at from outside, and what is said is compared with the truth. Trainings whose ranks have
ended by then are counted apart: nothing is left to be looked at. Healthy ones have to be said to move.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER)]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import LIMIT_S, Found, began_s, run_case  # noqa: E402
from scoreboard import chosen  # noqa: E402
from scores import Score, calibration, row, score_fault  # noqa: E402
from truths import Case  # noqa: E402
from warm import Running, Warm  # noqa: E402

from lightning_ncclsafe.inspecting.inspection import inspect  # noqa: E402
from lightning_ncclsafe.inspecting.ranks import SeenProcess  # noqa: E402
from lightning_ncclsafe.report.json import report_json  # noqa: E402

AFTER_S = 10.0
"""How long after it has gone wrong a training is looked at."""
HEALTHY_AFTER_S = 4.0
"""And a healthy one after it has been started, and again as often until it ends."""
AT_ONCE = 3
SO_FAR = "So far:"
_POLL_S = 0.1

UNSEEN = {
    "diverged-log-keys": "keys that were logged",
    "exception-during-save": "an exception that was caught, and is over",
    "gc-pause": "the collector's own account",
    "mismatched-collective": "sizes and types, by the recorder",
    "network-cut": "what a transport has raised",
    "p2p-blocked": "sends and receives, by the recorder",
    "timeout-misuse": "limits, which are the guard's",
    "unmatched-p2p": "sends and receives, by the recorder",
    "unused-parameters": "parameters without a gradient",
}
"""Causes that cannot be told from outside, and what one would have to know that only the process itself does."""
WITHOUT_GUARD = {"unpresented-loader": "diverged-collectives"}
"""What goes wrong in their place where ranks present nothing to a guard."""
FOR_GUARD = "a way to announce a pause"
"""What healthy ones need that tell the guard alone why they stand still."""


class Inspector:
    """Waits for a case to go wrong, and inspects it; `__call__` is what `run_case` waits with."""

    def __init__(self, envs_from: str = "LOCAL_RANK") -> None:
        self.moved: list[bool] = []
        self.ended = False
        self.took_s: list[float] = []
        self.said: list[str] = []
        self._variable = envs_from

    def __call__(self, case: Case, folder: Path, running: list[Any]) -> tuple[Found, tuple[int, ...]]:
        places = dict(enumerate(running))
        codes: list[int] = []
        started_s, deadline_s = time.time(), time.monotonic() + LIMIT_S
        while running and time.monotonic() < deadline_s:
            began = began_s(folder)
            due_s = (min(began) + AFTER_S if began else float("inf")) if not case.is_healthy else started_s
            if case.is_healthy and time.time() - started_s < HEALTHY_AFTER_S:
                due_s = float("inf")
            if time.time() >= due_s:
                found = self._inspect(places)
                if not found["job"]["ranks"]:
                    break
                if not case.is_healthy:
                    return (found, time.time() - min(began)), tuple(codes)
                if found["findings"]:
                    return (found, None), tuple(codes)
                started_s = time.time()
            for one in [*running]:
                with suppress(TimeoutError):
                    codes.append(one.wait(_POLL_S))
                    running.remove(one)
        self.ended = not running or time.monotonic() < deadline_s
        return (None, None), tuple(codes)

    def _inspect(self, places: dict[int, Running]) -> dict[str, Any]:
        size = str(len(places))
        # Forks of a warm process: what they have been given is not in their first environment.
        seen = [
            SeenProcess(
                pid=one.pid,
                started=float(number),
                environment={"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": size, "MASTER_PORT": "1"},
            )
            for number, one in places.items()
        ]
        began_s = time.monotonic()
        (diagnosis,) = inspect([one.pid for one in seen], processes=lambda: seen, say=self.said.append).diagnoses
        self.took_s.append(time.monotonic() - began_s)
        moved = [facts.inspection is not None and bool(facts.inspection.moved) for facts in diagnosis.job.ranks]
        self.moved.append(all(moved))
        plain: dict[str, Any] = json.loads(report_json(diagnosis))
        return plain


def inspected(warm: Warm, case: Case, keep: Path | None) -> tuple[Score, Inspector]:
    inspector = Inspector()
    if case.is_healthy and case.scenario.needs == FOR_GUARD:
        return Score(case=case.name, causes=(), skipped="it stands still, and says why to the guard alone"), inspector
    causes = tuple(WITHOUT_GUARD.get(cause, cause) for cause in case.scenario.causes)
    case = replace(case, scenario=replace(case.scenario, causes=causes))
    try:
        outcome = run_case(warm, case, strategy="PatientDDPStrategy", wait=inspector)
    except TimeoutError:
        # On a host with far too much to do; the others are to be run all the same.
        return Score(case=case.name, causes=causes, skipped="its processes did not end in time"), inspector
    if keep is not None and outcome.report is not None:
        (keep / f"{case.name}.json").write_text(json.dumps(outcome.report, indent=1))
    if outcome.skipped:
        return Score(case=case.name, causes=case.scenario.causes, skipped=outcome.skipped), inspector
    if case.is_healthy:
        findings = outcome.report["findings"] if outcome.report else []
        first = findings[0] if findings else {}
        return Score(
            case=case.name,
            causes=(),
            named=first.get("rule", ""),
            confidence=first.get("confidence", ""),
            false_alarm=bool(findings),
            answer=first.get("summary", ""),
        ), inspector
    if outcome.report is None:
        why = "its ranks had ended by themselves" if inspector.ended else "it did not go wrong"
        return Score(case=case.name, causes=case.scenario.causes, skipped=why), inspector
    return score_fault(case, outcome.report, outcome.delay_s), inspector


def is_seen(score: Score) -> bool:
    """Whether one of its causes can be told from outside."""
    return not set(score.causes) <= UNSEEN.keys()


def table(scores: Iterable[Score]) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("cause", no_wrap=True)
    for name in ("cases", "ended", "cause", "ranks", "line"):
        made.add_column(name, justify="right", no_wrap=True)
    by_cause: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        if score.causes:
            by_cause[score.causes[0]].append(score)
            by_cause["~ all that can be seen from outside" if is_seen(score) else "~ all others"].append(score)
    for cause, found in sorted(by_cause.items()):
        one = row(cause, found)
        shares = (f"{count} of {of}" if of else "-" for count, of in (one.cause, one.ranks, one.line))
        made.add_row(cause, str(len(found)), str(one.skipped), *shares)
    return made


def kinds(scores: Iterable[Score]) -> tuple[int, int]:
    """Of how many causes that can be seen most trainings were told right, of how many that had any that still ran."""
    by_cause: dict[str, list[bool]] = defaultdict(list)
    for score in scores:
        if score.causes and not score.skipped and is_seen(score):
            by_cause[score.causes[0]].append(bool(score.cause_right))
    return sum(2 * sum(right) > len(right) for right in by_cause.values()), len(by_cause)


def spread(times_s: list[float]) -> str:
    """The median and the most of them, in words."""
    return f"{sorted(times_s)[len(times_s) // 2]:.1f} s (median), {max(times_s):.1f} s at most" if times_s else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores there, too")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all reports there")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, scenarios or causes")
    parser.add_argument("--each", action="store_true", help="every moment and number of ranks, not one of each")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth of them")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N, for another sample")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases that run at a time (default: %(default)s)")
    options = parser.parse_args()
    cases = [case for case in chosen(options.only, "SafeDDP") if case.scenario.needs != "recording"]
    if not options.each:
        cases = [*{case.scenario.name: case for case in cases}.values()]
    cases = cases[options.skip :: options.every]
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    console, warm, scores = Console(width=150), Warm(), []
    moved: list[bool] = []
    took_s: list[float] = []
    healthy_s: list[float] = []
    hasty = 0
    try:
        with ThreadPoolExecutor(options.at_once) as pool:
            for score, inspector in pool.map(lambda case: inspected(warm, case, options.keep), cases):
                scores.append(score)
                moved += inspector.moved if not score.causes else []
                hasty += not score.causes and any(SO_FAR in text for text in inspector.said)
                (took_s if score.causes else healthy_s).extend(inspector.took_s)
                if not score.is_right and not score.skipped:
                    told = f"named {score.named or 'nothing'} ({score.confidence}), not {' or '.join(score.causes)}"
                    console.print(f"{score.case}: {told}: {score.answer}", markup=False, highlight=False)
    finally:
        warm.close()
    console.print(table(scores))
    right, of = kinds(scores)
    console.print(f"causes that can be seen from outside, and of which most trainings were told right: {right} of {of}")
    healthy = [score for score in scores if not score.causes and not score.skipped]
    alarms = sum(bool(score.false_alarm) for score in healthy)
    console.print(f"healthy: {alarms} of {len(healthy)} alarms; said to move at {sum(moved)} of {len(moved)} looks")
    console.print(f"healthy ones of which an answer after the first seconds would have named a rank: {hasty}")
    for confidence, (right, of) in calibration(replace(score) for score in scores).items():
        console.print(f"of the answers that say {confidence}, right in cause, ranks and line: {right} of {of}")
    console.print(f"inspections of trainings that hang took {spread(took_s)}; of healthy ones {spread(healthy_s)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores], indent=2) + "\n")


if __name__ == "__main__":
    main()
