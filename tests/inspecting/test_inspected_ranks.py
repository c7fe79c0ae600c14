"""For how long ranks are inspected: until it is clear whether one is in a long step or hangs."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from lightning_ncclsafe.facts import FileLockFacts, PressureFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis
from lightning_ncclsafe.inspecting import inspected_ranks, inspection, looks, objects
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S
from lightning_ncclsafe.inspecting.inspection import LOOKS, Inspection, inspect
from lightning_ncclsafe.inspecting.looks import SeenFrame, SeenThread, StackReader
from lightning_ncclsafe.inspecting.ranks import SeenProcess

BARRIER = SeenFrame("/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 5, "barrier")
FIRST = LOOKS + 2


class Scripted(StackReader):
    """Gives stacks by how often a process was looked at."""

    def __init__(self, stack: Callable[[int, int], tuple[SeenFrame, ...]]) -> None:
        super().__init__()
        self.is_there = True
        self.times: dict[int, int] = {}
        self._stack = stack

    def read(self, pid: int) -> tuple[tuple[SeenThread, ...], str]:
        self.times[pid] = self.times.get(pid, 0) + 1
        return (SeenThread(is_main=True, frames=self._stack(pid, self.times[pid])),), ""


class Interrupted(Scripted):
    """Is followed by Ctrl-C."""

    def read(self, pid: int) -> tuple[tuple[SeenThread, ...], str]:
        found = super().read(pid)
        if self.times[pid] > FIRST:
            raise KeyboardInterrupt
        return found


@pytest.fixture
def pair() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Two processes that wait, in the place of ranks."""
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    yield ranks
    for one in ranks:
        one.kill()
        one.communicate(timeout=10)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SECONDS", 0.3)
    monkeypatch.setattr(inspected_ranks, "_AGAIN_EVERY_S", 0.01)
    # However slow this machine is, all looks are taken.
    monkeypatch.setattr(inspected_ranks, "_LEAST_LOOKS", LOOKS)
    monkeypatch.setattr(looks, "slept_s", lambda pid: None)
    under_pressure(monkeypatch, 0.0)


def under_pressure(monkeypatch: pytest.MonkeyPatch, cpu_waited: float | None) -> None:
    held_up = PressureFacts(over_s=1.0, cpu_waited=cpu_waited)
    monkeypatch.setattr(inspected_ranks, "pressure_between", lambda *_: held_up)


def user(line: int) -> SeenFrame:
    return SeenFrame("/home/ada/train.py", line, "evaluate" if line >= 30 else "main")


def inspected(
    pair: "list[subprocess.Popen[bytes]]",
    reader: Scripted,
    over_s: float | None = None,
    so_far: Callable[[Sequence[Diagnosis]], bool] = lambda diagnoses: False,
) -> tuple[Inspection, list[str]]:
    seen = [
        SeenProcess(pid=one.pid, environment={"RANK": str(number), "WORLD_SIZE": "2", "MASTER_PORT": "1"})
        for number, one in enumerate(pair)
    ]
    said: list[str] = []
    return inspect(over_s=over_s, say=said.append, so_far=so_far, processes=lambda: seen, reader=reader), said


def test_a_long_step_is_watched_until_it_ends(pair: "list[subprocess.Popen[bytes]]") -> None:
    works = pair[0].pid

    def stack(pid: int, time: int) -> tuple[SeenFrame, ...]:
        if pid == works:
            return (user(30 if time < FIRST else 20),)
        return (user(20 if time <= FIRST else 21), BARRIER)

    found, said = inspected(pair, reader := Scripted(stack))
    (diagnosis,) = found.diagnoses
    assert diagnosis.findings == () and all(facts.inspection.moved for facts in diagnosis.job.ranks if facts.inspection)
    assert {*reader.times.values()} == {FIRST + 1}
    assert len(said) == 1 and "in a hang or a long step" in said[0]
    # Nobody has to wait for the rest.
    assert "So far: Rank 0 is" in said[0] and "possible)" in said[0]


def test_the_early_answer_has_all_facts_of_a_rank(
    pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FileLockFacts(path="/srv/cache.lock")
    monkeypatch.setattr(inspected_ranks, "awaited_lock", lambda pid: lock if pid == pair[0].pid else None)
    early: list[Diagnosis] = []

    def so_far(diagnoses: Sequence[Diagnosis]) -> bool:
        early.extend(diagnoses)
        return True

    def stack(pid: int, time: int) -> tuple[SeenFrame, ...]:
        return (user(30),) if pid == pair[0].pid else (user(20), BARRIER)

    _, said = inspected(pair, Interrupted(stack), so_far=so_far)
    (diagnosis,) = early
    assert [one.file_lock for one in diagnosis.job.ranks] == [lock, None]
    assert diagnosis.findings[0].confidence is Confidence.POSSIBLE
    # What has been shown is not said again.
    assert len(said) == 1 and "So far" not in said[0] and "Ctrl-C answers now" in said[0]


def test_a_requested_duration_is_kept(pair: "list[subprocess.Popen[bytes]]") -> None:
    found, said = inspected(
        pair, reader := Scripted(lambda pid, time: (user(30),) if pid == pair[0].pid else (user(20), BARRIER)), 0.5
    )
    assert ({*reader.times.values()}, said) == ({LOOKS}, [])
    assert found.diagnoses[0].findings[0].confidence is Confidence.POSSIBLE


def test_a_long_sleep_seen_by_the_kernel_shortens_the_inspection(
    pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "slept_s", lambda pid: 614.2 if pid == pair[1].pid else 0.0)
    found, said = inspected(
        pair, reader := Scripted(lambda pid, time: (user(30),) if pid == pair[0].pid else (user(20), BARRIER))
    )
    assert ({*reader.times.values()}, said) == ({LOOKS}, [])
    first = found.diagnoses[0].findings[0]
    assert (first.ranks, found.diagnoses[0].job.incident.idle_s) == ((0,), 614.2)


@pytest.mark.parametrize(("over_s", "times"), [(None, 2), (0.1, LOOKS)])
def test_two_looks_suffice_if_no_rank_has_run_for_long(
    pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch, over_s: float | None, times: int
) -> None:
    monkeypatch.setattr(looks, "slept_s", lambda pid: LONG_STEP_S)
    reader = Scripted(lambda pid, time: (user(30),) if pid == pair[0].pid else (user(20), BARRIER))
    found, said = inspected(pair, reader, over_s)
    assert ({*reader.times.values()}, said) == ({times}, [])
    assert found.diagnoses[0].findings[0].ranks == (0,)


@pytest.mark.parametrize(("over_s", "times"), [(None, 3), (0.3, LOOKS)])
def test_slow_looks_reduce_their_number(
    pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch, over_s: float | None, times: int
) -> None:
    monkeypatch.setattr(inspected_ranks, "_LEAST_LOOKS", 3)

    def slow(pid: int, number: int) -> tuple[SeenFrame, ...]:
        time.sleep(0.2)
        return (user(20 + number),)

    found, said = inspected(pair, reader := Scripted(slow), over_s)
    assert ({*reader.times.values()}, said, found.diagnoses[0].findings) == ({times}, [], ())


def test_a_rank_that_ends_meanwhile_keeps_its_earlier_facts(pair: "list[subprocess.Popen[bytes]]") -> None:
    works = pair[0]

    def stack(pid: int, time: int) -> tuple[SeenFrame, ...]:
        if time == FIRST and works.poll() is None:
            works.kill()
            works.wait(10)
        return (user(30),) if pid == works.pid else (user(20), BARRIER)

    (diagnosis,) = inspected(pair, Scripted(stack))[0].diagnoses
    assert diagnosis.findings[0].ranks == (0,)
    assert diagnosis.findings[0].confidence is Confidence.POSSIBLE
    assert any(text.startswith("Rank 0 ended after that") for text in diagnosis.unanswered)
    assert not diagnosis.job.witnessed


def test_unreadable_stacks_end_the_inspection(pair: "list[subprocess.Popen[bytes]]") -> None:
    _, said = inspected(pair, reader := Scripted(lambda pid, time: ()))
    assert ({*reader.times.values()}, said) == ({LOOKS}, [])


def test_diverged_ranks_are_not_in_a_long_step(
    pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspected_ranks, "LONG_WAIT_S", 0.5)
    found, said = inspected(
        pair, reader := Scripted(lambda pid, time: (user(20 if pid == pair[0].pid else 25), BARRIER))
    )
    assert len(said) == 1 and "So far: No rank that was seen is at work" in said[0]
    assert max(reader.times.values()) > LOOKS
    assert found.diagnoses[0].findings[0].rule == "diverged-collectives"
    assert found.diagnoses[0].job.incident.idle_s < LONG_STEP_S


@pytest.mark.parametrize(("cpu_waited", "at_least_s"), [(None, 0.2), (0.0, 0.2), (0.8, 1.0)])
def test_a_busy_host_extends_the_wait(
    pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch, cpu_waited: float | None, at_least_s: float
) -> None:
    monkeypatch.setattr(inspected_ranks, "LONG_WAIT_S", 0.2)
    under_pressure(monkeypatch, cpu_waited)
    found, _ = inspected(pair, Scripted(lambda pid, time: (user(20 if pid == pair[0].pid else 25), BARRIER)))
    assert found.diagnoses[0].job.incident.idle_s >= at_least_s


def test_ctrl_c_gives_the_answer_so_far(pair: "list[subprocess.Popen[bytes]]") -> None:
    found, _ = inspected(
        pair, Interrupted(lambda pid, time: (user(30),) if pid == pair[0].pid else (user(20), BARRIER))
    )
    assert found.diagnoses[0].findings[0].ranks == (0,)


def test_another_python_is_reported(pair: "list[subprocess.Popen[bytes]]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "runtime_of", lambda pid: None)
    found, _ = inspected(
        pair, Scripted(lambda pid, time: (user(30),) if pid == pair[0].pid else (user(20), BARRIER)), 0.3
    )
    assert any("Ranks 0-1 run another Python" in text for text in found.diagnoses[0].unanswered)
