"""Runs a case: its ranks are forked from a warm process, and ended as soon as there is a verdict on them."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from hosts import hosts
from truths import Case
from warm import Running, Warm, environment, free_port, ranks_of

import lightning_ncclsafe

# Ranks that share a GPU are told what its own programs tell theirs.
sys.path.append(str(Path(__file__).parents[1] / "gpu"))
import one_gpu

PROGRAM = Path(__file__).with_name("fault_rank.py")
SUSPECT_AFTER_S = 2.0
"""Of ranks that go wrong. Long beside what ranks that are started together wait for each other on a busy machine."""
LIMIT_S = 75.0
"""How long a case may take before it is given up."""
WHOLE_LIMIT_S = 200.0
"""The same of a whole program, which has the patience that users have."""
END_S = 10.0
"""How long a killed rank may take to be gone."""
CGROUPS = tuple(Path("/sys/fs/cgroup") / name for name in ("blkio", "cpu", "freezer", "memory"))
FREEZER = CGROUPS[2]
PERMITTED: dict[str, Callable[[], bool]] = {
    "mounts": lambda: os.geteuid() == 0,
    "cgroups (v1), to be written to": lambda: all(os.access(one, os.W_OK) for one in CGROUPS),
    "a way to announce a pause": lambda: hasattr(lightning_ncclsafe, "pause"),
}
"""Whether this machine and this version have what scenarios need."""
# NCCL is what nearly all trainings on GPUs have. Scenarios that reduce tensors of the CPU need gloo beside it.
_ON_GPU = ("nccl", "cpu:gloo,cuda:nccl")
_NEEDS_GLOO = "No backend type associated with device type cpu"
# Of a verdict that is written while the ranks end.
_LATER_S = 1.0
_POLL_S = 0.05
# PyTorch adds the rank.
_DUMP = "nccl_trace_rank_"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case.

    Attributes:
        report: The first report after it went wrong; of a healthy one, any. None if there was none.
        delay_s: From when it went wrong until the report was there, seconds; None where that is not known.
        started: How many programs were started: all ranks, or what starts them.
        exit_codes: Of those that have ended by themselves.
        output: What all ranks have said.
        dumps: What PyTorch's watchdog has written of each rank's Flight Recorder, by rank.
        skipped: Why it could not be run; empty if it was.
    """

    report: dict[str, Any] | None = None
    delay_s: float | None = None
    started: int = 0
    exit_codes: tuple[int, ...] = ()
    output: str = ""
    dumps: dict[int, bytes] = field(default_factory=dict)
    skipped: str = ""

    @property
    def said(self) -> list[str]:
        """The lines of ours."""
        return [line for line in self.output.splitlines() if line.startswith("[ncclsafe]")]


Found = tuple[dict[str, Any] | None, float | None]
Wait = Callable[[Case, Path, "list[Running | Cold]"], tuple[Found, tuple[int, ...]]]


def run_case(
    warm: Warm,
    case: Case,
    *,
    strategy: str = "SafeDDP",
    suspect_after_s: float = SUSPECT_AFTER_S,
    wait: Wait | None = None,
    on_gpu: bool = False,
    on_hosts: bool = False,
    launcher: str = "",
    has_defaults: bool = False,
) -> Outcome:
    """Runs a case until there is a verdict, or its ranks have ended, or `LIMIT_S` is over; or as `wait` does it.

    Args:
        warm: What its ranks are forked from.
        case: The case.
        strategy: The strategy's name.
        suspect_after_s: After how many seconds ranks are asked.
        wait: Another way to wait for a verdict.
        on_gpu: Whether the ranks share one GPU and communicate with NCCL.
        on_hosts: Whether the ranks are spread over hosts, two where that is possible.
        launcher: Of `LAUNCHERS`, what starts the ranks; empty if each is started by itself, as clusters do.
        has_defaults: Whether Trainers have a logger, checkpoints, a progress bar and a sanity check, as by default.
    """
    program = case.scenario.program
    launcher = program.launcher if program is not None else launcher
    one = Run(
        warm=warm,
        case=case,
        options=[strategy, str(suspect_after_s)],
        wait=wait or _wait,
        launcher=LAUNCHERS[launcher] if launcher else None,
        env={"TRAINER_DEFAULTS": "1"} if has_defaults else {},
    )
    if launcher:
        return one.in_environments(nullcontext([{}]))
    if not on_gpu:
        return one.in_environments(_environments(case, on_hosts))
    for backend in _ON_GPU:
        outcome = one.in_environments(_on_gpu(case, backend))
        if _NEEDS_GLOO not in outcome.output:
            break
    return outcome


Environments = AbstractContextManager[list[dict[str, str]]]
Launcher = Callable[[int], list[str]]


def _by_lightning(world_size: int) -> list[str]:
    """The program is rank 0, which starts the others when its Trainer is asked to train."""
    return []


def _by_torchrun(world_size: int) -> list[str]:
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size), *address]


LAUNCHERS: dict[str, Launcher] = {"lightning": _by_lightning, "torchrun": _by_torchrun}
"""What comes before a program that is started once for all ranks, by the name of what starts them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How the ranks of a case are started and waited for.

    Attributes:
        warm: What they are forked from.
        case: The case.
        options: The last arguments of `PROGRAM`.
        wait: How a verdict is waited for.
        launcher: What starts them; None if each is started by itself.
        env: What is added to the environment of each.
    """

    warm: Warm
    case: Case
    options: list[str]
    wait: Wait
    launcher: Launcher | None
    env: dict[str, str]

    def in_environments(self, environments: Environments) -> Outcome:
        """Runs it with the environments of the ranks, or that of what starts them."""
        folder = Path(tempfile.mkdtemp(prefix="fault-"))
        try:
            if not PERMITTED.get(self.case.scenario.needs, lambda: True)():
                raise PermissionError(f"it needs {self.case.scenario.needs}")
            with environments as envs:
                return self._outcome(folder, envs)
        except PermissionError as error:
            return Outcome(skipped=str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for one in CGROUPS:
                _leave(one / folder.name)

    def _outcome(self, folder: Path, envs: list[dict[str, str]]) -> Outcome:
        program = self.case.scenario.program
        argv = [str(PROGRAM), self.case.scenario.run.__module__, self.case.name, str(folder), *self.options]
        argv = argv if program is None else [*program.argv]
        children = 0
        if self.launcher is not None:
            argv, children = self.launcher(self.case.world_size) + argv, self.case.world_size
        # What the suite keeps in the folder is not in the way of files that the program makes.
        where = folder if program is None else folder / "run"
        where.mkdir(exist_ok=True)
        if program is not None:
            # Users start a program in its folder; what it finds there, it may change.
            shutil.copytree(program.folder, where, ignore=shutil.ignore_patterns("truth.json"), dirs_exist_ok=True)
        running: list[Running | Cold] = []
        left: list[Running | Cold] = []
        with (folder / "output").open("wb") as output:
            try:
                start = Cold if self.case.scenario.is_cold else partial(self.warm.start, children=children)
                for env in envs:
                    one = environment() | env | self.env | {"TORCH_FR_DUMP_TEMP_FILE": str(folder / _DUMP)}
                    running.append(start(argv, output=output.fileno(), cwd=where, env=one))
                left = [*running]
                report, codes = self.wait(self.case, folder, left)
            finally:
                for program in running:
                    program.end_session()
                if self.launcher is not None:
                    _end_launched(folder)
                # What is frozen ends once it is thawed, and whatever was to thaw it may be frozen as well.
                with suppress(OSError):
                    (FREEZER / folder.name / "freezer.state").write_text("THAWED")
                for program in left:
                    program.wait(END_S)
        said = (folder / "output").read_text(errors="replace")
        dumps = {int(path.name.removeprefix(_DUMP)): path.read_bytes() for path in folder.glob(f"{_DUMP}*")}
        outcome = Outcome(report=report[0], delay_s=report[1], started=len(running), exit_codes=codes)
        return replace(outcome, output=said, dumps=dumps)


def _leave(group: Path) -> None:
    """What a scenario has made of its folder's name is removed as soon as the processes in it have gone."""
    give_up = time.monotonic() + _LATER_S
    while group.exists() and time.monotonic() < give_up:
        with suppress(OSError):
            group.rmdir()
        time.sleep(_POLL_S)


@contextmanager
def _environments(case: Case, on_hosts: bool) -> Iterator[list[dict[str, str]]]:
    if case.scenario.needs != "namespaces" and not on_hosts:
        yield ranks_of(case.world_size)
        return
    count = 2 if case.world_size % 2 == 0 else case.world_size
    with hosts(f"{time.monotonic_ns() % 10**9}", case.world_size, count) as envs:
        yield envs


@contextmanager
def _on_gpu(case: Case, backend: str) -> Iterator[list[dict[str, str]]]:
    with _environments(case, on_hosts=False) as envs:
        yield [env | one_gpu.sharing(rank) | {"GPU_BACKEND": backend} for rank, env in enumerate(envs)]


def _end_launched(folder: Path) -> None:
    """What torchrun starts has sessions of its own."""
    for process in psutil.process_iter(["cwd"]):
        if Path(process.info["cwd"] or "/").is_relative_to(folder):
            with suppress(psutil.Error):
                process.kill()


class Cold:
    """A program that is started as every other is, which takes seconds; with the methods of `Running`."""

    def __init__(self, argv: list[str], *, output: int, cwd: Path, env: dict[str, str]) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        self._process = subprocess.Popen([sys.executable, *argv], cwd=cwd, env=env, start_new_session=True, **pipes)
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def end_session(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _wait(case: Case, folder: Path, running: list[Running | Cold]) -> tuple[Found, tuple[int, ...]]:
    """Those that have ended are taken from ``running``."""
    codes: list[int] = []
    deadline = time.monotonic() + (LIMIT_S if case.scenario.program is None else WHOLE_LIMIT_S)
    # Of most faults, what they themselves say of when it went wrong: a report before that is on something else.
    begins = not case.is_healthy and "begins" in inspect.getsource(case.scenario.run)
    found: Found = (None, None)
    while time.monotonic() < deadline:
        found = _verdict(folder, any_time=case.is_healthy)
        if found[0] is not None and (not begins or began_s(folder)):
            return found, tuple(codes)
        if not running:
            # The last rank's report may be on its way to where it is found, and no longer than this.
            deadline = min(deadline, time.monotonic() + _LATER_S)
            time.sleep(_POLL_S)
        with suppress(TimeoutError):
            if running:
                codes.append(running[0].wait(_POLL_S))
                running.pop(0)
    return found, tuple(codes)


def _verdict(folder: Path, *, any_time: bool) -> Found:
    """The first report on what has happened since it went wrong; a start on a busy machine may have had its own."""
    began = began_s(folder)
    for path in sorted(folder.rglob("ncclsafe/*/report.json")):
        written_s, report = path.stat().st_mtime, json.loads(path.read_text())
        if not began:
            return report, None
        if any_time or report["job"]["incident"]["opened_ns"] / 1e9 >= min(began):
            return report, written_s - min(began)
    return None, None


def began_s(folder: Path) -> list[float]:
    """When ranks went wrong, by the clock on the wall."""
    return [float(path.read_text() or "inf") for path in folder.glob("began-*")]
