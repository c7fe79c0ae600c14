"""Trains published projects that build on Lightning with stock DDP and with ours, and says what is different.

``make clients``. Each project has an environment of its own, in an ignored folder, and trains a small model on data
that is made here, on two ranks. Stock and ours have to come to the same, to the last bit.
"""

import argparse
import ast
import csv
import json
import math
import os
import shutil
import statistics
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER)]

from environments import installed  # noqa: E402
from train import STRATEGIES, TIMED, VARIANTS  # noqa: E402
from warm import Warm, environment, ranks_of  # noqa: E402

RUNS = FOLDER.parents[2] / "runs" / "clients"
CLIENTS = sorted(path.stem.removeprefix("client_") for path in FOLDER.glob("client_*.py"))
LIMIT_S = 240
# What is noted, but not compared.
NOTED = ("steps_s", "fit_s", "guarded")
# What CollectiveTimer logs beside the metrics of the client.
OWN_METRICS = ("collectives/", "straggler/")
# Variants in which one process is started, which starts the others.
LAUNCHED = ("script", "spawn")
# Where ranks stop is not the same in two runs of stock either.
ENDED = ("sigint", "sigterm", "raises_on_one", "raises_on_all")
STOCK, *OURS = STRATEGIES


@dataclass(frozen=True)
class Outcome:
    """What came of one training.

    Attributes:
        codes: Exit codes, one for each process that was started here; None where it had to be killed.
        found: What each rank has noted; None where it has not come to that.
        logged: The points in the logger's file.
        checkpoints: Of each file the sizes and checksums of its tensors.
        incidents: The folders of reports.
        lines: How many were printed.
        is_port_taken: Whether the ranks could not meet at the port that they were given.
    """

    codes: list[int | None]
    found: list[dict[str, Any] | None]
    logged: list[str]
    checkpoints: dict[str, list[str]]
    incidents: list[str]
    lines: int
    is_port_taken: bool = False

    @property
    def fit_s(self) -> float | None:
        """How long the last fit took on rank 0, if it has come to its end."""
        fits = (self.found[0] or {}).get("fits")
        return fits[-1]["fit_s"] if fits else None


@dataclass
class Compared:
    """A client in a variant: how ours differ from stock.

    Attributes:
        differences: For each strategy of ours; empty where all is equal.
        lines: For each strategy, how many were printed.
    """

    client: str
    variant: str
    why_not: str = ""
    differences: dict[str, list[str]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    codes: dict[str, list[int | None]] = field(default_factory=dict)
    fit_s: dict[str, float | None] = field(default_factory=dict)


def said_of(client: str) -> dict[str, Any]:
    """The constants of its module, which only its environment can import."""
    tree = ast.parse((FOLDER / f"client_{client}.py").read_text())
    said: dict[str, Any] = {}
    for line in tree.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(target, ast.Name) and isinstance(line, ast.Assign | ast.AnnAssign) and line.value:
            try:
                said[target.id] = ast.literal_eval(line.value)
            except ValueError:
                continue
    return said


def trained(warm: Warm, client: str, strategy: str, variant: str, attempt: int = 0) -> Outcome:
    """Trains, in processes of its own; once more where another program has taken their port before they did."""
    outcome = _trained(warm, client, strategy, variant, attempt)
    return _trained(warm, client, strategy, variant, attempt) if outcome.is_port_taken else outcome


def _trained(warm: Warm, client: str, strategy: str, variant: str, attempt: int) -> Outcome:
    folder = RUNS / client / f"{variant}-{attempt}" / strategy
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Where checkpoints and logs say where they are, they say the same.
    same = folder.parent / "here"
    same.unlink(missing_ok=True)
    same.symlink_to(folder.name)
    argv = [str(FOLDER / "train.py"), client, strategy, variant, str(same)]
    ranks = 1 if variant == "one_device" else 2
    envs = [{}] if variant in LAUNCHED else ranks_of(ranks)
    if strategy == "run":
        envs = [env | {"NCCLSAFE": "1"} for env in envs]
    output = folder / "output.txt"
    with output.open("wb") as file:
        running = [warm.start(argv, output=file.fileno(), cwd=folder, env=environment() | env) for env in envs]
        codes: list[int | None] = []
        for program in running:
            try:
                codes.append(program.wait(LIMIT_S))
            except TimeoutError:
                codes.append(None)
        for program in running:
            program.end_session()
    text = output.read_text(errors="replace")
    notes = [folder / f"found-{rank}.json" for rank in range(ranks)]
    return Outcome(
        codes=codes,
        found=[json.loads(note.read_text()) if note.exists() else None for note in notes],
        logged=[point for path in sorted(folder.rglob("metrics.csv")) for point in points(path)],
        checkpoints={str(path.relative_to(folder)): contents(path) for path in sorted(folder.rglob("*.ckpt"))},
        incidents=sorted(path.name for path in folder.rglob("ncclsafe/*incident*")),
        lines=len(text.splitlines()),
        is_port_taken="EADDRINUSE" in text,
    )


def points(file: Path) -> list[str]:
    """What a CSVLogger has written, without what this package adds."""
    told = []
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            named = {name: value for name, value in row.items() if value and not name.startswith(OWN_METRICS)}
            if named.keys() - {"epoch", "step"}:
                told.append(str(sorted(named.items())))
    return told


def contents(checkpoint: Path) -> list[str]:
    """What tensors a checkpoint has; the order in which they were written does not count."""
    with zipfile.ZipFile(checkpoint) as archive:
        return sorted(f"{one.file_size} {one.CRC}" for one in archive.infolist() if "/data/" in one.filename)


def differences(stock: Outcome, ours: Outcome, variant: str) -> list[str]:
    """What is not the same, in words."""
    told = []
    if stock.codes != ours.codes:
        told.append(f"exit codes {ours.codes}, not {stock.codes}")
    if variant in ENDED:
        return told
    for rank, (its, our) in enumerate(zip(stock.found, ours.found, strict=True)):
        told += [f"{what} rank {rank}" for what in _unequal(its or {}, our or {})]
    if stock.logged != ours.logged:
        told.append("logged points")
    if stock.checkpoints != ours.checkpoints:
        same = stock.checkpoints.keys() == ours.checkpoints.keys()
        names = f"checkpoints {[*ours.checkpoints]}, not {[*stock.checkpoints]}"
        told.append("what is in checkpoints" if same else names)
    if ours.incidents:
        told.append(f"reported {', '.join(ours.incidents)}")
    return told


def unguarded(ours: Outcome) -> list[str]:
    """Ranks that were to be guarded, and were not, in words."""
    ranks = [
        rank for rank, our in enumerate(ours.found) if not all(fit["guarded"] for fit in (our or {}).get("fits", []))
    ]
    return [f"no guard on rank {rank}" for rank in ranks]


def _unequal(stock: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    if stock.get("raised") != ours.get("raised"):
        yield f"raised {ours.get('raised')}, not {stock.get('raised')}:"
        return
    fits = [note.get("fits", []) for note in (stock, ours)]
    if len(fits[0]) != len(fits[1]):
        yield f"{len(fits[1])} fits came to their end, not {len(fits[0])}:"
        return
    for its, our in zip(*fits, strict=True):
        unequal = sorted(name for name in its if its[name] != our[name] and name not in NOTED)
        if unequal:
            yield f"{', '.join(unequal)} of {its['part'] + ' of' if its.get('part') else ''}".strip()


def compared(warm: Warm, client: str, variant: str) -> Compared:
    """Stock twice, as what differs between two runs of stock is nobody's fault, and ours."""
    result = Compared(client, variant)
    said = said_of(client)
    if variant == "resume" and not said.get("RESUMES", True):
        result.why_not = "has no way to resume"
        return result
    outcomes = {strategy: trained(warm, client, strategy, variant) for strategy in STRATEGIES}
    stock = outcomes[STOCK]
    result.codes = {strategy: one.codes for strategy, one in outcomes.items()}
    result.fit_s = {strategy: one.fit_s for strategy, one in outcomes.items()}
    result.lines = {strategy: one.lines for strategy, one in outcomes.items()}
    result.differences = {
        strategy: differences(stock, outcomes[strategy], variant) + unguarded(outcomes[strategy]) for strategy in OURS
    }
    if any(result.differences.values()) and variant not in ENDED:
        again = differences(stock, trained(warm, client, STOCK, variant, attempt=1), variant)
        if again:
            result.why_not = f"two runs of stock differ: {', '.join(again)}"
    elif stock.codes != [0] * len(stock.codes) and variant not in ENDED:
        result.why_not = f"stock ends with {stock.codes}"
    return result


@dataclass
class Told:
    """All of one client."""

    client: str
    why_not: str = ""
    compared: list[Compared] = field(default_factory=list)
    timed: dict[str, Any] = field(default_factory=dict)


def timed(warm: Warm, client: str, turns: int) -> dict[str, Any]:
    """Step times of ours over those of stock, in turn: the median of the turns, and the interval they lie in."""
    steps_s: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for turn in range(turns):
        for strategy in STRATEGIES if turn % 2 else reversed(STRATEGIES):
            outcome = trained(warm, client, strategy, TIMED, attempt=turn)
            found = outcome.found[0]
            if not found or not found.get("fits"):
                return {"why_not": f"{strategy} ends with {outcome.codes}"}
            steps_s[strategy].append(statistics.median(found["fits"][0]["steps_s"]))
    ratios = {
        strategy: [one / stock for one, stock in zip(steps_s[strategy], steps_s[STOCK], strict=True)]
        for strategy in OURS
    }
    return {
        "stock_ms": 1000 * statistics.median(steps_s[STOCK]),
        "ratios": {strategy: [statistics.median(of), *median_interval(of)] for strategy, of in ratios.items()},
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The values that the true median lies between with 95 %; the whole range where there are too few of them."""
    ordered, count, outside = sorted(values), len(values), 0
    while 2 * sum(math.comb(count, fewer) for fewer in range(outside + 2)) <= 0.05 * 2**count:
        outside += 1
    return ordered[outside], ordered[-1 - outside]


def told_of(client: str, variants: Iterable[str], turns: int) -> Told:
    """Installs a client and trains it in all that is asked for."""
    said = said_of(client)
    environment = installed(client, said["REQUIREMENTS"])
    if isinstance(environment, str):
        return Told(client, why_not=environment)
    os.environ |= {"PYTHONPATH": f"{FOLDER.parents[2]}:{FOLDER}", "OMP_NUM_THREADS": "1"}
    lightning = said.get("LIGHTNING", "lightning").partition(".")[0]
    warm = Warm(environment, [f"client_{client}", f"lightning_ncclsafe.{lightning}"], start_s=LIMIT_S)
    told = Told(client)
    try:
        for variant in variants:
            one = compared(warm, client, variant)
            told.compared.append(one)
            print(sentence(one), flush=True)
        if turns:
            told.timed = timed(warm, client, turns)
            print(f"{client}: {told.timed}", flush=True)
    except TimeoutError as error:
        told.why_not = str(error) or f"does not start within {LIMIT_S} s"
        print(f"{client}: {told.why_not}", flush=True)
    finally:
        warm.close()
    return told


def sentence(one: Compared) -> str:
    """One line for the terminal."""
    what = one.why_not or "; ".join(
        f"{strategy}: {', '.join(found) or 'equal'}" for strategy, found in one.differences.items()
    )
    fits = ", ".join("-" if fit_s is None else f"{fit_s:.1f}" for fit_s in one.fit_s.values())
    lines = ", ".join(map(str, one.lines.values()))
    return f"{one.client}, {one.variant}: {what} (lines {lines}; fit {fits} s; exit codes {one.codes.get(STOCK)})"


def table(told: Iterable[Told]) -> str:
    """As it stands in the documentation."""
    names = "`SafeDDP()` | `safe_callbacks()` | `ncclsafe run`"
    rows = [f"| | equal: {names} | lines | step of stock | {names} |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for one in told:
        if one.why_not:
            rows.append(f"| {one.client} | {one.why_not} | | | | | | | |")
            continue
        equal = [_of(one.compared, strategy) for strategy in OURS]
        lines = next((", ".join(map(str, other.lines.values())) for other in one.compared if other.lines), "")
        times = one.timed.get("ratios", {})
        step = f"{one.timed['stock_ms']:.1f} ms" if times else ""
        ratios = ["{:.3f} ({:.3f}–{:.3f})".format(*times[strategy]) if times else "" for strategy in OURS]  # noqa: RUF001
        rows.append(f"| {' | '.join([one.client, *equal, lines, step, *ratios])} |")
    return "\n".join(rows)


def _of(compared: Sequence[Compared], strategy: str) -> str:
    tried = [one for one in compared if not one.why_not]
    unequal = [one.variant for one in tried if one.differences[strategy]]
    return f"{len(tried) - len(unequal)} of {len(tried)}" + (f" (not {', '.join(unequal)})" if unequal else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=CLIENTS, choices=CLIENTS)
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--turns", type=int, default=0, help="how often each strategy is timed")
    parser.add_argument("--json", type=Path, help="where all that was found goes")
    arguments = parser.parse_args()
    told = [told_of(client, arguments.variants, arguments.turns) for client in arguments.only]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in told], indent=1))
    print(table(told))
    sys.exit(any(one.why_not or any(any(of.differences.values()) for of in one.compared) for one in told))


if __name__ == "__main__":
    main()
