"""The thread of each rank: it shares and judges while training continues, ends in time, and fails without harm."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from own_threads import own_threads
from polling import until
from recorder_entries import BEGAN_NS, MS, Recorder, entry, nccl

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.collectives import mispaired, recording, timer
from lightning_ncclsafe.collectives.clocks import ClockSync
from lightning_ncclsafe.collectives.recording import PhaseHistory
from lightning_ncclsafe.collectives.timer import Timer
from lightning_ncclsafe.collectives.tree import Tree
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, SharedMemory
from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.timing.windows import Clock, Window, empty_window, joined


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "own_groups", lambda: [process_groups.OwnGroup("0", "default_pg", (0, 1))])
    monkeypatch.setattr(process_groups, "time_collectives_on_device", lambda: 0)
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)


class Said:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, text: str) -> None:
        self.said.append(text)


class Turns:
    """Paces a timer: a turn comes every 50 ms, or each when the test wants it."""

    def __init__(self) -> None:
        self.share_s = 0.5
        self.is_by_hand = False
        self.wanted, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def pause_s(self, **_: Any) -> float:
        if not self.is_by_hand:
            return 0.05
        self.done.release()
        self.wanted.acquire()
        return 0.0 if self.is_by_hand else 60.0


class Rank:
    """One rank's timer, and the parts that it is made with."""

    def __init__(self, pace: Turns, parts: dict[str, Any], phase_history: PhaseHistory, one: Timer) -> None:
        self.timer = one
        self.pace = pace
        self.phase_history = phase_history
        self.recording: recording.Recording = parts["Recording"]
        self.tree: Tree = parts["Tree"]
        self.clocks: ClockSync = parts["ClockSync"]

    def turn(self) -> None:
        """Lets it have one turn, and waits until that is over."""
        if self.pace.is_by_hand:
            self.pace.wanted.release()
        else:
            self.pace.is_by_hand = True
            self.timer.start()
        assert self.pace.done.acquire(timeout=20)

    def end(self) -> None:
        self.pace.is_by_hand = False
        self.pace.wanted.release()
        self.timer.end()


Make = Callable[..., Rank]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Rank] = []

    def make(
        rank: int,
        recorder: Recorder,
        exchange: Any,
        *,
        world_size: int = 2,
        say: Callable[[str], None] | None = None,
    ) -> Rank:
        pace, parts, phase_history = Turns(), {}, PhaseHistory()

        def keep(kind: type, **given: Any) -> Callable[..., Any]:
            def make_part(*args: Any, **kwargs: Any) -> Any:
                return parts.setdefault(kind.__name__, kind(*args, **{**kwargs, **given}))

            return make_part

        monkeypatch.setattr(timer, "Recording", keep(recording.Recording, since_ns=0, entries=recorder.entries))
        monkeypatch.setattr(timer, "Tree", keep(Tree))
        monkeypatch.setattr(timer, "ClockSync", keep(ClockSync))
        monkeypatch.setattr(timer, "Pace", lambda **_: pace)
        one = Timer(
            TimerSettings(every_n_steps=1),
            exchange,
            rank=rank,
            world_size=world_size,
            phase_history=phase_history,
            boot_id="this host",
            say=say or Said(),
        )
        made.append(Rank(pace, parts, phase_history, one))
        return made[-1]

    yield make
    for one in reversed(made):
        one.end()


def until_clocks_are_known(ranks: list[Rank]) -> None:
    for one in ranks:
        one.timer.start()
    until(lambda: all(one.clocks.clock().uncertainty_ns >= 0 for one in ranks))


def test_two_ranks_are_compared_and_end_together(make: Make) -> None:
    shared, recorders = SharedMemory(), [Recorder(), Recorder()]
    ranks = [make(rank, recorders[rank], MemoryExchange(shared)) for rank in range(2)]
    until_clocks_are_known(ranks)
    for rank, recorder in enumerate(recorders):
        recorder.add(*(entry(number, at_ms=number * 50 + rank * 10) for number in range(20)))
    scalars: dict[str, float] = {}
    until(lambda: scalars.update(ranks[0].timer.scalars()) or "collectives/all_reduce/skew_ms" in scalars)
    for recorder in recorders:
        recorder.add(*(entry(number, at_ms=number * 50) for number in range(20, 30)))
    ending = threading.Thread(target=ranks[1].end)
    ending.start()
    ranks[0].end()
    ending.join()
    summary = ranks[0].timer.analysis.summary()
    (op,) = summary.ops
    assert (op.count, op.compared, summary.lost, summary.left_out) == (30, 30, 0, 0)
    assert op.skew_s == pytest.approx(0.010 * 20 / 30)
    assert scalars["straggler/rank"] in (0.0, 1.0)
    assert ranks[0].timer.scalars() != {} == ranks[0].timer.scalars(), "each value is returned once"
    assert own_threads() == []
    assert not ranks[0].timer.is_off and not ranks[1].timer.is_off


def test_only_rank_0_prints_a_straggler_and_all_ranks_know_it(make: Make) -> None:
    shared, recorders, said = SharedMemory(), [Recorder(5000), Recorder(5000)], [Said(), Said()]
    ranks = [make(rank, recorders[rank], MemoryExchange(shared), say=said[rank]) for rank in range(2)]
    until_clocks_are_known(ranks)
    for rank, one in enumerate(ranks):
        one.phase_history.starts.extend(BEGAN_NS + number * 50 * MS for number in range(300))
        recorders[rank].add(*(entry(number, at_ms=number * 50 + 1 + rank * 30) for number in range(300)))
    until(lambda: said[0].said)
    until(lambda: ranks[1].timer.stragglers)
    assert [text for text in said[0].said if "rank 1" in text and "was last in" in text] == said[0].said
    assert len(said[0].said) == 1 and said[1].said == []
    for one in ranks:
        assert [straggler.rank for straggler in one.timer.stragglers] == [1]
        assert isinstance(one.timer.stragglers[0], Straggler)


def test_a_mispairing_is_told_once_with_the_line_of_each_side(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 have reduced while rank 1 broadcast; of equal calls the lowest rank says where."""
    shared, recorders, said = SharedMemory(), [Recorder() for _ in range(3)], [Said() for _ in range(3)]
    members = [process_groups.OwnGroup("0", "default_pg", (0, 1, 2))]
    monkeypatch.setattr(process_groups, "own_groups", lambda: members)
    ranks = [make(rank, recorders[rank], MemoryExchange(shared), world_size=3, say=said[rank]) for rank in range(3)]
    until_clocks_are_known(ranks)
    for rank, recorder in enumerate(recorders):
        recorder.add(*(nccl(number, at_ms=number, duration_ms=0.5) for number in range(5)))
        other = {**nccl(5, at_ms=5, duration_ms=0.5), "profiling_name": "nccl:broadcast"}
        recorder.add(other if rank == 1 else nccl(5, at_ms=5, duration_ms=0.5))
        recorder.add(*(nccl(number, at_ms=number, duration_ms=0.5) for number in range(6, 9)))

    def entries(*, stacks: bool) -> Iterable[list[dict[str, Any]]]:
        # Those of whichever rank's thread asks; each has its own lines.
        rank = next(number for number, one in enumerate(ranks) if one.timer._thread is threading.current_thread())
        frames = [{"filename": "/work/train.py", "line": 10 + rank, "name": "training_step"}]
        return [[{**known, "frames": frames} for known in recorders[rank].ring]]

    monkeypatch.setattr(mispaired.recorders, "entries", entries)
    until(lambda: said[0].said and said[1].said)
    until(lambda: ranks[2].timer._mispairing_told)
    ((what, where), (other_where,), nothing) = (one.said for one in said)
    assert "number 6 of the default group" in what
    assert "all_reduce of 40 bytes on ranks 0, 2 and broadcast of 40 bytes on rank 1" in what
    assert where == "Rank 0 called its all_reduce of 40 bytes in /work/train.py:10 in training_step"
    assert other_where == "Rank 1 called its broadcast of 40 bytes in /work/train.py:11 in training_step"
    assert nothing == []


@pytest.mark.parametrize("rank", [0, 1, 32])
def test_waiting_for_silent_peers_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 0 waits for all others, rank 32 for its members, and rank 1 for no rank."""
    monkeypatch.setattr(timer, "_LAST_S", 60.0 if rank == 1 else 0.4)
    one = make(rank, Recorder(), MemoryExchange(SharedMemory()), world_size=40)
    one.timer.start()
    began = time.monotonic()
    one.end()
    assert time.monotonic() - began < 30
    assert own_threads() == []


def test_ending_twice_or_before_the_start_is_harmless(make: Make) -> None:
    one = make(1, Recorder(), MemoryExchange())
    one.end()
    other = make(1, Recorder(), MemoryExchange())
    other.timer.start()
    other.end()
    other.end()
    assert own_threads() == []


@pytest.mark.parametrize("where", ["read", "pass_on", "add"])
def test_a_failure_disables_the_timer_and_is_printed_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("as the test wants")

    one = make(0, Recorder(), MemoryExchange(), world_size=1)
    part = {"read": one.recording, "pass_on": one.tree, "add": one.timer.analysis}[where]
    monkeypatch.setattr(part, where, fail)
    one.timer.start()
    until(lambda: one.timer.is_off)
    one.end()
    assert one.timer.is_off and one.timer.scalars() == {}
    said = capfd.readouterr().err
    assert said.count("as the test wants") == 1 and "the timing of collectives" in said
    assert own_threads() == []


class Broken(MemoryExchange):
    """Answers nothing; whether it is lost is to be said by the test."""

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__(shared)
        self.answers = False
        self.asked = self.told = 0
        """How often for windows and reports, and how often to take a report."""

    def set(self, key: str, value: bytes) -> None:
        self.told += key == "timing/stragglers"
        self._check([key])
        super().set(key, value)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        self._check([key])
        return super().set_if_absent(key, value)

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        self._check(keys)
        return super().get_many(keys)

    def _check_open(self) -> None:
        """A lost one may have another to go on with."""

    def _check(self, keys: Iterable[str]) -> None:
        self.asked += any(key.startswith("timing/") for key in keys)
        if not self.answers:
            raise ExchangeError("The job's store cannot be used: it did not answer.")


def test_a_missed_deadline_loses_no_calls(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory()
    exchange = Broken(shared)
    recorders = [Recorder(), Recorder()]
    first, second = make(0, recorders[0], MemoryExchange(shared)), make(1, recorders[1], exchange)
    for one in (first, second):
        one.pace.share_s = 0.0
        monkeypatch.setattr(one.clocks, "clock", lambda: Clock(offset_ns=0, uncertainty_ns=0))
    for turn in range(3):
        recorders[1].add(*(entry(number) for number in range(turn * 10, turn * 10 + 10)))
        second.turn()
    exchange.answers = True
    second.turn()
    recorders[0].add(*(entry(number) for number in range(30)))
    first.turn(), first.turn()
    (op,) = first.timer.analysis.summary().ops
    assert op.compared == 30 and not second.timer.is_off
    missing = first.timer.analysis.summary().missing
    assert [sentence for sentence in missing if "Rank 1: some timings could not be shared" in sentence]


def test_unshared_calls_do_not_pile_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, recorder, passed_on = Broken(SharedMemory()), Recorder(), []
    one = make(1, recorder, exchange)
    pass_on, one.pace.share_s = one.tree.pass_on, 0.0
    monkeypatch.setattr(one.tree, "pass_on", lambda window: (passed_on.append(len(window.calls)), pass_on(window))[1])
    for number in range(200):
        recorder.add(entry(number))
        one.turn()
    assert passed_on == [1] * 200, "each turn passes on what is new, and the tree keeps the rest"
    assert exchange.asked == 200, "each turn tries"
    exchange.answers = True


def test_reading_is_frequent_and_sharing_is_periodic(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, recorder, passed_on = [100.0], Recorder(), Said()
    clock = SimpleNamespace(monotonic=lambda: now_s[0], thread_time=time.thread_time, time_ns=time.time_ns)
    monkeypatch.setattr(timer, "time", clock)
    one = make(1, recorder, MemoryExchange())
    monkeypatch.setattr(one.tree, "pass_on", lambda window: passed_on(str(window.calls["seq"].tolist())))
    one.pace.share_s = 2.0
    for number in range(9):
        now_s[0] += 0.5
        recorder.add(entry(number))
        one.turn()
    assert passed_on.said == ["[1, 2, 3, 4]", "[5, 6, 7, 8]"]
    recorder.add(entry(9))
    one.end()
    assert passed_on.said[2:] == ["[9, 10]"], "at the end it shares whatever is left"


def test_ending_waits_until_the_last_window_is_sent(make: Make) -> None:
    """Its reader is behind at first, and then catches up."""
    shared, recorder = SharedMemory(), Recorder()
    one, tree = make(1, recorder, MemoryExchange(shared)), Tree(MemoryExchange(shared), rank=0, world_size=2)
    one.pace.share_s = 0.0
    for number in range(6):
        recorder.add(entry(number))
        one.turn()
    assert one.tree.holds
    ending = threading.Thread(target=one.end)
    ending.start()
    found: list[Window] = []
    until(lambda: found.append(tree.relay() or empty_window()) or tree.ended, within_s=5.0)
    ending.join()
    assert joined(found).calls["seq"].tolist() == [*range(1, 7)] and joined(found).last == {1}


def test_waiting_for_an_absent_reader_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_LAST_S", 0.4)
    recorder = Recorder()
    one = make(1, recorder, MemoryExchange())
    one.pace.share_s = 0.0
    for number in range(6):
        recorder.add(entry(number))
        one.turn()
    began = time.monotonic()
    one.end()
    assert 0.15 < time.monotonic() - began < 30
    assert own_threads() == [] and not one.timer.is_off


def test_an_unsent_straggler_is_sent_on_the_next_turn(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, said = SharedMemory(), Said()
    exchange = Broken(shared)
    monkeypatch.setattr(exchange, "get_many", partial(MemoryExchange.get_many, exchange))
    first, second = make(0, Recorder(), exchange, say=said), make(1, Recorder(), MemoryExchange(shared))
    changes, analysis = iter([[Straggler(rank=1)]]), first.timer.analysis
    monkeypatch.setattr(analysis, "add", lambda _: next(changes, []))
    monkeypatch.setattr(analysis, "summary", lambda: SimpleNamespace(stragglers=(Straggler(rank=1),)))
    first.pace.share_s = second.pace.share_s = 0.0
    first.turn()
    second.turn()
    assert (second.timer.stragglers, exchange.told) == ((), 1)
    exchange.answers = True
    first.turn()
    second.turn()
    assert [straggler.rank for straggler in second.timer.stragglers] == [1]
    first.turn()
    assert exchange.told == 2 and len(said.said) == 1, "once"


def test_unreadable_messages_are_reported_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory()
    one, other = (make(rank, Recorder(), MemoryExchange(shared)) for rank in range(2))
    one.pace.share_s = 0.0
    shared.values["timing/1/0"] = b"nonsense"
    said: list[str] = []
    add = one.timer.analysis.add
    monkeypatch.setattr(one.timer.analysis, "add", lambda window: (said.extend(window.missing), add(window))[1])
    for _ in range(4):
        one.turn()
    assert said == ["Rank 0: 1 messages of ranks could not be read."], "once"
    other.timer.start()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_exchange_ends_the_timer_and_not_the_training(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    monkeypatch.setattr(timer, "_LAST_S", 60.0)
    exchange = Broken(SharedMemory())
    exchange.lost = "its host is gone"
    recorder = Recorder()
    one = make(rank, recorder, exchange)
    recorder.add(*(entry(number) for number in range(10)))
    one.timer.start()
    until(lambda: exchange.asked > 1)
    began = time.monotonic()
    one.end()
    assert time.monotonic() - began < 30
    assert not one.timer.is_off
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("size", "words"), [("0", "is off"), ("20001", "keeps 20,001 entries")])
def test_an_unusable_recorder_is_reported_once(
    size: str, words: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
    one = make(0, Recorder(), MemoryExchange(), world_size=1)
    one.timer.start()
    one.end()
    (sentence,) = one.timer.analysis.summary().missing
    assert f"the Flight Recorder {words}" in sentence and "TORCH_FR_BUFFER_SIZE" in sentence


def test_only_rank_0_keeps_timings_of_other_ranks(make: Make) -> None:
    one = make(1, Recorder(), MemoryExchange(), world_size=1024)
    assert one.timer.analysis.history.late_s.shape[0] == 1
    assert one.timer.scalars() == {}
