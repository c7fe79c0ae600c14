"""Whole programs whose loggers are offloaded, and what is on storage after they were killed, failed or met a fault."""

import ast
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm import Warm, environment

from lightning_ncclsafe.probes.process.traceback_signal import TracebackSignal

# The first test waits for all programs.
pytestmark = pytest.mark.timeout(320)  # for two such programs, one after the other, on a busy machine

SCENARIO = Path(__file__).with_name("logging_scenario.py")
LOGGERS = ("tensorboard", "csv")
UNSHARE, AS_ROOT = ("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")
TMPFS = ("mount", "-t", "tmpfs", "none", "/mnt")


@dataclass(frozen=True)
class Case:
    """A case of ``logging_scenario.py`` that has ended.

    Attributes:
        folder: Where it has worked.
        exit_code: Its exit code.
        ended: When it ended, seconds since the epoch.
        output: What it has printed.
        logged: The steps that it had logged, each with the time when it knew that.
    """

    folder: Path
    exit_code: int
    ended: float
    output: str
    logged: dict[int, float]

    def steps(self, logger: str, version: int = 0, logs: str = "logs") -> list[int]:
        """The steps that are on storage, in the order in which they are there."""
        points = read(self.folder / logs / logger / f"version_{version}", "value")
        assert all(value == step for step, value in points), points
        return [step for step, _ in points]

    @property
    def staged(self) -> list[Path]:
        """What is in local staging."""
        return sorted((self.folder / "staging").glob("*"))


Cases = dict[str, Case]


def run(warm: Warm, folder: Path, *names: str) -> Cases:
    """Runs cases, and waits for their ends."""
    codes, output = warm.run([str(SCENARIO), str(folder), *names], folder, timeout_s=150)
    assert codes == [0], output
    return cases_in(folder, output)


def run_launcher(warm: Warm, folder: Path, name: str) -> Cases:
    """Runs a case that starts its second rank as a program, whose parent it has to be: it is no fork of another."""
    (folder / name).mkdir()
    codes, output = warm.run([str(SCENARIO), str(folder), name, "--here"], folder, timeout_s=150, children=1)
    (folder / name / "output.txt").write_text(output)
    return {name: case_in(folder / name, codes[0], time.time())}


def run_as_root(folder: Path, *names: str) -> Cases:
    """The same in a namespace where this user is root, which a warm process cannot enter."""
    process = subprocess.Popen(
        [*AS_ROOT, sys.executable, str(SCENARIO), str(folder), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=folder,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, output
    return cases_in(folder, output)


def cases_in(folder: Path, output: str) -> Cases:
    return {name: case_in(folder / name, **end) for name, end in json.loads(output.splitlines()[-1]).items()}


def case_in(folder: Path, exit_code: int, ended: float) -> Case:
    steps = folder / "steps.txt"
    lines = [line.split() for line in steps.read_text().splitlines()] if steps.exists() else []
    logged = {int(step): float(time) for step, time in lines}
    return Case(folder, exit_code, ended, (folder / "output.txt").read_text(), logged)


def read(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a tag in a directory of either logger, in the order in which they are there."""
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open(newline="") as file:
            return [(int(row["step"]), float(row[tag])) for row in csv.DictReader(file) if row[tag]]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(one.step, one.value) for one in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


@dataclass(frozen=True)
class Crashed:
    """Programs that ended too early for their storage.

    Attributes:
        first: How they ended.
        before: What was on storage then, by case and logger.
        again: The same, started once more, when nothing was wrong any more.
    """

    first: Cases
    before: dict[tuple[str, str], list[int]]
    again: Cases


@dataclass(frozen=True)
class Programs:
    """All programs of this file, which run at the same time: they mostly wait."""

    crashed: "Future[Crashed]"
    ended: "Future[Cases]"
    on_small_disks: "Future[Cases | None]"
    forks: "Future[Cases]"
    launches: "Future[Cases]"


@pytest.fixture(scope="module")
def programs(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    crashed, ended, small_disks, forks, launches = map(
        tmp_path_factory.mktemp, ("crashed", "ended", "small_disks", "forks", "launches")
    )
    names = ("sigterm", "sigint", "raise", "sys-exit", "on-exception", "finalize", "no-versions", "no-logs")
    more_names = ("no-staging-any-more", "child", "nested", "twice", "fit-test", "requeue")
    with ThreadPoolExecutor() as pool:
        yield Programs(
            crashed=pool.submit(crash, warm, crashed),
            ended=pool.submit(run, warm, ended, *names, *more_names),
            on_small_disks=pool.submit(run_on_small_disks, warm, small_disks),
            forks=pool.submit(run, warm, forks, "fork", "guard"),
            launches=pool.submit(run_launcher, warm, launches, "popen"),
        )


def crash(warm: Warm, folder: Path) -> Crashed:
    names = ("kill", "abort", "os-exit", "kill-stalled", "end-stalled")
    first = run(warm, folder, *names)
    before = {(name, logger): first[name].steps(logger) for name in names for logger in LOGGERS}
    for name in ("kill-stalled", "end-stalled"):
        (folder / name / "stall").unlink()
    return Crashed(first, before, run(warm, folder, *names, "--again"))


def run_on_small_disks(warm: Warm, folder: Path) -> Cases | None:
    names = ("full-disk", "full-staging", "no-staging")
    if can_mount_after(UNSHARE):
        return run(warm, folder, *names, "--own-mounts")
    return run_as_root(folder, *names) if can_mount_after(AS_ROOT) else None


def can_mount_after(prefix: tuple[str, ...]) -> bool:
    with suppress(OSError):
        return subprocess.run([*prefix, *TMPFS], capture_output=True, timeout=10).returncode == 0
    return False


@pytest.fixture(scope="module")
def crashed(programs: Programs) -> Crashed:
    return programs.crashed.result()


@pytest.fixture(scope="module")
def ended(programs: Programs) -> Cases:
    return programs.ended.result()


@pytest.fixture(scope="module")
def on_small_disks(programs: Programs) -> Cases:
    cases = programs.on_small_disks.result()
    if cases is None:
        pytest.skip("no small disk can be mounted here: neither as root nor in a namespace of a user")
    return cases


@pytest.fixture(scope="module")
def launched(programs: Programs) -> Cases:
    return programs.forks.result() | programs.launches.result()


def assert_complete(case: Case, last: int, *, exit_code: int = 0) -> None:
    """Every step up to the last one is on storage, once, and nothing is left behind."""
    assert case.exit_code == exit_code, case.output
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(last + 1)), (logger, case.output)
    assert "left behind: []" in case.output


def assert_at_most_the_last_second_is_missing(case: Case, steps: list[int]) -> None:
    assert steps == list(range(len(steps))), "no gap and no duplicate"
    assert len(steps) > max(step for step, time in case.logged.items() if time < case.ended - 1.0)


@pytest.mark.parametrize(("name", "exit_code"), [("kill", -signal.SIGKILL), ("abort", -signal.SIGABRT), ("os-exit", 5)])
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_killed_process_loses_at_most_its_last_second(
    crashed: Crashed, name: str, exit_code: int, logger: str
) -> None:
    case, before, again = crashed.first[name], crashed.before[name, logger], crashed.again[name]
    assert case.exit_code == exit_code, case.output
    assert before == list(range(len(before))), "no gap and no duplicate"
    assert len(before) > 12, "storage was there"
    assert_at_most_the_last_second_is_missing(case, again.steps(logger))
    assert again.steps(logger, version=1) == list(range(10))
    assert again.exit_code == 0
    assert not again.staged


@pytest.mark.parametrize("logger", LOGGERS)
def test_points_lost_to_stalled_storage_are_recovered_at_the_next_start(crashed: Crashed, logger: str) -> None:
    case, again = crashed.first["kill-stalled"], crashed.again["kill-stalled"]
    assert case.exit_code == -signal.SIGKILL, case.output
    assert crashed.before["kill-stalled", logger] == []
    assert_at_most_the_last_second_is_missing(case, again.steps(logger))
    assert again.steps(logger, version=1) == list(range(10))
    assert not again.staged
    assert again.output.count("recovered ") == len(LOGGERS), again.output


def test_a_program_with_dead_storage_ends_and_prints_its_staging_folder(crashed: Crashed) -> None:
    case, again = crashed.first["end-stalled"], crashed.again["end-stalled"]
    assert case.exit_code == 0, case.output
    assert case.ended - max(case.logged.values()) < 60
    said = re.findall(r"wait in (\S+);", case.output)
    assert len(said) == len(set(said)) == len(LOGGERS), case.output
    for logger in LOGGERS:
        assert crashed.before["end-stalled", logger] == []
        assert again.steps(logger) == list(range(50))
    assert all(f"folder=PosixPath('{folder}')" in again.output for folder in said), again.output
    assert not again.staged


@pytest.mark.parametrize(
    ("name", "last", "exit_code"), [("sigterm", 30, 0), ("sigint", 29, 1), ("raise", 29, 1), ("sys-exit", 29, 3)]
)
def test_an_unusual_end_delivers_everything_logged_before(ended: Cases, name: str, last: int, exit_code: int) -> None:
    assert_complete(ended[name], last, exit_code=exit_code)


def test_the_end_of_the_program_finalizes_loggers_lightning_does_not(ended: Cases) -> None:
    case = ended["on-exception"]
    assert case.exit_code == 1, case.output
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(30)), case.output
    assert not case.staged


def test_a_failing_finalize_raises_as_in_stock_and_loses_no_points(ended: Cases) -> None:
    case = ended["finalize"]
    assert case.exit_code == 1
    assert "RuntimeError: the server has said goodbye" in case.output
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(50)), case.output
    assert not case.staged


@pytest.mark.parametrize("name", ["no-versions", "no-logs"])
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_removed_directory_is_recreated_for_later_points(ended: Cases, name: str, logger: str) -> None:
    case = ended[name]
    assert case.exit_code == 0, case.output
    steps = case.steps(logger)
    assert steps == list(range(steps[0], 150)), "no gap"
    assert 0 < steps[0] <= 87
    assert "left behind: []" in case.output


@pytest.mark.parametrize("logger", LOGGERS)
def test_removed_staging_loses_no_later_points(ended: Cases, logger: str) -> None:
    case = ended["no-staging-any-more"]
    assert case.exit_code == 0, case.output
    steps = case.steps(logger)
    assert steps == sorted(set(steps)), "in order and without duplicates"
    assert set(range(87, 150)) <= set(steps)
    assert "left behind: []" in case.output


def test_an_ending_child_leaves_its_parents_staging_alone(ended: Cases) -> None:
    case = ended["child"]
    assert "[ncclsafe]" not in case.output
    assert_complete(case, 49)


def test_nested_trainers_each_keep_all_points(ended: Cases) -> None:
    case = ended["nested"]
    assert_complete(case, 49)
    for logger in LOGGERS:
        assert case.steps(logger, logs="inner/logs") == list(range(15))
    assert case.output.count("left behind: []") == 2


def test_a_training_after_a_failed_one_keeps_all_points(ended: Cases) -> None:
    case = ended["twice"]
    assert_complete(case, 14)
    for logger in LOGGERS:
        assert case.steps(logger, version=1) == list(range(50))
    assert case.output.count("left behind: []") == 2


def test_a_test_after_the_training_adds_to_the_same_files(ended: Cases) -> None:
    case = ended["fit-test"]
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(50))
        assert read(case.folder / "logs" / logger / "version_0", "tested") == [(50, 7.0)]


def test_everything_is_on_storage_before_slurm_requeues_the_job(ended: Cases) -> None:
    case = ended["requeue"]
    assert (case.folder / "hpc_ckpt_1.ckpt").exists(), case.output
    for logger in LOGGERS:
        assert case.steps(logger, logs="seen") == list(range(30))
    assert_complete(case, 49)


def test_a_full_disk_is_reported_once_and_loses_no_points(on_small_disks: Cases) -> None:
    case = on_small_disks["full-disk"]
    assert case.exit_code == 0, case.output
    assert "made 460 steps, left behind: []" in case.output
    for logger in LOGGERS:
        assert case.steps(logger, logs="seen") == list(range(460)), case.output
    said = re.findall(r"(\w+) cannot write to .*No space left on device.*training continues", case.output)
    assert sorted(said) == ["CSVLogger", "TensorBoardLogger"], case.output
    assert len(re.findall(r"\d failures?, the last: .*No space left", case.output)) == len(LOGGERS), case.output


def test_a_full_staging_disk_loses_no_points(on_small_disks: Cases) -> None:
    case = on_small_disks["full-staging"]
    assert case.exit_code == 0, case.output
    assert "made 100 steps, left behind: ['filler']" in case.output
    assert "it is skipped" not in case.output
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(100)), case.output
        assert (case.folder / "logs" / logger / "version_0" / "hparams.yaml").read_text() == "width: 2\n"


def test_without_room_for_staging_loggers_write_directly(on_small_disks: Cases) -> None:
    case = on_small_disks["no-staging"]
    assert case.exit_code == 0, case.output
    assert "made 100 steps, left behind: ['filler']" in case.output
    assert len(re.findall("the offload of .* is off; training continues", case.output)) == len(LOGGERS)
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(100)), case.output


@pytest.mark.parametrize("name", ["fork", "popen"])
def test_only_rank_0_stages(launched: Cases, name: str) -> None:
    case = launched[name]
    assert case.exit_code == 0, case.output
    assert sorted(re.findall(r"rank \d stages: \w+", case.output)) == ["rank 0 stages: True", "rank 1 stages: False"]
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(50)), case.output
    assert not case.staged
    # Lightning leaves its variables, and a thread that watches its ranks; a rank stays armed for its next guard.
    (left,) = re.findall("left behind: (.*)", case.output)
    assert [one for one in ast.literal_eval(left) if "ncclsafe" in one and TracebackSignal.__name__ not in one] == []


def test_the_guard_flushes_loggers_before_ending_the_run(launched: Cases) -> None:
    case = launched["guard"]
    assert "the run cannot continue, so the guard ends it" in case.output
    assert case.exit_code not in (0, -signal.SIGALRM), case.output
    for logger in LOGGERS:
        assert case.steps(logger) == list(range(30)), case.output
    assert not (case.folder / "staging").exists(), "staging is gone"
