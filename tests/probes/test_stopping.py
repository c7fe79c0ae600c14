"""The lines that stop a process, in a rank's own modules and in the programs that ranks have started."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.probes.peers import Peers
from lightning_ncclsafe.probes.process import stopping
from lightning_ncclsafe.probes.process.growth import MemoryGrowth
from lightning_ncclsafe.probes.process.stopping import stopping_lines
from lightning_ncclsafe.probes.rank_info import RankInfo

GOVERNOR = """
import os, signal, sys
import psutil

def throttle(pid):
    {}

print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def without_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test suite's modules are the user's to this process."""
    monkeypatch.setattr(stopping, "user_files", list)


@pytest.fixture(params=["governor.py", "-m tools.governor", "-W ignore -u governor.py", "-X dev -m tools.governor"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The file of a child process, once it is written and the process has been started."""
    arguments = request.param.split()
    file = tmp_path / f"{arguments[-1].removesuffix('.py').replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(GOVERNOR.format("os.kill(pid, signal.SIGSTOP)"))
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield file
        finally:
            process.kill()


@pytest.mark.parametrize(
    "command", [["tail", "-f", "governor.py"], [sys.executable, "-c", "input(); " + "#" * 5000 + ".py"]]
)
def test_a_file_that_is_not_run_stops_nothing(tmp_path: Path, command: list[str], started: Path) -> None:
    """Nor does what is no file keep others from being read."""
    (tmp_path / "governor.py").write_text(GOVERNOR.format("os.kill(pid, signal.SIGSTOP)"))
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            assert stopping_lines([os.getpid()]) == (f"{started}:6 in throttle",)
        finally:
            process.kill()


def test_a_line_that_stops_a_process_is_found_in_the_program_of_a_child(started: Path) -> None:
    assert stopping_lines([os.getpid()]) == (f"{started}:6 in throttle",)
    assert stopping_lines([]) == ()


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("os.kill(pid, signal.SIGSTOP)", True),
        ("os.killpg(pid, signal.SIGSTOP)", True),
        ("child.send_signal(sig=signal.SIGSTOP)", True),
        ("psutil.Process(pid).suspend()", True),
        ("os.kill(pid, signal.SIGCONT)  # not SIGSTOP", False),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGSTOP])", False),
        ("process = psutil.Process(pid)\n    process.suspend()", True),
        ("suspend()", False),
        ("pid.suspend()", False),
        ("self.bar.suspend()", False),
        ("psutil.Process(pid).suspend(1)", False),
    ],
)
def test_only_a_call_that_sends_the_signal_stops_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, is_found: bool
) -> None:
    file = tmp_path / "governor.py"
    file.write_text(GOVERNOR.format(code))
    monkeypatch.setattr(stopping, "user_files", lambda: [str(file)])
    line = 6 + code.count("\n")
    assert stopping_lines([]) == ((f"{file}:{line} in throttle",) if is_found else ())


@pytest.mark.parametrize("state", ["stopped", "tracing-stop", "sleeping"])
def test_the_lines_are_searched_only_for_a_process_that_a_signal_has_stopped(state: str) -> None:
    asked: list[list[int]] = []

    def lines(pids: object) -> tuple[str, ...]:
        asked.append([*pids])  # type: ignore[call-overload]
        return ("governor.py:6 in throttle",)

    peer = RankInfo(rank=1, host="h", pid=77)
    peers = Peers(
        ask=lambda _: ((), False),
        growth=MemoryGrowth(),
        look_at=lambda *_, **__: ProcessFacts(pid=77, rank=1, state=state),
        stopping_lines=lines,
    )
    peers.known = (peer,)
    (seen,) = peers.witness([peer])
    peers.close()
    is_stopped = state == "stopped"
    assert asked == [[os.getpid(), 77]] * is_stopped
    assert seen.stopping_at == ("governor.py:6 in throttle",) * is_stopped
