"""A rank that waits for the others to join, under its guard: what it says of those that have not come."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe._torch.process_groups import GroupCalls
from lightning_ncclsafe.exchange import DirectoryExchange, MemoryExchange
from lightning_ncclsafe.facts import Incident, IncidentKind, NotRecorded, UnrecordedGroup, codec
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.guard import after_verdict, gathering, local_ranks
from lightning_ncclsafe.guard import guard as guard_module
from lightning_ncclsafe.guard.guard import Guard
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.guard.shared import IncidentEntry, Place
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.report.json import read_report
from lightning_ncclsafe.settings import Limits

# A rank that expands its data before it makes a Trainer: 20 MB/s, at most 200 MB.
LOADS = """
import time
import lightning_ncclsafe
def expand(rows):
    print(flush=True)
    for _ in range(100):
        rows.append(bytearray(2_000_000)); time.sleep(0.1)  # it is here
expand([])
input()
"""


class Waiting:
    """Rank 1 of 2, in this process, which waits in ``init_process_group``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float) -> None:
        self.folder, self.port = folder, f"no-port-{os.getpid()}"
        self.said: list[str] = []
        self.ended = threading.Event()
        self.ended_with: dict[str, Any] = {}
        monkeypatch.setattr(after_verdict, "end_run", lambda **how: (self.ended_with.update(how), self.ended.set()))
        tracker = ActionTracker()
        trainer = TrainerProbe(SimpleNamespace(state=SimpleNamespace(stage=None)))
        self.action = tracker.action("init_process_group")
        self.exchange = DirectoryExchange(folder / "init")
        self.guard = Guard(
            place=Place(rank=1, local_rank=1, world_size=2, local_world_size=2, master_port=self.port),
            limits=Limits(suspect_after_s=1000, timeout_s=1000, on_timeout="abort", phases_s={"init": timeout_s}),
            report_dir=folder / "reports",
            exchange=self.exchange,
            probe=RankProbe(rank=1, local_rank=1, tracker=tracker, trainer=trainer),
            say=self.said.append,
        )

    def wait(self) -> None:
        with self.action:
            self.guard.start()
            assert self.ended.wait(20), self.said

    def leaves_files(self) -> bool:
        """Whether what ranks have said stays for one that is on its way."""
        return bool(self.ended_with["may_others_come"]())

    def report(self) -> Diagnosis:
        (path,) = self.folder.glob("reports/*/report.json")
        return read_report(path.read_bytes())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another faster, and those that cannot answer are not waited for."""
    monkeypatch.setattr(local_ranks, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(local_ranks, "_LOOK_S", 0.6)
    monkeypatch.setattr(gathering, "ANSWER_S", 0.1)
    monkeypatch.setattr(gathering, "PATIENCE_S", 0.2)


@pytest.fixture
def late(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Rank 0, which has not come to its Trainer."""
    script = tmp_path / "train.py"
    script.write_text(LOADS)
    job = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": f"no-port-{os.getpid()}"}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | job, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("soon")
def test_the_start_ends_with_the_line_and_the_growth_of_the_rank_that_has_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: "subprocess.Popen[bytes]"
) -> None:
    # Nobody has looked around before the limit: it is found, and looked at twice, for the report.
    monkeypatch.setattr(local_ranks, "_PATIENCE_S", 100.0)
    waiting = Waiting(tmp_path, monkeypatch, timeout_s=1.5)
    began_s = time.monotonic()
    waiting.wait()
    assert time.monotonic() - began_s >= 1.5
    assert waiting.leaves_files()
    late.kill()
    late.wait()
    assert not waiting.leaves_files()
    waiting.guard.close()
    report = waiting.report()
    finding = report.findings[0]
    assert report.job.incident.kind is IncidentKind.TIMEOUT
    assert (finding.rule, finding.ranks) == ("late-at-init", (0,))
    assert finding.location == f"{tmp_path / 'train.py'}:7 in expand"
    assert "is at train.py:7 in expand, with " in finding.summary
    assert ", growing by " in finding.summary
    assert finding.summary.endswith("while rank 1 waits for it in init_process_group.")
    (seen,), (own,) = report.job.witnessed, report.job.ranks
    assert own.host_facts.memory_growth_bytes_per_s is not None
    assert seen.memory_growth_bytes_per_s is not None and 2_000_000 < seen.memory_growth_bytes_per_s < 40_000_000


@pytest.mark.usefixtures("soon")
def test_one_that_dies_while_it_loads_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: "subprocess.Popen[bytes]"
) -> None:
    waiting = Waiting(tmp_path, monkeypatch, timeout_s=900)
    met = threading.Event()
    monkeypatch.setattr(local_ranks.LocalRanks, "_know", _then(local_ranks.LocalRanks._know, met.set))

    def kill() -> None:
        assert met.wait(10)
        late.kill()
        late.wait()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        waiting.wait()
    finally:
        killer.join()
        waiting.guard.close()
    assert not waiting.leaves_files()
    finding = waiting.report().findings[0]
    assert (finding.rule, finding.ranks) == ("dead-rank", (0,))
    assert waiting.said[-1].endswith("the run cannot continue, so the guard ends it")


def _then(call: object, act: object) -> object:
    def both(*args: object) -> None:
        call(*args)  # type: ignore[operator]
        act()  # type: ignore[operator]

    return both


def test_one_that_comes_when_the_others_have_given_up_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(tmp_path, monkeypatch, timeout_s=0.5)
    incident = Incident(number=1, kind=IncidentKind.TIMEOUT, opened_by=0, opened_ns=time.time_ns())
    verdict = Verdict(incident=incident, answer="Rank 1 has not joined.", ends_run=True)
    waiting.exchange.set("log/0", codec.encode(IncidentEntry(incident=incident)))
    waiting.exchange.set("round/0/verdict", codec.encode(verdict))
    waiting.exchange.set("round/0/here/0", b"")
    waiting.wait()
    assert not waiting.leaves_files(), "nobody else is to come"
    waiting.guard.close()
    assert waiting.said == ["rank 1 started too late; the other ranks gave up: Rank 1 has not joined."]


def test_a_recorder_is_read_at_the_start_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full of another call's collectives it takes a tenth of a second, and a program may make any number of calls."""
    used, read, said = [GroupCalls("0", "gloo", 3), GroupCalls("7", "mpi", 0)], list[float](), list[str]()
    monkeypatch.setattr(guard_module, "_asked_about", set())
    monkeypatch.setattr(process_groups, "group_calls", lambda: used)
    unrecorded = (UnrecordedGroup(name="0", why=NotRecorded.UNKNOWN_BACKEND, backend="mpi", calls=3),)

    def begin_call(world_size: int = 2) -> None:
        guard: Any = Guard.__new__(Guard)
        guard._watchdog = SimpleNamespace(wake=lambda: None)
        guard._own = SimpleNamespace(
            place=Place(rank=0, local_rank=0, world_size=world_size, local_world_size=1),
            connection=SimpleNamespace(newest=MemoryExchange()),
            probe=SimpleNamespace(
                snapshot=lambda idle_s: (read.append(idle_s), SimpleNamespace(unrecorded=unrecorded))[1]
            ),
            say=said.append,
        )
        guard.set_up()

    begin_call(world_size=1)
    assert not read
    begin_call()
    begin_call()
    assert (len(read), len(said)) == (1, 1)
    used[1] = GroupCalls("7", "mpi", 1)
    begin_call()
    assert len(read) == 2
