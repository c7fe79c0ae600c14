"""The line that ends a process, told from its status and from the source: named only where one line agrees."""

from dataclasses import replace
from typing import Any

import builders
import machine_scenes
import pytest
import scenes
from builders import GLOO, user

from lightning_ncclsafe.facts import EndedProcess, ExitCall, LastSeen, Phase, Progress
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.judging import judge

WATCH = ExitCall(code="os._exit(3)", place="/home/me/train.py:9 in watch", status=3)
OTHER = ExitCall(code="os._exit(4)", place="/home/me/train.py:19 in stop", status=4)
COMPUTED = ExitCall(code="os._exit(code)", place="/home/me/train.py:29 in leave")
RAISED = ExitCall(code="sys.exit(3)", place="/home/me/train.py:39 in start", status=3, raises=True)
KILLS = ExitCall(code="os.kill(os.getpid(), 9)", place="/home/me/train.py:49 in end", signal="SIGKILL")
ALARM = ExitCall(code="signal.alarm(5)", place="/home/me/data.py:18 in limit", signal="SIGALRM")
SEEN = LastSeen(progress=Progress(phase=Phase.TRAIN, idle_s=1.2), stack=(user("training_step", 40),), stayed=1)


def gone(calls: tuple[ExitCall, ...], *ends: dict[str, Any], timeout_s: float = 30.0) -> Finding:
    """Rank 0 is left of some, and has searched for calls that end a process."""
    seen = {"last_seen": SEEN}
    peers = tuple(replace(builders.process(rank, "gone"), **seen | end) for rank, end in enumerate(ends, start=1))
    rank = replace(GLOO.waiting(0, seq=61), peers=peers, exit_calls=calls)
    job = replace(scenes.one_rank_was_killed(GLOO), ranks=(rank,), world_size=len(ends) + 1)
    return judge(replace(job, incident=replace(job.incident, shortest_timeout_s=timeout_s))).findings[0]


@pytest.mark.parametrize("others", [(), (OTHER,), (RAISED,), (KILLS,), (OTHER, RAISED, KILLS)])
def test_the_only_call_with_the_status_is_named(others: tuple[ExitCall, ...]) -> None:
    finding = gone((WATCH, *others), {"exit_code": 3})
    assert (finding.rule, finding.confidence, finding.location) == ("dead-rank", Confidence.LIKELY, WATCH.place)
    text = "has exited with status 3, as after os._exit(3) at train.py:9 in watch, last seen at train.py:40 in"
    assert text in finding.summary
    assert "train.py:9 in watch" in finding.remedy
    assert any("only os._exit(3) at train.py:9 in watch" in item.text for item in finding.evidence)


@pytest.mark.parametrize(
    ("calls", "end"),
    [
        ((), {"exit_code": 3}),
        ((OTHER,), {"exit_code": 3}),
        ((WATCH, replace(WATCH, place="/home/me/net.py:5 in stop")), {"exit_code": 3}),
        ((WATCH, COMPUTED), {"exit_code": 3}),
        ((COMPUTED,), {"exit_code": 3}),
        ((RAISED,), {"exit_code": 3}),
        ((WATCH,), {}),
        ((COMPUTED,), {}),
        ((WATCH,), {"ended_by": "SIGKILL"}),
        ((KILLS,), {"ended_by": "SIGKILL"}),
        ((ALARM, replace(ALARM, place="/home/me/net.py:5 in limit")), {"ended_by": "SIGALRM"}),
        ((replace(WATCH, status=0),), {"exit_code": 0, "last_seen": None}),
        ((replace(WATCH, status=1),), {"exit_code": 1, "last_seen": None}),
    ],
)
def test_no_line_is_named_where_another_may_have_ended_it(calls: tuple[ExitCall, ...], end: dict[str, Any]) -> None:
    finding = gone(calls, end)
    assert (finding.rule, finding.confidence) == ("dead-rank", gone((), end).confidence)
    assert finding.location in ("", "/home/me/project/train.py:40 in training_step")
    assert "as after" not in finding.summary


@pytest.mark.parametrize(
    ("calls", "end", "told"),
    [
        ((COMPUTED, WATCH), {"exit_code": 3}, ["train.py:9", "train.py:29"]),
        ((WATCH, OTHER, KILLS), {}, ["train.py:9", "train.py:19"]),
        ((WATCH, KILLS), {"ended_by": "SIGKILL"}, ["train.py:49"]),
        ((WATCH,), {"exit_code": 4}, []),
        ((WATCH,) * 5, {"exit_code": 3}, []),
    ],
)
def test_calls_that_may_have_ended_it_are_mentioned(
    calls: tuple[ExitCall, ...], end: dict[str, Any], told: list[str]
) -> None:
    finding = gone(calls, end)
    texts = [item.text for item in finding.evidence if item.source == "source code"]
    assert [text.partition(" at ")[2].partition(" in ")[0] for text in texts] == told
    assert all(text.endswith(" may end a process in this way.") for text in texts)


def test_the_only_timer_that_sends_the_signal_is_named() -> None:
    finding = gone((WATCH, ALARM), {"ended_by": "SIGALRM"})
    assert (finding.rule, finding.confidence, finding.location) == ("dead-rank", Confidence.LIKELY, ALARM.place)
    assert "was ended by SIGALRM, as after signal.alarm(5) at data.py:18 in limit" in finding.summary
    assert finding.remedy.startswith("A timer (signal.alarm(5) at data.py:18 in limit) went off")
    assert any(item.text.endswith("sets a timer that sends SIGALRM.") for item in finding.evidence)


def test_the_line_that_leaves_a_timer_set_is_the_one_to_look_at() -> None:
    left = replace(ALARM, left_at="/home/me/data.py:24 in read")
    ended = EndedProcess(pid=11, signal="SIGALRM")
    for finding in (gone((left,), {"ended_by": "SIGALRM"}), worker((left,), ended=(ended,))):
        assert finding.location == left.left_at
        assert "as after signal.alarm(5) at data.py:18 in limit, which may be left set at data.py:24" in finding.summary
        assert any(
            "The timer is cancelled after the `return` at data.py:24 in read" in item.text for item in finding.evidence
        )


def test_the_only_line_that_limits_cpu_time_is_named() -> None:
    limits = replace(ALARM, code="resource.setrlimit(resource.RLIMIT_CPU, (2, 3))", signal="SIGXCPU")
    finding = gone((limits, ALARM), {"ended_by": "SIGXCPU"})
    assert (finding.rule, finding.confidence, finding.location) == ("dead-rank", Confidence.LIKELY, limits.place)
    assert finding.remedy.startswith("The process had used up its CPU time")
    assert any(item.text.endswith("at data.py:18 in limit limits CPU time.") for item in finding.evidence)


@pytest.mark.parametrize(
    ("signal", "count", "is_named"), [("SIGALRM", 1, True), ("SIGALRM", 2, False), ("SIGKILL", 1, False)]
)
def test_the_only_timer_that_ends_a_worker_is_named(signal: str, count: int, is_named: bool) -> None:
    known = tuple(replace(ALARM, place=f"data.py:{18 + number} in limit") for number in range(count))
    finding = worker(known, ended=(EndedProcess(pid=11, signal=signal),))
    assert (finding.rule, finding.location) == ("worker-died", known[0].place if is_named else "")
    assert finding.remedy.startswith("A timer (signal.alarm(5) at data.py:18 in limit) went off") is is_named


def test_a_rank_that_was_seen_where_it_may_have_killed_itself_is_told_to_look_there_first() -> None:
    there = replace(SEEN, stack=(user("training_step", 40), user("end", 48)))
    finding = gone((KILLS, WATCH), {"ended_by": "SIGKILL", "last_seen": there})
    call = "os.kill(os.getpid(), 9) at train.py:49 in end"
    assert finding.remedy.startswith(
        f"Its own code may have sent the signal: look first at what leads to {call}. If it "
    )
    assert "out-of-memory killer, someone else, or its own code)" in finding.summary
    elsewhere = gone((KILLS, WATCH), {"ended_by": "SIGKILL"})
    assert elsewhere.remedy.startswith("SIGKILL comes from outside.")
    assert elsewhere.remedy.endswith(f" Its own code may also have sent the signal, if it came to {call}.")
    outside = gone((WATCH,), {"ended_by": "SIGKILL"})
    assert outside.remedy.startswith("SIGKILL comes from outside.")
    assert "out-of-memory killer or someone else)" in outside.summary


@pytest.mark.parametrize(
    ("calls", "status", "start"),
    [
        (
            (COMPUTED, replace(WATCH, code="os._exit(0)", status=0)),
            0,
            "It may have ended by os._exit(0) at train.py:9 in ",
        ),
        (
            (COMPUTED,),
            3,
            "It may have ended by os._exit(code) at train.py:29 in leave: look first at what leads there. ",
        ),
        ((), 3, "Look at the end of this rank's own output"),
        ((), 0, "It ended as if it had finished"),
    ],
)
def test_the_calls_that_fit_the_status_best_are_where_to_look(
    calls: tuple[ExitCall, ...], status: int, start: str
) -> None:
    assert gone(calls, {"exit_code": status}).remedy.startswith(start)


def test_ranks_may_have_loaded_other_code() -> None:
    def told(*loaded: tuple[ExitCall, ...]) -> str:
        ranks = (replace(GLOO.waiting(number, seq=61), exit_calls=calls) for number, calls in enumerate(loaded))
        peer = replace(builders.process(len(loaded), "gone"), last_seen=SEEN, exit_code=3)
        first, *others = ranks
        job = replace(scenes.one_rank_was_killed(GLOO), world_size=len(loaded) + 1)
        return judge(replace(job, ranks=(replace(first, peers=(peer,)), *others))).findings[0].location

    elsewhere = replace(WATCH, place="/home/me/net.py:5 in stop")
    assert told((WATCH,), (WATCH, OTHER), ()) == WATCH.place
    assert told((WATCH,), (WATCH, elsewhere)).endswith("in training_step")
    # One host has the code at another path; or it is loaded from two copies.
    copied = replace(WATCH, place="/scratch/train.py:9 in watch")
    assert told((WATCH,), (copied,)) == WATCH.place
    assert told((WATCH,), (WATCH, copied)).endswith("in training_step")


def test_a_rank_outside_of_its_trainer_may_have_raised_its_exit() -> None:
    assert gone((RAISED, OTHER), {"exit_code": 3, "last_seen": None}).location == RAISED.place
    left = replace(RAISED, status=0)
    finding = gone((left,), {"exit_code": 0, "last_seen": None})
    assert (finding.location, finding.evidence[-1].source) == ("", "source code")


def test_ranks_that_have_ended_alike_have_one_line() -> None:
    assert gone((WATCH, OTHER), {"exit_code": 3}, {"exit_code": 3}).location == WATCH.place
    assert gone((WATCH, OTHER), {"exit_code": 3}, {"exit_code": 4}).location == ""


@pytest.mark.parametrize(("timeout_s", "is_named"), [(30.0, True), (1.0, False), (0.0, False)])
def test_the_guard_may_have_ended_a_rank_that_was_at_its_limit(timeout_s: float, is_named: bool) -> None:
    call = replace(WATCH, code="os._exit(124)", status=124)
    finding = gone((call,), {"exit_code": 124}, timeout_s=timeout_s)
    assert (finding.location == call.place) == is_named
    assert ("the guard" in finding.summary) != is_named


def test_a_process_of_a_pool_is_no_worker_of_a_loader() -> None:
    """datasets.map(num_proc=2): its pool raises where the user calls it, and knows no process."""
    message = "One of the subprocesses has abruptly died during map operation.To debug the error, disable it."
    killed = (EndedProcess(pid=11, signal="SIGKILL", is_replaced=True),)
    finding = judge(machine_scenes.failed(GLOO, "RuntimeError", message, ended=killed)).findings[0]
    assert (finding.rule, finding.confidence, finding.ranks) == ("worker-died", Confidence.CERTAIN, (2,))
    assert finding.location.endswith("train.py:42 in training_step")
    told = "was killed by a signal (SIGKILL), and rank 2 has raised RuntimeError at train.py:42 in training_step, "
    assert told in finding.summary
    assert "num_proc" in finding.remedy and "prefetch_factor" not in finding.remedy
    unknown = judge(machine_scenes.failed(GLOO, "RuntimeError", message)).findings[0]
    assert "exited without an error message" in unknown.summary and "num_workers" not in unknown.remedy


def worker(
    calls: tuple[ExitCall, ...], *, done: tuple[int, ...] = (), ended: tuple[EndedProcess, ...] = (), how: str = ""
) -> Finding:
    """A loader's worker has ended, and the loader of its rank has raised."""
    failed = machine_scenes.failed(GLOO, "RuntimeError", f"DataLoader worker (pid(s) 11) exited unexpectedly{how}")
    ranks = tuple(
        replace(one, exit_calls=calls, machine=replace(one.machine, done=done, ended=ended)) if one.exception else one
        for one in failed.ranks
    )
    return judge(replace(failed, ranks=ranks)).findings[0]


LEAVES = replace(RAISED, code="sys.exit(0)", status=0)


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        (LEAVES, {"done": (11,)}),
        (WATCH, {"ended": (EndedProcess(pid=11, exit_code=3),)}),
        (RAISED, {"ended": (EndedProcess(pid=11, exit_code=3),)}),
        (RAISED, {"how": " with exit code 3"}),
    ],
)
def test_the_line_that_ends_a_worker_is_named(call: ExitCall, ends: dict[str, Any]) -> None:
    finding = worker((call, OTHER), **ends)
    assert (finding.rule, finding.confidence, finding.location) == ("worker-died", Confidence.LIKELY, call.place)
    assert f"as after {call.code} at train.py:" in finding.summary
    assert "sys.exit and os._exit" in finding.remedy


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        ((LEAVES,), {}),
        ((LEAVES,), {"done": (12,)}),
        ((LEAVES,), {"ended": (EndedProcess(pid=11, signal="SIGKILL"),)}),
        ((WATCH, RAISED), {"how": " with exit code 3"}),
        ((COMPUTED,), {"done": (11,)}),
        ((replace(RAISED, status=1),), {"how": " with exit code 1"}),
    ],
)
def test_no_line_is_named_of_a_worker_whose_end_is_not_known(calls: tuple[ExitCall, ...], ends: dict[str, Any]) -> None:
    finding = worker(calls, **ends)
    assert (finding.rule, finding.confidence) == ("worker-died", Confidence.CERTAIN)
    assert "as after" not in finding.summary and finding.location == ""


@pytest.mark.parametrize(("host", "words"), [("node-a", "was killed by SIGKILL"), ("node-b", "is gone")])
def test_only_a_child_on_its_own_host_is_the_rank_that_is_gone(host: str, words: str) -> None:
    """Containers give their processes the same few ids."""
    lost = builders.process(1, "gone")
    seen = replace(GLOO.waiting(0, seq=61), host="node-a", peers=(lost,))
    other = replace(GLOO.waiting(2, seq=61), host=host)
    other = machine_scenes.with_machine(other, ended=(EndedProcess(pid=lost.pid, signal="SIGKILL"),))
    job = replace(scenes.one_rank_was_killed(GLOO), ranks=(seen, other), world_size=3)
    assert f"The process of rank 1 {words}" in judge(job).findings[0].summary
