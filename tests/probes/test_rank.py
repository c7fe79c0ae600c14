"""The probe of a rank: whatever hangs or fails in it, the rest is told, in time, and what is missing is said."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from own_threads import own_threads
from polling import until

from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.facts import (
    ExceptionFacts,
    ExitCall,
    Frame,
    Group,
    HostFacts,
    Limited,
    Phase,
    ProcessFacts,
    RankFacts,
    TimeoutLine,
    TrainerFacts,
)
from lightning_ncclsafe.probes import rank
from lightning_ncclsafe.probes.host.resources import HostProbe
from lightning_ncclsafe.probes.process import flight_recorder, stacks, traceback_signal
from lightning_ncclsafe.probes.process.growth import MemoryGrowth
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.rank_info import RankInfo
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.probes.trainer.steps import StepRecord

# Nothing comes near it unless a test makes it.
AMPLE_S = 20.0
BEFORE_HOST_FACTS = [
    *(
        "trainer",
        "steps",
        "caught",
        "failed_save",
        "stack",
        "breakpoint_at",
        "thread_stack",
        "collectives",
        "units",
        "loaders",
    ),
    *("loggers", "thread_lock", "awaited_thread", "peers"),
]
AFTER_HOST_FACTS = [
    *("file_lock", "held_locks", "awaited_file", "reads_alone", "awaited_processes"),
    *("workers", "storage", "versions"),
    *("ended_at", "validates_at", "set_at", "timeouts_at", "new_groups_at"),
    *("data_ends_at", "exit_calls", "own_path_at", "left_open_at", "unordered_groups_at"),
]


@pytest.fixture
def probe() -> Iterator[RankProbe]:
    tracker = ActionTracker()
    tracker.enter("setup")
    made = RankProbe(rank=3, local_rank=1, tracker=tracker, trainer=TrainerProbe(SimpleNamespace()))
    yield made
    made.close()


def fail(*_: object) -> HostFacts:
    raise PermissionError("not for you")


@pytest.mark.parametrize(
    ("state", "error", "is_searched"),
    [
        ("gone", "", True),
        ("zombie", "", True),
        ("sleeping", "", False),
        ("sleeping", "DataLoader worker (pid(s) 7) exited unexpectedly", True),
    ],
)
def test_calls_that_end_a_process_are_searched_for_if_one_has_ended(
    probe: RankProbe, monkeypatch: pytest.MonkeyPatch, state: str, error: str, is_searched: bool
) -> None:
    calls = (ExitCall(code="os._exit(3)", place="/home/me/train.py:9 in watch", status=3),)
    monkeypatch.setattr("lightning_ncclsafe.probes.rank.exit_calls", lambda: calls)
    monkeypatch.setattr(probe.peers, "look", lambda: (ProcessFacts(pid=7, rank=1, state=state),))
    probe.exception = ExceptionFacts(type="RuntimeError", message=error) if error else None
    facts = probe.look(1.0, deadline_s=AMPLE_S)
    assert facts.exit_calls == (calls if is_searched else ())


def test_a_look_collects_all_facts(probe: RankProbe) -> None:
    facts = probe.look(2.5, deadline_s=AMPLE_S)
    assert (facts.rank, facts.local_rank, facts.host, facts.pid) == (3, 1, socket.gethostname(), os.getpid())
    assert (facts.progress.phase, facts.progress.idle_s) == (Phase.INIT, 2.5)
    assert [action.name for action in facts.progress.actions] == ["setup"]
    assert facts.stack[-1].code and any(frame.file == __file__ for frame in facts.stack)
    assert facts.host_facts.rss_bytes
    assert facts.versions["torch"]
    assert facts.missing == ()
    assert not own_threads("look")


def test_a_look_finds_the_file_lock_of_the_main_thread(probe: RankProbe, tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    seen: list[RankFacts] = []
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline()

        def is_seen() -> bool:
            seen.append(probe.look(1.0, deadline_s=AMPLE_S))
            return seen[-1].file_lock is not None

        def look(ends: IO[bytes]) -> None:
            try:
                until(is_seen)
            finally:
                ends.close()

        thread = threading.Thread(target=look, args=(holder.stdin,))
        thread.start()
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            thread.join()
            # The test runner has locks of its own.
            assert str(path) in probe.look(1.0, deadline_s=AMPLE_S).held_locks
    lock = seen[-1].file_lock
    assert lock is not None
    assert (lock.path, [one.pid for one in lock.holders]) == (str(path), [holder.pid])
    assert str(path) not in seen[-1].held_locks


_HOLDS = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print(1, flush=True); sys.stdin.read()"
)


def test_a_hanging_probe_loses_only_later_facts(probe: RankProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, release = threading.Event(), threading.Event()

    def hang(_: HostProbe) -> HostFacts:
        hangs.set()
        release.wait()
        return HostFacts()

    monkeypatch.setattr(HostProbe, "read", hang)
    try:
        first = probe.look(1.0, deadline_s=0.05)
        assert hangs.wait(10)
        (stuck,) = own_threads("look")
        assert first.stack and first.progress.actions
        assert first.host_facts == HostFacts() and not first.versions
        late = [f"{name}: no answer in time" for name in ("host_facts", *AFTER_HOST_FACTS)]
        assert list(first.missing[-len(late) :]) == late

        second = probe.look(2.0, deadline_s=AMPLE_S)
        assert own_threads("look") == [stuck]
        assert second.stack and second.progress.idle_s == 2.0
        assert [text.partition(":")[0] for text in second.missing] == [
            *BEFORE_HOST_FACTS,
            "host_facts",
            *AFTER_HOST_FACTS,
        ]
    finally:
        release.set()
    stuck.join(10)
    assert probe.look(3.0, deadline_s=AMPLE_S).missing == ()


def test_slow_probes_are_awaited_while_some_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded host no deadline is met although nothing hangs."""
    host_goes_on, lock_is_read, lock_goes_on = (threading.Event() for _ in range(3))
    deadlines: list[float] = []

    class Late(SideThread):
        def answer(self, within_s: float) -> object:
            """The first deadline is over when one slow probe has answered, and the next one has not."""
            deadlines.append(within_s)
            host_goes_on.set()
            if len(deadlines) == 1:
                assert lock_is_read.wait(AMPLE_S)
                raise UnansweredError
            lock_goes_on.set()
            return super().answer(AMPLE_S)

    def read_lock() -> None:
        lock_is_read.set()
        lock_goes_on.wait()

    monkeypatch.setattr(rank, "SideThread", Late)
    monkeypatch.setattr(HostProbe, "read", lambda _: (host_goes_on.wait(), HostFacts())[1])
    monkeypatch.setattr(rank.lock_waits, "waited_for", read_lock)
    made = RankProbe(rank=3, local_rank=1, tracker=ActionTracker(), trainer=TrainerProbe(SimpleNamespace()))
    with closing(made):
        facts = made.look(1.0)
    assert facts.missing == () and facts.versions["torch"]
    assert deadlines == [0.5, 0.5]


def test_a_slow_probe_that_computes_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded host a probe may get so little of a core that it misses a deadline, and another one."""
    deadlines: list[float] = []

    class Late(SideThread):
        def answer(self, within_s: float) -> object:
            deadlines.append(within_s)
            if len(deadlines) < 3:
                raise UnansweredError
            return super().answer(AMPLE_S)

    ran_s = iter((0.02, 0.04))
    monkeypatch.setattr(rank, "SideThread", Late)
    monkeypatch.setattr(rank, "thread_ran_s", lambda thread_id: next(ran_s))
    monkeypatch.setattr(rank.TrainerProbe, "facts", lambda _: (until(lambda: len(deadlines) == 3), None)[1])
    made = RankProbe(rank=3, local_rank=1, tracker=ActionTracker(), trainer=TrainerProbe(SimpleNamespace()))
    with closing(made):
        facts = made.look(1.0)
    assert facts.missing == () and facts.versions["torch"]
    assert len(deadlines) == 3


def test_a_failing_probe_is_reported_and_the_others_run(probe: RankProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostProbe, "read", fail)
    monkeypatch.setattr(flight_recorder.FlightRecorder, "read", fail)
    facts = probe.look(1.0, deadline_s=AMPLE_S)
    assert facts.missing == (
        "flight recorder: PermissionError: not for you",
        "host_facts: PermissionError: not for you",
    )
    assert facts.host_facts == HostFacts()
    assert facts.versions["torch"]


def test_a_search_in_the_source_that_fails_is_reported_and_loses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    told, given = TrainerFacts(settings={"max_steps": "5"}), {"max_steps": ("/home/me/train.py:7 in main",)}
    limit = TimeoutLine(place="/home/me/train.py:9 in main", call="new_group", limits=(Limited.GROUP,), timeout_ms=4000)
    monkeypatch.setattr(TrainerProbe, "facts", lambda _: told)
    monkeypatch.setattr(TrainerProbe, "set_at", lambda _: given)
    monkeypatch.setattr(StepRecord, "timeouts_at", lambda _: (limit,))
    of: Any = SimpleNamespace()
    steps = StepRecord(of)
    with closing(
        RankProbe(rank=0, local_rank=0, tracker=ActionTracker(), trainer=TrainerProbe(of), steps=steps)
    ) as probe:
        facts = probe.look(1.0, deadline_s=AMPLE_S)
        assert (facts.trainer, facts.steps.timeouts_at) == (replace(told, set_at=given), (limit,))
        assert facts.missing == ()
        monkeypatch.setattr(TrainerProbe, "set_at", fail)
        monkeypatch.setattr(StepRecord, "timeouts_at", fail)
        facts = probe.look(1.0, deadline_s=AMPLE_S)
    assert (facts.trainer, facts.steps) == (told, steps.facts())
    assert facts.missing == ("set_at: PermissionError: not for you", "timeouts_at: PermissionError: not for you")


def test_an_exception_has_its_source_line(probe: RankProbe) -> None:
    try:
        raise ValueError("broken")  # <- here
    except ValueError as error:
        probe.exception = stacks.exception_facts(error, is_consequence=False)
    raised = probe.look(0.0, deadline_s=AMPLE_S).exception
    assert raised is not None
    assert (raised.type, raised.stack[-1].code) == ("ValueError", 'raise ValueError("broken")  # <- here')


def test_peers_are_examined_and_are_not_workers(probe: RankProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(rank, "child_processes", lambda besides: asked.append(list(besides)) or [])
    probe.peers.known = (RankInfo(rank=5, host="h", pid=os.getpid(), started=probe.info.started),)
    facts = probe.look(0.0, deadline_s=AMPLE_S)
    assert [(peer.rank, peer.pid) for peer in facts.peers] == [(5, os.getpid())]
    assert facts.peers[0].state in ("running", "sleeping")
    assert asked == [[os.getpid()]]


def test_only_four_workers_are_asked_for_their_stacks(probe: RankProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(rank, "child_processes", lambda besides: [101, 102, 103, 104, 105, 106])
    monkeypatch.setattr(rank, "look_at", lambda pid: ProcessFacts(pid=pid, state="sleeping"))
    monkeypatch.setattr(traceback_signal, "ask", lambda pid, armed, owner: asked.append(pid) or ())
    facts = probe.look(0.0, deadline_s=AMPLE_S)
    assert [worker.pid for worker in facts.workers] == [101, 102, 103, 104, 105, 106]
    assert asked == [101, 102, 103, 104]


@pytest.mark.parametrize("state, asked", [("running", 3), ("sleeping", 1)])
def test_a_worker_that_runs_in_a_loop_is_asked_again(
    probe: RankProbe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, asked: int
) -> None:
    path = tmp_path / "data.py"
    path.write_text("def crop(mask):\n    while not mask.any():\n        left = draw(mask)\n    return mask\n")
    stacks_ = iter([(Frame(file=str(path), line=line, function="crop", user=True),) for line in (3, 2, 3)])
    monkeypatch.setattr(rank, "child_processes", lambda besides: [101])
    monkeypatch.setattr(rank, "look_at", lambda pid: ProcessFacts(pid=pid, state=state))
    monkeypatch.setattr(traceback_signal, "ask", lambda pid, armed, owner: next(stacks_))
    (worker,) = probe.look(0.0, deadline_s=AMPLE_S).workers
    assert worker.stack[-1].line == (2 if asked == 3 else 3)
    assert len([*stacks_]) == 3 - asked


def test_own_growth_is_known_after_noting_memory(probe: RankProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, noted = 100.0, []
    monkeypatch.setattr(rank.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(probe, "_growth", MemoryGrowth(clock=lambda: now_s))
    monkeypatch.setattr(rank, "own_memory", lambda: noted.append(now_s) or (1_000_000_000, 0))
    monkeypatch.setattr(HostProbe, "read", lambda _: HostFacts(rss_bytes=1_060_000_000, process_swap_bytes=3_000_000))
    assert probe._host_facts().memory_growth_bytes_per_s is None
    monkeypatch.setattr(probe, "_growth", MemoryGrowth(clock=lambda: now_s))
    for _ in range(10):
        probe.note_memory()
        now_s += 0.5
    assert noted == [100.0, 102.0, 104.0]
    now_s = 106.0
    facts = probe._host_facts()
    assert (facts.memory_growth_bytes_per_s, facts.swap_growth_bytes_per_s) == (30_000_000, 1_500_000)


def test_the_position_changes_with_the_hooks(probe: RankProbe) -> None:
    before = probe.position()
    assert probe.position() == before
    with probe._tracker.action("step"):
        assert probe.position() != before


def test_peers_can_ask_until_close(probe: RankProbe) -> None:
    assert (probe.info.rank, probe.info.host, probe.info.pid) == (3, socket.gethostname(), os.getpid())
    armed = traceback_signal.armed_in(os.getpid())
    assert armed is not None and os.fstat(armed.fd).st_nlink == 0
    signums = armed.python_signum, armed.c_signum
    assert all(traceback_signal._handles(os.getpid(), signum) for signum in signums)
    probe.close()
    assert traceback_signal.armed_in(os.getpid()) is None
    assert not any(traceback_signal._handles(os.getpid(), signum) for signum in signums)
    assert {signal.getsignal(signum) for signum in signums} == {signal.SIG_DFL}


def test_a_guard_reuses_and_releases_the_signal_of_the_import() -> None:
    traceback_signal.arm_early({"LOCAL_RANK": "0", "WORLD_SIZE": "2"})
    early = traceback_signal.armed_in(os.getpid())
    assert early is not None
    probe = RankProbe(rank=0, local_rank=0, tracker=ActionTracker(), trainer=TrainerProbe(SimpleNamespace()))
    assert traceback_signal.armed_in(os.getpid()) == early
    probe.close()
    assert traceback_signal.armed_in(os.getpid()) is None
    assert not traceback_signal._handles(os.getpid(), early.c_signum)


@pytest.mark.parametrize(("moves", "reads"), [(0, 1), (1, 2), (99, 3)])
def test_what_a_rank_that_goes_on_has_recorded_is_read_again(
    probe: RankProbe, monkeypatch: pytest.MonkeyPatch, moves: int, reads: int
) -> None:
    """Otherwise its stack would show it in a call that its recorder does not have."""
    called, read = [0], []
    main_thread_stack = stacks.main_thread_stack

    def read_recorder(_: flight_recorder.FlightRecorder) -> tuple[tuple[Group, ...], tuple[()]]:
        read.append(called[0])
        return (Group(name="0", last_enqueued=called[0]),), ()

    def stack_of_next_call() -> tuple[Frame, ...]:
        called[0] += called[0] < moves
        return main_thread_stack()

    monkeypatch.setattr(flight_recorder.FlightRecorder, "read", read_recorder)
    monkeypatch.setattr(flight_recorder, "position", lambda: called[0])
    monkeypatch.setattr(stacks, "main_thread_stack", stack_of_next_call)
    facts = probe.snapshot(0.0)
    assert len(read) == reads and facts.stack
    assert facts.groups[0].last_enqueued == read[-1]


def test_finished_is_forwarded_to_the_trainer_probe(probe: RankProbe) -> None:
    assert not probe.finished
    probe.finished = True
    facts: RankFacts = probe.snapshot(0.0)
    assert facts.progress.phase is Phase.FINISHED
