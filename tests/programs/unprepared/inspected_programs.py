"""What ``ncclsafe inspect`` says of trainings without today's Lightning: ``python inspected_programs.py``.

Each hang runs in a loop by hand, with Accelerate, and with Lightning 1.9.5, on three ranks; ten seconds after it has
gone wrong the command is run on its processes, and what it says is compared with the truth. Pythons that have
Accelerate or the old Lightning are named with ``--python accelerated=PATH old_lightning=PATH``; others are not run.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "faults"), str(FOLDER.parents[1]), str(FOLDER.parent / "benchmarks")]

from hangs import HANGS, Hang  # noqa: E402
from scores import Score, calibration, row  # noqa: E402
from started_ranks import free_port  # noqa: E402

FRAMEWORKS = ("plain", "accelerated", "old_lightning")
RANKS = 3
AFTER_S, START_S, ANSWER_S = 10.0, 180.0, 120.0
MARK = "# <- "


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one.

    Attributes:
        score: How it was judged, beside the truth.
        took_s: Until the command ended.
        moved: Whether it said that the job makes progress.
    """

    score: Score
    took_s: float = 0.0
    moved: bool = False


def place_of(hang: type[Hang]) -> str:
    """``"FILE:LINE "`` of the marked line; empty where none is to blame."""
    if not hang.has_line:
        return ""
    file = inspect.getfile(hang)
    lines, first = inspect.getsourcelines(hang)
    found = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(f"{MARK}here")]
    if not found:
        every = enumerate(Path(file).read_text().splitlines(), 1)
        found = [number for number, line in every if line.endswith(f"{MARK}{hang.__name__}")]
    (line,) = found
    return f"{file}:{line} "


def run(framework: str, hang: type[Hang], python: str, keep: Path | None) -> Answer:
    name = f"{framework}-{hang.__name__}"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as made, Path(made, "output").open("w+") as output:
        processes = []
        try:
            for rank in range(RANKS):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
                command = [python, str(FOLDER / f"{framework}.py"), hang.__name__, made]
                env = os.environ | shared | numbers
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output, cwd=FOLDER))
            deadline_s = time.monotonic() + START_S
            while not (begun := [*Path(made).glob("began-*")]) and time.monotonic() < deadline_s:
                time.sleep(0.1)
            if begun:
                time.sleep(AFTER_S)
            if not begun or not any(one.poll() is None for one in processes):
                output.seek(0)
                why = "its ranks had ended by themselves" if begun else "it did not go wrong"
                print(f"{name}: {why}: {output.read()[-800:]}")
                return Answer(score=Score(case=name, causes=hang.causes, skipped=why))
            alive = [one.pid for one in processes if one.poll() is None]
            # Of one that has ended nobody knows the number; then the command finds those that are left by itself.
            pids = alive if len(alive) == RANKS else []
            return _inspected(name, hang, pids, f":{shared['MASTER_PORT']}", keep)
        finally:
            for one in processes:
                with suppress(OSError):
                    one.kill()
                one.wait()


def _inspected(name: str, hang: type[Hang], pids: list[int], job: str, keep: Path | None) -> Answer:
    named = ["--pid", *map(str, pids)] if pids else []
    command = [sys.executable, "-m", "lightning_ncclsafe", "inspect", "--format", "json", *named]
    began_s = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=False, env=environment, cwd=ROOT)
    took_s = time.monotonic() - began_s
    (report,) = (one for one in _documents(done.stdout.decode()) if job in one["job"]["launch"])
    if keep is not None:
        (keep / f"{name}.json").write_text(json.dumps(report, indent=1))
    first: dict[str, Any] = next(iter(report["findings"]), {})
    moved = all((one["inspection"] or {}).get("moved") for one in report["job"]["ranks"])
    shared = {
        "case": name,
        "causes": hang.causes,
        "named": first.get("rule", ""),
        "confidence": first.get("confidence", ""),
        "answer": first.get("summary", ""),
    }
    if not hang.causes:
        return Answer(score=Score(**shared, false_alarm=bool(report["findings"])), took_s=took_s, moved=moved)
    place = place_of(hang)
    score = Score(
        **shared,
        cause_right=first.get("rule") in hang.causes,
        ranks_right=first.get("ranks") == [*hang.ranks],
        line_right=first.get("location", "").startswith(place) and bool(first) if place else None,
    )
    return Answer(score=score, took_s=took_s, moved=moved)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """One of each job of this host."""
    while text := text.strip():
        one, end = json.JSONDecoder().raw_decode(text)
        yield one
        text = text[end:]


def _words(answer: Answer) -> str:
    score = answer.score
    if not score.causes:
        return f"{score.case}: {'moves' if answer.moved else 'STANDS'}, {score.named or 'nothing found'}"
    wrong = [name for name in ("cause", "ranks", "line") if getattr(score, f"{name}_right") is False]
    told = f"{score.named or 'nothing'} ({score.confidence or '-'}), {answer.took_s:.1f} s"
    return f"{score.case}: {told}{f', WRONG: {chr(44).join(wrong)}: {score.answer}' if wrong else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[], metavar="FRAMEWORK=PATH", help="what runs a framework")
    parser.add_argument("--only", nargs="+", default=[*HANGS], metavar="HANG", help="these hangs")
    parser.add_argument("--at-once", type=int, default=2, help="how many run at a time (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all reports there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores there")
    options = parser.parse_args()
    pythons = {"plain": sys.executable} | dict(one.split("=", 1) for one in options.python)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    chosen = [*product((one for one in FRAMEWORKS if one in pythons), (HANGS[name] for name in options.only))]
    answers: list[Answer] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for answer in pool.map(lambda one: run(one[0], one[1], pythons[one[0]], options.keep), chosen):
            answers.append(answer)
            print(_words(answer), flush=True)
    _print_sums([one.score for one in answers])
    took_s = sorted(one.took_s for one in answers if one.score.causes and not one.score.skipped)
    print(f"answers took {took_s[len(took_s) // 2]:.1f} s (median), {took_s[-1]:.1f} s at most" if took_s else "")
    if options.json:
        options.json.write_text(json.dumps([asdict(one.score) for one in answers], indent=1) + "\n")


def _print_sums(scores: Iterable[Score]) -> None:
    by_framework: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        if score.causes:
            by_framework[score.case.partition("-")[0]].append(score)
            by_framework["all"].append(score)
    for name, found in by_framework.items():
        one = row(name, found)
        print(f"{name}: cause {one.cause}, ranks {one.ranks}, line {one.line}, all three {one.entirely}")
    for confidence, (right, of) in calibration(by_framework["all"]).items():
        print(f"of the answers that say {confidence}, right in cause, ranks and line: {right} of {of}")


if __name__ == "__main__":
    main()
