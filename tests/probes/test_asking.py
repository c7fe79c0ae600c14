"""What a peer answers: its stack, and whether its GIL is held, by what its guard's threads and its main thread do."""

import itertools
import os

import pytest

from lightning_ncclsafe.facts import COLLECTOR, Frame
from lightning_ncclsafe.probes import peers
from lightning_ncclsafe.probes.peers import ask
from lightning_ncclsafe.probes.process import garbage, traceback_signal
from lightning_ncclsafe.probes.process.main_thread import ThreadLook
from lightning_ncclsafe.probes.process.traceback_signal import Armed
from lightning_ncclsafe.probes.rank_info import RankInfo

ARMED = Armed(python_signum=61, c_signum=60, fd=9)


@pytest.mark.parametrize(
    ("guard_waits", "state", "runs_s", "gil_held"),
    [
        pytest.param([True, True], "running", 0.05, True, id="computes-in-C"),
        pytest.param([True] * peers._MOST_LOOKS, "sleeping", 0.0, True, id="slept-in-C-until-the-signal"),
        pytest.param([True, False], "sleeping", 0.0, False, id="sleeps-while-others-take-turns"),
        pytest.param([True, False, True], "running", 0.05, True, id="its-C-has-called-the-handler"),
        pytest.param([True, *[False] * peers._LOOKS_AFTERWARDS], "running", 0.05, False, id="has-returned-from-C"),
        pytest.param([True] * 4, "running", 0.011, True, id="computes-in-C-on-a-starved-host"),
        pytest.param([True, False], "running", 0.011, False, id="has-released-it-on-a-starved-host"),
        # It may execute bytecode, and get no time on a core to release it.
        pytest.param([True] * peers._MOST_LOOKS, "running", 0.006, False, id="waits-for-a-core"),
        pytest.param([True] * peers._MOST_LOOKS, "sleeping", 0.006, False, id="takes-turns-with-other-threads"),
        # For storage, for a driver that does not answer, or for its next tick.
        pytest.param([False], "running", 0.05, False, id="guard-waits-for-something-else"),
        pytest.param([False], "sleeping", 0.0, False, id="both-wait-for-something-else"),
    ],
)
@pytest.mark.parametrize("has_guard", [True, False])
def test_the_gil_is_held_if_the_guard_waits_for_it_in_vain(
    monkeypatch: pytest.MonkeyPatch,
    guard_waits: list[bool],
    state: str,
    runs_s: float,
    gil_held: bool,
    has_guard: bool,
) -> None:
    line = Frame(file="/home/me/train.py", line=9, function="training_step", user=True)
    waits = iter(guard_waits)
    looks = (ThreadLook(state=state, ran_s=ran_s) for ran_s in itertools.accumulate(itertools.repeat(runs_s)))
    monkeypatch.setattr(peers, "look_at_main_thread", lambda pid: next(looks))
    monkeypatch.setattr(peers, "waits_for_gil", lambda pid, threads: next(waits) and (pid, threads) == (77, (79, 80)))
    monkeypatch.setattr(peers, "look_at_others", lambda pid: {})
    monkeypatch.setattr(traceback_signal, "armed_in", lambda pid: ARMED)
    monkeypatch.setattr(traceback_signal, "ask", lambda pid, armed: (line,))
    peer = RankInfo(rank=1, host="h", pid=77, guard_threads=(79, 80), has_guard=has_guard)
    assert ask(peer) == ((line,), gil_held and has_guard)
    monkeypatch.setattr(traceback_signal, "ask", lambda pid, armed: ())
    waits = itertools.repeat(True)
    assert ask(peer) == ((), False), "the line is not known"


@pytest.mark.parametrize(
    ("looks", "states", "is_collecting"),
    [
        pytest.param((True, True), ("running", "running"), True, id="collects"),
        pytest.param((True, True), ("disk-sleep", "disk-sleep"), True, id="collects-what-is-swapped-out"),
        pytest.param((True, True), ("sleeping", "sleeping"), False, id="another-thread-collects"),
        pytest.param((True, True), ("sleeping", "running"), False, id="a-signal-has-ended-the-sleep"),
        pytest.param((True, True), ("running", "sleeping"), False, id="waits-for-the-GIL-now"),
        pytest.param((True, False), ("running", "running"), False, id="has-collected"),
        pytest.param((False,), ("running", "running"), False, id="did-not-collect-before"),
    ],
)
def test_a_peer_that_collects_garbage_has_the_collector_on_its_stack(
    monkeypatch: pytest.MonkeyPatch, looks: tuple[bool, ...], states: tuple[str, ...], is_collecting: bool
) -> None:
    line = Frame(file="/home/me/train.py", line=9, function="training_step", user=True)
    answers = iter(looks)
    monkeypatch.setattr(garbage, "collects_garbage", lambda pid: next(answers))
    seen = iter(ThreadLook(state=state) for state in states)
    monkeypatch.setattr(peers, "look_at_main_thread", lambda pid: next(seen))
    monkeypatch.setattr(traceback_signal, "armed_in", lambda pid: ARMED)
    monkeypatch.setattr(traceback_signal, "ask", lambda pid, armed: (line,))
    stack, _ = ask(RankInfo(rank=1, host="h", pid=77, has_guard=False))
    assert (stack[-1].file == COLLECTOR) is is_collecting
    assert stack[0] == line


@pytest.mark.parametrize(
    ("works", "gil_held"),
    [
        ([{}, {}, {}], True),
        # It may execute bytecode, and wait for a core between.
        ([{}, {8: 0.006}, {}], False),
        ([{8: 0.1}], True),
        ([{8: 0.008}, {8: 0.008}, {8: 0.008}], True),
        ([{8: 0.1, 9: 0.01}, {8: 0.1}, {8: 0.1}], False),
        ([{8: 0.006}, {9: 0.1}, {}], False),
    ],
    ids=[
        "none works",
        "one works a little",
        "one works",
        "one works on a starved host",
        "two work",
        "one, then another",
    ],
)
def test_while_the_main_thread_sleeps_another_one_may_hold_the_gil(
    monkeypatch: pytest.MonkeyPatch, works: list[dict[int, float]], gil_held: bool
) -> None:
    line = Frame(file="/home/me/train.py", line=9, function="training_step", user=True)
    monkeypatch.setattr(peers, "look_at_main_thread", lambda pid: ThreadLook(state="sleeping", ran_s=1.0))
    monkeypatch.setattr(peers, "waits_for_gil", lambda pid, threads: True)
    none = dict.fromkeys((8, 9), ThreadLook(state="sleeping", ran_s=0.0))
    after = ({**none, **{n: ThreadLook(state="sleeping", ran_s=s) for n, s in each.items()}} for each in works)
    looks = itertools.cycle(itertools.chain.from_iterable((none, each) for each in after))
    monkeypatch.setattr(peers, "look_at_others", lambda pid: next(looks))
    monkeypatch.setattr(traceback_signal, "armed_in", lambda pid: ARMED)
    monkeypatch.setattr(traceback_signal, "ask", lambda pid, armed: (line,))
    assert ask(RankInfo(rank=1, host="h", pid=77)) == ((line,), gil_held)


def test_a_peer_without_a_signal_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traceback_signal, "armed_in", lambda _: None)
    monkeypatch.setattr(
        traceback_signal, "ask", lambda *_: pytest.fail("it would die of a signal that it does not handle")
    )
    assert ask(RankInfo(rank=1, host="h", pid=os.getpid())) == ((), False)
