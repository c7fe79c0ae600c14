"""``make test`` ends and names the test, whatever that one does to its process, its threads or its children."""

import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from _pytest.config import default_plugins
from suite import ALONE
from suite import FIRST as BEGUN_FIRST
from warm import Warm, environment

ROOT = Path(__file__).parents[1]
# For what the suites below take until they end; the longest wait for a limit of 10 s.
ENDS_S = 50
AT_ONCE = 6
NEEDS = ("suites",)
FIRST = [("stops who watches",), ("hangs while it is imported",), ("never ends its thread",)]

FOREVER = "threading.Event().wait()"
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
TEST = "test_culprit.py::test_it: "
# What a file has beside its imports, and what the run says of it.
CULPRITS = {
    "hangs": (f"def test_it(): {FOREVER}", f"{TEST}the process ended with exit status 1"),
    "exits": ("def test_it(): os._exit(3)", f"{TEST}the process ended with exit status 3"),
    "exits as if all were well": ("def test_it(): os._exit(0)", f"{TEST}the process ended with exit status 0"),
    "is killed": ("def test_it(): os.kill(os.getpid(), signal.SIGKILL)", f"{TEST}the process was ended by SIGKILL"),
    "crashes": ("def test_it(): os.abort()", f"{TEST}the process was ended by SIGABRT"),
    "kills its group": ("def test_it(): os.killpg(0, signal.SIGKILL)", f"{TEST}the process was ended by SIGKILL"),
    # It waits once it goes on: any of its threads may be the one that then takes the signal and tells the stacks.
    "is stopped": (f"def test_it(): os.kill(os.getpid(), signal.SIGSTOP); {FOREVER}", f"{TEST}stuck beyond its limit"),
    "fails and hangs in its teardown": (
        f"@pytest.fixture\ndef what():\n    yield\n    {FOREVER}\ndef test_it(what): assert False",
        f"{TEST}stuck beyond its limit",
    ),
    "hangs in a fixture": (
        f"@pytest.fixture(scope='module', autouse=True)\ndef what(): {FOREVER}\ndef test_it(): pass",
        f"{TEST}the process ended with exit status 1",
    ),
    "hangs in its module's teardown": (
        f"@pytest.fixture(scope='module', autouse=True)\ndef what():\n    yield\n    {FOREVER}\ndef test_it(): pass",
        f"{TEST}the process ended with exit status 1",
    ),
    "hangs, and its child": (
        f"def test_it():\n    child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdout=subprocess.PIPE,"
        f" start_new_session=True)\n    child.stdout.readline()\n    {FOREVER}",
        f"{TEST}the process ended with exit status 1",
    ),
    "hangs while it is imported": (FOREVER, "test_culprit.py: stuck beyond its limit"),
    "never ends its thread": (
        f"def test_it(): threading.Thread(target=lambda: {FOREVER}).start()",
        "the end of the process: stuck beyond its limit",
    ),
    "has no limit": (
        f"@pytest.mark.timeout(0)\ndef test_it(): {FOREVER}",
        "test_culprit.py::test_it: the limit of the whole run is over",
    ),
    "stops who watches": (
        f"@pytest.mark.timeout(0)\ndef test_it():\n    os.kill(os.getppid(), signal.SIGSTOP)\n    {FOREVER}",
        "it did not end itself",
    ),
    "kills who watches": (
        f"def test_it():\n    os.kill(os.getppid(), signal.SIGKILL)\n    {FOREVER}",
        "what hands out the files was ended by SIGKILL",
    ),
}
OPTIONS = {
    "hangs while it is imported": ("--outside-tests-s", "10"),
    "never ends its thread": ("--outside-tests-s", "10"),
    "has no limit": ("--limit-s", "10"),
    "stops who watches": ("--limit-s", "10"),
}
GOOD = "import pytest\n@pytest.mark.parametrize('number', range(3))\ndef test_good(number): pass\n"


class Ended(NamedTuple):
    """A run: its exit status, None if it had to be killed; what it wrote; of what was left, the commands."""

    status: int | None
    text: str
    left: list[list[str]]


@pytest.fixture(scope="module")
def suites() -> Iterator[Warm]:
    """What suites are forked from: to import pytest takes longer than they do."""
    warm = Warm(preloaded=("suite", *(f"_pytest.{name}" for name in default_plugins)))
    yield warm
    warm.close()


def below(folder: Path) -> Iterator[psutil.Process]:
    """What runs, and was started by the suite of a folder: it works there."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder):
                yield process


def run(suites: Warm, folder: Path, *options: str) -> Ended:
    """Runs the suite of a folder as ``make test`` runs this one, but for the limits, and with no plugin but that."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    argv = [str(ROOT / "tests" / "suite.py"), *options, "-p", "pytest_timeout", "--override-ini", "timeout=2", "."]
    # All others, Hypothesis above all, take longer to import than these suites take.
    env = environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with (folder / "log").open("w") as log:
        suite = suites.start(argv, output=log.fileno(), cwd=folder, env=env)
    status, left = None, []
    with suppress(TimeoutError):
        status = suite.wait(ENDS_S)
    for process in below(folder):
        with suppress(psutil.Error):
            left.append(process.cmdline())
            process.kill()
    return Ended(status, (folder / "log").read_text(), left)


def run_program(warm: Warm, folder: Path, culprit: str, *, suites: Warm) -> Ended:
    for name in "abcxyz":
        (folder / f"test_{name}.py").write_text(GOOD)
    (folder / "test_bad.py").write_text("def test_bad(): assert 6 * 7 == 43\n")
    source, _ = CULPRITS[culprit]
    (folder / "test_culprit.py").write_text(f"import os, signal, subprocess, sys, threading, pytest\n{source}\n")
    return run(suites, folder, *OPTIONS.get(culprit, ()))


@pytest.mark.parametrize("culprit", [pytest.param(culprit, marks=pytest.mark.program(culprit)) for culprit in CULPRITS])
def test_the_run_ends_and_names_the_test(culprit: str, outcome: Ended) -> None:
    assert outcome.status, outcome  # 0 is a run in which all was well, None one that did not end.
    said = [line for line in outcome.text.splitlines() if line.startswith("The run is ended: ")]
    assert len(said) == 1, outcome.text
    assert CULPRITS[culprit][1] in said[0]
    assert outcome.left == []


@pytest.mark.program("is stopped")
def test_the_line_of_a_stopped_process_is_shown(outcome: Ended) -> None:
    # Its time limit is over as well once it goes on: faulthandler or pytest-timeout tells it, whichever comes first.
    assert re.search(r'test_culprit\.py", line 2,? in test_it', outcome.text)


@pytest.mark.program("has no limit")
def test_how_a_test_has_failed_is_shown_although_its_process_is_ended(outcome: Ended) -> None:
    assert "failed: test_bad.py::test_bad" in outcome.text
    assert "assert (6 * 7) == 43" in outcome.text


def test_each_file_is_imported_once_and_each_test_runs_once(suites: Warm, tmp_path: Path) -> None:
    touch = (
        "import pathlib\npathlib.Path(__file__ + '.imported').touch(exist_ok=False)\n"
        "def test_it(): pathlib.Path(__file__ + '.ran').touch(exist_ok=False)\n"
    )
    names = {f"test_{number}.py" for number in range(20)}
    for name in names:
        (tmp_path / name).write_text(touch)
    ended = run(suites, tmp_path)
    assert ended.status == 0, ended.text
    assert ended.text.splitlines()[-1] == "20 passed, 0 failed, 0 skipped"
    assert {path.stem for path in tmp_path.glob("*.ran")} == names


def test_assertions_of_the_last_file_are_rewritten_while_the_first_is_imported(suites: Warm, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pathlib, time\nkept = pathlib.Path(__file__).with_name('__pycache__')\n"
        "while not [*kept.glob('test_b.*.pyc')]: time.sleep(0.01)\ndef test_it(): pass\n"
    )
    (tmp_path / "test_b.py").write_text("def test_bad(): assert 6 * 7 == 43\n")
    ended = run(suites, tmp_path, "--outside-tests-s", "10")
    assert ended.text.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
    assert "assert (6 * 7) == 43" in ended.text


def test_what_measures_runs_alone(suites: Warm, tmp_path: Path) -> None:
    times = (
        "import pathlib, time, pytest\n@pytest.mark.parametrize('number', range(3))\ndef test_it(number):\n"
        "    began = time.monotonic()\n    time.sleep(0.2)\n"
        "    pathlib.Path(f'{__file__}.{number}.ran').write_text(f'{began} {time.monotonic()}')\n"
    )
    for name in (*ALONE, *(f"tests/others/test_{name}.py" for name in "abc"), "tests/trainers/test_units.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(times)
    ended = run(suites, tmp_path)
    assert ended.status == 0, ended.text
    spans = {path: [float(at) for at in path.read_text().split()] for path in tmp_path.glob("tests/*/*.ran")}
    measures = {tmp_path / f"{name}.{number}.ran" for name in ALONE for number in range(3)}
    others_end = max(end for path, (_, end) in spans.items() if path not in measures)
    alone = sorted(spans[path] for path in measures)
    assert len(spans) == len(alone) + 12
    began, ends = zip(*alone, strict=True)
    assert all(before <= after for before, after in zip([others_end, *ends], began, strict=False))


def test_files_with_a_place_of_their_own_are_there() -> None:
    assert [name for name in (*BEGUN_FIRST, *ALONE) if not (ROOT / name).is_file()] == []


def test_a_failure_is_shown_and_the_rest_runs(suites: Warm, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_bad(): assert 6 * 7 == 43\n")
    (tmp_path / "test_b.py").write_text(GOOD)
    (tmp_path / "test_c.py").write_text("import pytest\ndef test_not(): pytest.skip('not here')\n")
    ended = run(suites, tmp_path)
    assert ended.status == 1
    assert ended.text.splitlines()[-1] == "3 passed, 1 failed, 1 skipped"
    assert "assert (6 * 7) == 43" in ended.text
    assert "not here" in ended.text


def test_an_import_error_fails_the_run(suites: Warm, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import no_such_module\n")
    (tmp_path / "test_b.py").write_text(GOOD)
    ended = run(suites, tmp_path)
    assert ended.status == 2
    assert "No module named 'no_such_module'" in ended.text


def test_the_first_failure_starts_no_further_file(suites: Warm, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_bad(): assert False\n")
    for number in range(10):
        (tmp_path / f"test_b{number}.py").write_text("import time\ndef test_it(): time.sleep(0.5)\n")
    ended = run(suites, tmp_path, "--processes", "2", "--exitfirst")
    assert ended.status == 1
    # The process of the failure has asked for one more already, which it does not run.
    assert int(ended.text.splitlines()[-1].split()[0]) < 9


def test_without_tests_the_run_fails(suites: Warm, tmp_path: Path) -> None:
    assert run(suites, tmp_path).status == 5


def test_two_sigterms_leave_no_process(suites: Warm, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, psutil, signal\ndef test_it():\n    watching = psutil.Process().parent().ppid()\n"
        "    os.kill(watching, signal.SIGTERM)\n    os.kill(watching, signal.SIGTERM)\n    signal.pause()\n"
    )
    ended = run(suites, tmp_path)
    assert ended.status == 128 + signal.SIGTERM
    assert ended.left == []
