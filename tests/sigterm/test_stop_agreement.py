"""Where ranks stop after SIGTERM: many schedules of ranks that are simulated, and some of ranks that are threads."""

import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange
from lightning_ncclsafe.exchange.interface import SharedMemory
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.settings import Limits
from lightning_ncclsafe.sigterm import agreement
from lightning_ncclsafe.sigterm.agreement import Position, StopAgreement
from lightning_ncclsafe.strategies.guarded_call import GuardedCall

WORLD = 4


class Watched(MemoryExchange):
    """An exchange that can be broken, and does something else in the middle of each call."""

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__(shared)
        self.breaks_on: str | None = None
        self.interrupt = lambda: None
        self.asked_for: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        self._visit(key)
        super().set(key, value)
        self.interrupt()

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        self._visit(key)
        stands = super().set_if_absent(key, value)
        self.interrupt()
        return stands

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        keys = list(keys)
        for key in keys:
            self._visit(key)
        found = super().get_many(keys)
        self.interrupt()
        return found

    def _visit(self, key: str) -> None:
        self.asked_for.append(key)
        self.interrupt()
        if self.breaks_on is not None and key.startswith(self.breaks_on):
            raise ExchangeError("the exchange is broken")


class Rank:
    """A rank whose main thread is simulated: it goes on only where it would not wait."""

    def __init__(self, shared: SharedMemory, rank: int, batches: Iterable[Position], **settings: Any) -> None:
        self.exchange = Watched(shared)
        self.said: list[str] = []
        settings = {"world_size": WORLD, "say": self.said.append, **settings}
        self.agreement = StopAgreement(self.exchange, rank=rank, **settings)
        self.batches = [*batches]
        self.begun = 0
        self.has_stopped = False

    @property
    def holds(self) -> bool:
        return self.agreement._promised is not None and not self.may_go_on

    @property
    def may_go_on(self) -> bool:
        """Whether the main thread would not be kept: nothing else shows it without waiting."""
        return self.agreement._is_over.is_set()

    @property
    def is_done(self) -> bool:
        return self.has_stopped or self.begun == len(self.batches)

    def step(self) -> None:
        if not self.is_done and not self.holds:
            self.has_stopped = not self.agreement.may_pass(self.batches[self.begun])
            self.begun += not self.has_stopped


def training(batches: int) -> list[Position]:
    return [(batch, 0) for batch in range(1, batches + 1)]


def with_validation(batches: int) -> list[Position]:
    """Five batches of validation after every third of training, and two before all."""
    positions: list[Position] = [(0, 1), (0, 2)]
    for batch in range(1, batches + 1):
        positions += [(batch, 0), *((batch, check) for check in range(1, 6) if batch % 3 == 0)]
    return positions


def ranks_of(batches: list[Position], shared: SharedMemory | None = None, **settings: Any) -> list[Rank]:
    shared = shared or SharedMemory()
    return [Rank(shared, rank, batches, hosts_store=rank == 0, **settings) for rank in range(WORLD)]


def settle(ranks: list[Rank], rounds: int = 6) -> None:
    for _ in range(rounds):
        for rank in ranks:
            rank.agreement.poll()


def run_on(ranks: list[Rank], chance: random.Random, lead: int) -> None:
    """Polls and batches in random order; no rank is more than ``lead`` batches ahead of another."""

    def step(rank: Rank) -> None:
        if rank.begun - min(other.begun for other in ranks) < lead:
            rank.step()

    for rank in ranks:
        # The main thread goes on while the watch's thread is in the middle of its poll, too.
        rank.exchange.interrupt = lambda rank=rank: step(rank) if chance.random() < 0.3 else None
    for _ in range(5000):
        rank = chance.choice(ranks)
        rank.agreement.poll() if chance.random() < 0.2 else step(rank)
        if all(rank.is_done for rank in ranks):
            return
    raise AssertionError("they hang")


@pytest.mark.parametrize("lead", [1, 4, 30])
@pytest.mark.parametrize("batches", [training(60), with_validation(25)])
def test_all_ranks_stop_before_the_same_batch(lead: int, batches: list[Position]) -> None:
    stopped = 0
    for seed in range(150):
        chance = random.Random(seed)
        ranks = ranks_of(batches)
        run_until = chance.randrange(20)
        for _ in range(run_until):
            for rank in ranks:
                rank.step()
        for rank in chance.sample(ranks, chance.choice([1, 1, 2, WORLD])):
            rank.agreement.receive()
            for _ in range(chance.randrange(2)):
                chance.choice(ranks).agreement.poll()
        run_on(ranks, chance, lead)
        assert len({(rank.begun, rank.has_stopped) for rank in ranks}) == 1, (seed, [r.begun for r in ranks])
        assert ranks[0].begun >= run_until
        stopped += ranks[0].has_stopped
    assert stopped > 100, "not only at the end"


def test_without_a_signal_no_rank_stops_and_only_one_key_is_read() -> None:
    ranks = ranks_of(training(20))
    run_on(ranks, random.Random(0), lead=3)
    assert all(rank.begun == 20 for rank in ranks)
    assert {key for rank in ranks for key in rank.exchange.asked_for} == {"stop/asked"}


def test_all_ranks_stop_at_the_next_batch_of_the_furthest_rank() -> None:
    ranks = ranks_of(training(20))
    for rank, batches in zip(ranks, (3, 5, 4, 3), strict=True):
        for _ in range(batches):
            rank.step()
    ranks[3].agreement.receive()
    settle(ranks)
    for _ in range(20):
        for rank in ranks:
            rank.step()
    assert [rank.begun for rank in ranks] == [5, 5, 5, 5]
    assert all(rank.has_stopped for rank in ranks)


def test_the_signalled_rank_is_printed_once() -> None:
    ranks = ranks_of(training(20))
    for rank in (ranks[2], ranks[1]):
        rank.agreement.receive()
        rank.agreement.receive()  # a second one
    for rank in reversed(ranks):
        rank.agreement.poll()
    settle(ranks)
    assert [rank.said for rank in ranks] == [
        [],
        [],
        ["rank 2 received SIGTERM; all ranks will stop before the same batch"],
        [],
    ]
    assert all(rank.agreement.is_asked for rank in ranks)


def test_a_rank_that_left_does_not_block_the_others() -> None:
    ranks = ranks_of(training(20))
    gone, *others = (ranks[1], ranks[0], *ranks[2:])
    for _ in range(2):
        gone.step()
    gone.agreement.leave()
    gone.exchange.close()
    others[0].agreement.receive()
    settle(others)
    for _ in range(20):
        for rank in others:
            rank.step()
    assert [rank.begun for rank in others] == [2, 2, 2]
    assert all(rank.has_stopped for rank in others)


def test_a_finished_call_leaves_the_agreement(tmp_path: Path) -> None:
    (rank, *_) = ranks_of(training(20))
    trainer = SimpleNamespace(default_root_dir=tmp_path)
    limits = Limits(suspect_after_s=5, timeout_s=10, on_timeout="abort")
    watched = GuardedCall(trainer, limits, None, ending=Ending(), combined=list, sigterm_error=SystemExit)
    watched.features._stop = rank.agreement
    rank.step()
    watched.finish()
    assert rank.exchange.get_many(["stop/promise/0", "stop/knows/0"]) == {"stop/promise/0": b"1,0", "stop/knows/0": b""}


def test_the_store_host_leaves_last() -> None:
    ranks = ranks_of(training(20))
    host, late = ranks[0], ranks[2]
    host.agreement.receive()
    late.exchange.breaks_on = "stop/decision"  # it promises, and does not come to know
    for _ in range(5):
        late.agreement.poll()
        for rank in (host, ranks[1], ranks[3]):
            rank.agreement.poll()
    assert [rank.may_go_on for rank in ranks] == [False, True, False, True]
    late.exchange.breaks_on = None
    late.agreement.poll()
    host.agreement.poll()
    assert [rank.may_go_on for rank in ranks] == [True, True, True, True]


def test_predicting_ranks_each_stop_before_their_next_batch() -> None:
    ranks = ranks_of(training(20), each_alone=True)
    for rank, batches in zip(ranks, (3, 5, 4, 0), strict=True):
        for _ in range(batches):
            rank.step()
    ranks[3].agreement.receive()
    settle(ranks)
    for rank in ranks:
        rank.step()
    assert [(rank.begun, rank.has_stopped) for rank in ranks] == [(3, True), (5, True), (4, True), (0, True)]


def give_up(ranks: list[Rank]) -> list[tuple[int, bool]]:
    """Two batches more for each rank, whose time is out."""
    for rank in ranks:
        for _ in range(2):
            rank.has_stopped = rank.has_stopped or not rank.agreement.may_pass(rank.batches[rank.begun])
            rank.begun += not rank.has_stopped
    return [(rank.begun, rank.has_stopped) for rank in ranks]


def test_without_an_agreement_only_signalled_ranks_stop() -> None:
    ranks = ranks_of(training(20), deadline_s=0)
    ranks[0].agreement.receive()
    settle(ranks[:3])
    assert give_up(ranks) == [(0, True), (2, False), (2, False), (2, False)]
    assert [len(rank.said) for rank in ranks] == [2, 1, 1, 0]
    assert ranks[0].said[1].startswith("rank 0 stops alone: a rank received SIGTERM, but the ranks did not agree")
    assert ranks[1].said[0].startswith("rank 1 continues alone: ")
    settle(ranks)
    assert give_up(ranks) == [(0, True), (4, False), (4, False), (4, False)], "late answers change nothing"


def test_no_rank_gives_up_once_all_have_agreed() -> None:
    """The decision exists, but has not reached this rank yet."""
    ranks = ranks_of(training(20), deadline_s=0)
    for _ in range(3):
        ranks[0].step()
    ranks[0].agreement.receive()
    settle(ranks, rounds=1)
    ranks[0].agreement.poll()
    assert not ranks[1].may_go_on
    assert give_up([ranks[1]]) == [(2, False)]
    assert give_up([ranks[1]]) == [(3, True)]
    assert ranks[1].said == []


def test_no_rank_agrees_once_one_has_given_up() -> None:
    shared = SharedMemory()
    ranks = ranks_of(training(20), shared)
    ranks[2] = Rank(shared, 2, training(20), deadline_s=0)
    ranks[0].agreement.receive()
    settle(ranks[:3])
    assert give_up([ranks[2]]) == [(2, False)]
    settle(ranks)
    assert give_up(ranks) == [(0, True), (2, False), (4, False), (2, False)]


@pytest.mark.parametrize("key", ["stop/asked", "stop/promise", "stop/decision", "stop/knows", "stop"])
def test_a_lost_exchange_does_not_block_any_rank(key: str) -> None:
    ranks = ranks_of(training(20), deadline_s=0.05)
    ranks[1].agreement.receive()
    for rank in ranks:
        rank.exchange.breaks_on = key
    settle(ranks)
    threading.Event().wait(0.06)
    ended = give_up(ranks)
    assert ended[1] == (0, True)
    if key != "stop/knows":
        assert [ended[rank] for rank in (0, 2, 3)] == [(2, False)] * 3
    assert not any("the agreement on where to stop failed" in line for rank in ranks for line in rank.said)


def test_failed_exchange_calls_are_retried() -> None:
    ranks = ranks_of(training(20))
    ranks[1].agreement.receive()
    for key in ("stop/asked", "stop/promise", "stop/decision", "stop/knows", None):
        for rank in ranks:
            rank.exchange.breaks_on = key
        settle(ranks, rounds=2)
    settle(ranks)
    assert all(rank.may_go_on for rank in ranks)
    for rank in ranks:
        rank.step()
    assert all(rank.has_stopped for rank in ranks)


def test_a_signalled_rank_without_a_watch_stops_alone() -> None:
    ranks = ranks_of(training(20), deadline_s=0)
    ranks[0].agreement.receive()
    assert give_up(ranks[:1]) == [(0, True)]
    settle(ranks[1:])
    assert give_up(ranks[1:]) == [(2, False)] * 3


def test_an_internal_failure_is_printed_once_and_harmless() -> None:
    rank = ranks_of(training(20), deadline_s=0)[0]
    rank.exchange.set_if_absent("stop/asked", b"nonsense")
    for _ in range(3):
        rank.agreement.poll()
    assert len(rank.said) == 1
    assert "the agreement on where to stop failed and is off" in rank.said[0]
    rank.step()
    assert (rank.begun, rank.has_stopped) == (1, False)


@pytest.fixture
def watch() -> Iterator[list[StopAgreement]]:
    """Polls the agreements that are put in, as the guards' threads do."""
    watched: list[StopAgreement] = []
    over = threading.Event()

    def poll() -> None:
        while not over.wait(0.001):
            for each in [*watched]:
                each.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    yield watched
    over.set()
    thread.join()


@pytest.mark.parametrize("seed", range(5))
def test_threads_meeting_in_collectives_stop_before_the_same_batch(watch: list[StopAgreement], seed: int) -> None:
    """Every fourth batch has a collective, so some ranks wait there while others wait for the decision."""
    chance = random.Random(seed)
    shared, collective = SharedMemory(), threading.Barrier(WORLD)
    ranks = [Rank(shared, number, training(100_000), hosts_store=number == 0) for number in range(WORLD)]
    watch += [rank.agreement for rank in ranks]
    signals = {chance.randrange(WORLD): chance.randrange(40) for _ in range(chance.choice([1, 2]))}

    def train(number: int) -> int:
        rank = ranks[number]
        while rank.agreement.may_pass(rank.batches[rank.begun]):
            rank.begun += 1
            if rank.begun == signals.get(number):
                rank.agreement.receive()
            if rank.begun % 4 == 0:
                collective.wait(10)
        return rank.begun

    signals = {number: max(1, batch) for number, batch in signals.items()}
    with ThreadPoolExecutor(WORLD) as pool:
        begun = [*pool.map(train, range(WORLD), timeout=20)]
    assert len(set(begun)) == 1
    assert begun[0] >= min(signals.values())


def test_the_first_signalled_rank_is_named_and_not_a_forwarded_one() -> None:
    ranks = ranks_of(training(20))

    def pass_on() -> None:
        ranks[1].agreement.receive()
        ranks[1].agreement.poll()

    ranks[0].agreement.receive(pass_on)
    ranks[1].agreement.poll()
    settle(ranks)
    assert [rank.said for rank in ranks[:2]] == [
        ["rank 0 received SIGTERM; all ranks will stop before the same batch"],
        [],
    ]


def test_the_signal_is_forwarded_once_even_without_an_exchange() -> None:
    ranks, passed_on = ranks_of(training(20)), list[int]()
    ranks[0].exchange.close()
    ranks[0].agreement.receive(lambda: passed_on.append(1))
    assert not passed_on
    for _ in range(3):
        ranks[0].agreement.poll()
    assert passed_on == [1]


def test_a_rank_without_a_watch_forwards_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PASSED_ON_S", -1.0)
    ranks, passed_on = ranks_of(training(20)), list[int]()
    ranks[0].agreement.receive(lambda: passed_on.append(1))
    ranks[0].step()
    assert passed_on == [1]
