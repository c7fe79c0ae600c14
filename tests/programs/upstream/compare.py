"""Runs Lightning's own tests with its classes and with ours in their place, and says which come to something else.

``make upstream``. Taken from Lightning's repository, at the tag of the version that is installed, are the tests of
strategies, loggers, trainer, callbacks, loops, checkpointing and utilities that run on CPU: folder by folder in one
process, and those marked as standalone each in one of its own. A test that passes with stock only is run again, alone,
with both. Where ours then pass less often, it is a difference, which is expected only if ``known.py`` has a reason.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent
sys.path[:0] = [str(PROGRAM), str(PROGRAM.parent / "clients")]

from environments import FOLDER, installed  # noqa: E402
from known import KNOWN  # noqa: E402
from outcomes import END, Outcome, noted, outcomes  # noqa: E402

ROOT = PROGRAM.parents[2]
RUNS = ROOT / "runs" / "upstream"
REPOSITORY = "https://github.com/Lightning-AI/pytorch-lightning"
TESTS = "tests/tests_pytorch"
REQUIREMENTS = (
    "pytest<9.1",
    "pytest-timeout",
    "cloudpickle",
    "hydra-core",
    "matplotlib",
    "omegaconf",
    "scikit-learn",
    "tensorboardX",
)
FOLDERS = ("strategies", "loggers", "trainer", "callbacks", "loops", "checkpointing", "utilities")
# They load checkpoints of old releases, which are not in the repository.
LEFT_OUT = (
    "checkpointing/test_legacy_checkpoints.py",
    "utilities/migration/test_utils.py::test_patch_legacy_imports_unified",
)
ARMS = STOCK, OURS = "stock", "ours"
# Of a test; twice that of Lightning's own runs, which have a machine to themselves.
LIMIT_S = 180
# Without a word for so long, a process has a test that its own limit does not end.
STALLED_S = 3 * LIMIT_S
# For what is left of a process once its last test has ended.
LEAVING_S = 20


@dataclass
class Compared:
    """One test with both.

    Attributes:
        again: How often it has passed in further runs, alone, of each.
    """

    test: str
    stock: Outcome
    ours: Outcome
    again: dict[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.stock.is_good and self.ours.is_good:
            return "both pass"
        if self.stock.kind == self.ours.kind == "skipped":
            return "skipped"
        if self.stock.is_good:
            if self.again and self.again[OURS] >= self.again[STOCK]:
                return "flaky"
            return "known" if reason_of(self.test) else "replacement fails"
        return "stock fails" if self.ours.is_good else "both fail"


VERDICTS = ("both pass", "skipped", "both fail", "stock fails", "flaky", "known", "replacement fails")


def reason_of(test: str) -> str:
    """Why a test is expected to fail with ours."""
    return KNOWN.get(test.removeprefix(f"{TESTS}/").partition("[")[0], "")


class Tests:
    """The tests of a checkout, in an environment."""

    def __init__(self, python: Path, checkout: Path) -> None:
        self._python = python
        self._folder = checkout / TESTS

    def together(self, arm: str, path: str, notes: Path) -> dict[str, Outcome]:
        """Those of a file or folder that may share a process; past one that has ended it, it is started again."""
        notes.unlink(missing_ok=True)
        count = -1
        while not self._run(arm, [path], notes) and len(outcomes(notes)) > count:
            count = len(outcomes(notes))
        return outcomes(notes)

    def standalone(self, arm: str, path: str, notes: Path) -> dict[str, Outcome]:
        """Those that are marked as such, each in a process of its own."""
        files = [self._folder / path] if path.endswith(".py") else [*(self._folder / path).rglob("test_*.py")]
        with_mark = [str(file.relative_to(self._folder)) for file in files if "standalone=True" in file.read_text()]
        if not with_mark:
            return {}
        notes.unlink(missing_ok=True)
        self._run(arm, [*with_mark, "--collect-only"], notes, PL_RUN_STANDALONE_TESTS="1")
        told = {}
        for line in noted(notes):
            if line.get("is_skipped"):
                told[line["id"]] = Outcome("skipped", "needs more than is here")
            elif line["id"] != END:
                told |= self.alone(arm, line["id"], notes.with_suffix(".one.jsonl"))
        return told

    def alone(self, arm: str, test: str, notes: Path) -> dict[str, Outcome]:
        """One test in a process of its own."""
        notes.unlink(missing_ok=True)
        path = test.removeprefix(f"{TESTS}/")
        self._run(arm, [path], notes, PL_RUN_STANDALONE_TESTS="1")
        if not outcomes(notes):
            # It is not marked as standalone, and with that variable all others are left out.
            notes.unlink(missing_ok=True)
            self._run(arm, [path], notes)
        return outcomes(notes)

    def _run(self, arm: str, arguments: Sequence[str], notes: Path, **environment: str) -> bool:
        """Whether all that was asked for was run."""
        command = [str(self._python), str(PROGRAM / "in_place.py"), arm, str(notes)]
        command += ["-p", "no:cacheprovider", "-q", "--color=no", f"--timeout={LIMIT_S}", "--timeout-method=thread"]
        command += [f"--deselect={TESTS}/{one}" for one in LEFT_OUT]
        command += [str(self._folder / one) if not one.startswith("-") else one for one in arguments]
        # Lightning sets these itself, and its tests tell of those that are left.
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "NCCLSAFE_"))}
        mine |= {"PYTHONPATH": f"{ROOT}:{self._folder.parent}", "OMP_NUM_THREADS": "1"}
        # What mlflow refuses since, and Lightning's tests do: to keep runs in a folder.
        mine |= {"RES_OPTIONS": "timeout:1 attempts:1", "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
        with notes.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=mine | environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return _wait(process, notes)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], notes: Path) -> bool:
    size, since = 0, time.monotonic()
    while True:
        has_ended = process.poll() is not None
        is_done = any(line["id"] == END for line in noted(notes)[-1:])
        if has_ended:
            return is_done
        if notes.exists() and notes.stat().st_size != size:
            size, since = notes.stat().st_size, time.monotonic()
        if time.monotonic() - since > (LEAVING_S if is_done else STALLED_S):
            return is_done
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)


def compared(tests: Tests, paths: Sequence[str], again: int) -> list[Compared]:
    """Tests with both, and those again, alone, of which only ours have failed."""
    of_arms: dict[str, dict[str, Outcome]] = {arm: {} for arm in ARMS}
    for path, arm in itertools.product(paths, ARMS):
        notes, began = RUNS / f"{path.replace('/', '-')}.{arm}.jsonl", time.monotonic()
        found = tests.together(arm, path, notes)
        if not found:
            sys.exit(f"There are no tests in {path}, or they cannot be run; see {notes.with_suffix('.log')}.")
        of_arms[arm] |= found | tests.standalone(arm, path, notes.with_suffix(".standalone.jsonl"))
        print(f"{path}: {arm}, {time.monotonic() - began:.0f} s", flush=True)
    nothing = Outcome("not run")
    told = [
        Compared(test, of_arms[STOCK].get(test, nothing), of_arms[OURS].get(test, nothing))
        for test in of_arms[STOCK] | of_arms[OURS]
    ]
    for one in told:
        if again and one.stock.is_good and not one.ours.is_good:
            one.again = {arm: 0 for arm in ARMS}
            for number in range(again):
                for arm in ARMS:
                    notes = RUNS / f"again-{number}.{arm}.jsonl"
                    one.again[arm] += tests.alone(arm, one.test, notes).get(one.test, nothing).is_good
            print(f"{one.verdict}: {one.test}: {one.ours.why} (again, of {again}: {one.again})", flush=True)
    return told


def folder_of(test: str) -> str:
    return test.removeprefix(f"{TESTS}/").partition("/")[0]


def table(told: Sequence[Compared]) -> str:
    """As it stands in the documentation."""
    rows = [f"| | tests | replaced | {' | '.join(VERDICTS)} |", f"|---|{'---|' * (2 + len(VERDICTS))}"]
    folders = sorted({folder_of(one.test) for one in told})
    for folder in [*folders, ""]:
        its = [one for one in told if not folder or folder_of(one.test) == folder]
        counts = Counter(one.verdict for one in its)
        used = sum(one.ours.used_ours for one in its)
        cells = [folder or "all", len(its), used, *(counts[verdict] for verdict in VERDICTS)]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def checkout_of(version: str) -> Path:
    """A clone of Lightning's repository at the tag of a version."""
    folder = FOLDER / f"pytorch-lightning-{version}"
    if not folder.exists():
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", version, REPOSITORY, str(folder)]
        subprocess.run(command, check=True, timeout=600)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=FOLDERS, help="folders or files of tests/tests_pytorch")
    parser.add_argument("--checkout", type=Path, help="of Lightning's repository; by default it is cloned")
    parser.add_argument("--again", type=int, default=3, help="how often a test is run again of which only ours failed")
    parser.add_argument("--json", type=Path, help="where all that was found goes")
    arguments = parser.parse_args()
    # So that what was started is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    python = installed("upstream", REQUIREMENTS)
    if isinstance(python, str):
        sys.exit(f"What Lightning's tests need {python}.")
    checkout = arguments.checkout or checkout_of(importlib.metadata.version("lightning"))
    RUNS.mkdir(parents=True, exist_ok=True)
    told = compared(Tests(python, checkout.resolve()), arguments.only, arguments.again)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) | {"verdict": one.verdict} for one in told], indent=1))
    for one in told:
        if one.verdict in VERDICTS[2:]:
            why = reason_of(one.test) or (one.stock if one.verdict == "both fail" else one.ours).why
            print(f"{one.verdict}: {one.test}: {why}")
    print(table(told))
    sys.exit(any(one.verdict == "replacement fails" for one in told))


if __name__ == "__main__":
    main()
