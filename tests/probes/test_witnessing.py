"""What keeps a process from answering, by the stacks of its threads and its turns on a core."""

import os

import pytest
from standing import in_agreement, of_guard, of_guard_that_asks_the_driver

from lightning_ncclsafe.facts import Frame, ProcessFacts
from lightning_ncclsafe.probes.process.growth import LEAST_S, asks_driver, guard_is_idle, with_core_shares
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread

MAIN = (Frame(file="/home/me/train.py", line=9, function="training_step", user=True),)
RESTS = of_guard(in_tick=False)
LOOKS = of_guard(in_tick=True)
OTHER = in_agreement()
ASKS = of_guard_that_asks_the_driver()


@pytest.mark.parametrize(
    ("threads", "rests"),
    [
        ([MAIN, RESTS], True),
        ([MAIN, OTHER, RESTS], True),
        # It is in something of its own, perhaps for long; there is none; of two one is busy.
        ([MAIN, LOOKS], False),
        ([MAIN, OTHER], False),
        ([MAIN, ASKS], False),
        ([MAIN, RESTS, LOOKS], False),
        ([], False),
    ],
)
def test_an_idle_guard_is_recognised(threads: list[tuple[Frame, ...]], rests: bool) -> None:
    assert guard_is_idle(threads) is rests


@pytest.mark.parametrize(
    ("threads", "asks"),
    [
        ([MAIN, ASKS], True),
        ([MAIN, OTHER, ASKS], True),
        ([MAIN, RESTS], False),
        ([MAIN, LOOKS], False),
        ([MAIN], False),
        ([], False),
    ],
)
def test_a_guard_that_asks_the_driver_is_recognised(threads: list[tuple[Frame, ...]], asks: bool) -> None:
    assert asks_driver(threads) is asks


def test_core_shares_are_the_difference_of_two_samples() -> None:
    now = look_at_main_thread()
    assert now.ran_s is not None and now.queued_s is not None
    before = ThreadLook(ran_s=now.ran_s - 1.0, queued_s=now.queued_s - 3.0)
    facts = with_core_shares(ProcessFacts(pid=os.getpid()), before, now, 10.0)
    assert facts.ran_share == pytest.approx(0.1, abs=0.05)
    assert facts.queued_share == pytest.approx(0.3, abs=0.05)


def test_short_or_unknown_intervals_have_no_share() -> None:
    facts = ProcessFacts(pid=os.getpid())
    now = look_at_main_thread()
    assert with_core_shares(facts, now, now, LEAST_S / 2) == facts
    assert with_core_shares(facts, ThreadLook(), now, 10.0) == facts
