"""One verdict for all ranks, even if the store does not answer some of them, and these share by files."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_ncclsafe.exchange import ExchangeError, FallbackExchange, MemoryExchange, SharedMemory, meeting
from lightning_ncclsafe.exchange.fallback import NoAnswerError
from lightning_ncclsafe.exchange.meeting import Agreed, Meeting
from lightning_ncclsafe.facts import Phase, Progress, RankFacts

WORLD = 3
DEADLINE_S = 30.0


class LateStore(MemoryExchange):
    """A store whose host no longer answers this rank after some calls."""

    def __init__(self, shared: SharedMemory, calls: float) -> None:
        super().__init__(shared)
        self._left = calls

    def _check_open(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.lost = "it did not answer"
            raise ExchangeError("it did not answer") from NoAnswerError("it did not answer")


@pytest.mark.parametrize(
    "calls",
    [
        (0, math.inf, math.inf),
        (math.inf, 0, math.inf),
        (3, math.inf, 0),
        (math.inf, 1, 1),
        (2, 2, math.inf),
        (0, 0, 0),
        (math.inf, math.inf, math.inf),
    ],
)
def test_ranks_that_have_lost_the_store_and_those_that_have_not_reach_one_verdict(
    calls: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each rank, the number of calls that the store answers: some have published by then."""
    monkeypatch.setattr(meeting, "_APART_S", 0.0)
    monkeypatch.setattr(meeting, "_LOOK_S", 0.01)
    store, files = SharedMemory(), SharedMemory()

    def judge(facts: tuple[RankFacts, ...]) -> Agreed:
        return Agreed(complete=True, folder=",".join(str(one.rank) for one in facts))

    def meet(rank: int) -> list[Agreed]:
        exchange = FallbackExchange(LateStore(store, calls[rank]), MemoryExchange(files))
        one = Meeting(
            exchange=exchange, rank=rank, world_size=WORLD, deadline_s=DEADLINE_S, say=lambda text: None, name="data"
        )
        facts = RankFacts(rank=rank, progress=Progress(phase=Phase.TRAIN))
        return [one.meet(facts, judge) for _ in range(3)]

    began_s = time.monotonic()
    with ThreadPoolExecutor(WORLD) as pool:
        verdicts = [*pool.map(meet, range(WORLD))]
    assert verdicts == [[Agreed(complete=True, folder="0,1,2")] * 3] * WORLD
    assert time.monotonic() - began_s < DEADLINE_S / 2
