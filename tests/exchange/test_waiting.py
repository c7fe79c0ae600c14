"""The one way in which ranks wait over the exchange, with a clock that only moves while somebody sleeps."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import (
    ExchangeError,
    MemoryExchange,
    first_rank,
    keep_trying,
    poll_interval_s,
    wait_for,
    wait_for_keys,
    waiting,
)
from lightning_ncclsafe.exchange.meeting import Agreed, Meeting
from lightning_ncclsafe.facts import Phase, Progress, RankFacts
from lightning_ncclsafe.guard.leaving import stay_until_all_finished


@dataclass
class Clock:
    """Stands for ``time``; remembers how long it slept each time."""

    now_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)
    on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
        assert self.now_s < 100, "the wait does not end"
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


class Busy(MemoryExchange):
    """Misses its deadline some times; remembers what it was asked for."""

    def __init__(self, misses: float) -> None:
        super().__init__()
        self.misses = misses
        self.asked: list[list[str]] = []

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes]:
        self.asked.append([*keys])
        if self.misses > 0:
            self.misses -= 1
            raise ExchangeError("busy")
        return super().get_many(self.asked[-1])


def test_the_first_truthy_answer_ends_the_wait(clock: Clock) -> None:
    answers = iter(["", "", "here", "later"])
    assert wait_for(lambda: next(answers), deadline_s=10.0, poll_s=0.5) == "here"
    assert clock.slept_s == [0.5, 0.5]


def test_waiting_polls_at_least_once_and_ends_at_the_deadline(clock: Clock) -> None:
    assert wait_for(lambda: "here", deadline_s=-1.0) == "here"
    assert wait_for(lambda: False, deadline_s=1.0, poll_s=0.4) is None
    assert clock.slept_s == [0.4, 0.4, 0.4]


def test_polling_slows_down_to_a_limit(clock: Clock) -> None:
    wait_for(lambda: False, deadline_s=0.9, poll_s=0.1, longest_poll_s=0.3)
    assert clock.slept_s == pytest.approx([0.1, 0.15, 0.225, 0.3, 0.3])


def test_a_wait_without_a_deadline_can_be_given_up(clock: Clock) -> None:
    assert wait_for(lambda: False, deadline_s=math.inf, poll_s=1.0, give_up=lambda: clock.now_s >= 3) is None
    assert len(clock.slept_s) == 3


def test_an_answer_takes_precedence_over_giving_up(clock: Clock) -> None:
    assert wait_for(lambda: True, deadline_s=math.inf, give_up=lambda: True)


def test_a_missed_deadline_is_tolerated_only_on_request(clock: Clock) -> None:
    exchange = Busy(misses=2)
    exchange.set("key", b"value")
    with pytest.raises(ExchangeError, match="busy"):
        wait_for(lambda: exchange.get_many(["key"]), deadline_s=10.0)
    assert wait_for(lambda: exchange.get_many(["key"]), deadline_s=10.0, forgive=exchange) == {"key": b"value"}


def test_a_lost_exchange_is_not_tolerated(clock: Clock) -> None:
    exchange = Busy(misses=math.inf)
    clock.on_sleep = exchange.close
    with pytest.raises(ExchangeError):
        wait_for(lambda: exchange.get_many(["key"]), deadline_s=10.0, forgive=exchange)
    assert len(exchange.asked) == 2


def test_each_key_is_requested_until_it_has_a_value(clock: Clock) -> None:
    exchange = Busy(misses=0)
    exchange.set("b", b"2")
    clock.on_sleep = lambda: exchange.set("a", b"1")
    assert wait_for_keys(exchange, iter("ab"), deadline_s=10.0) == {"a": b"1", "b": b"2"}
    assert exchange.asked == [["a", "b"], ["a"]]


def test_after_the_deadline_the_available_keys_are_returned(clock: Clock) -> None:
    exchange = Busy(misses=0)
    exchange.set("b", b"2")
    assert wait_for_keys(exchange, ["a", "b"], deadline_s=0.1) == {"b": b"2"}
    exchange.close()
    assert wait_for_keys(exchange, [], deadline_s=0.1) == {}


def test_a_required_call_is_retried_until_it_succeeds(clock: Clock) -> None:
    exchange = Busy(misses=3)
    assert keep_trying(exchange, lambda: exchange.get_many(["a"]), deadline_s=10.0) == {}
    assert len(exchange.asked) == 4


def test_a_call_that_never_succeeds_raises_its_last_error(clock: Clock) -> None:
    exchange = Busy(misses=math.inf)
    with pytest.raises(ExchangeError, match="busy"):
        keep_trying(exchange, lambda: exchange.get_many(["a"]), deadline_s=1.0)
    assert 1.0 < clock.now_s < 1.1


def test_ranks_poll_less_often_in_larger_jobs() -> None:
    assert poll_interval_s(8) == waiting.POLL_S
    assert poll_interval_s(16384) == pytest.approx(8.192)
    assert poll_interval_s(16384, polls_per_s=1000.0) == pytest.approx(16.384)
    assert poll_interval_s(8, least_s=0.25) == 0.25


def test_all_ranks_agree_on_which_came_first() -> None:
    exchange = MemoryExchange()
    assert [first_rank(exchange, "point", rank) for rank in (3, 0, 3)] == [3, 3, 3]


def test_a_finished_rank_polls_quickly_and_then_less_often(clock: Clock) -> None:
    """At the end of a Trainer call the others are usually only milliseconds behind."""
    exchange = MemoryExchange()
    clock.on_sleep = lambda: exchange.set("finished/all", b"") if len(clock.slept_s) == 10 else None
    stay_until_all_finished(exchange, rank=1, world_size=2, may_leave=lambda: False, leave_behind=lambda: None)
    assert clock.slept_s[0] == 0.001 and max(clock.slept_s) == 0.01


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_ends_once_the_run_is_over(clock: Clock, rank: int) -> None:
    def check() -> None:
        if len(clock.slept_s) == 3:
            raise CollectiveTimeoutError("rank 2 raised")

    one = Meeting(
        exchange=MemoryExchange(), rank=rank, world_size=3, deadline_s=60.0, say=lambda text: None, check=check
    )
    facts = RankFacts(rank=rank, progress=Progress(phase=Phase.TRAIN))
    with pytest.raises(CollectiveTimeoutError, match="rank 2 raised"):
        one.meet(facts, lambda ranks: Agreed())
    assert clock.now_s < 0.1
