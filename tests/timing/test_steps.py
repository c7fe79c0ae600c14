"""What collectives of several groups and blocks say of one step."""

import numpy as np
import pytest
from timing_builders import BEGAN_NS, MS, NUMBER, matched

from lightning_ncclsafe.timing.lateness import Lateness, lateness
from lightning_ncclsafe.timing.matching import MatchedCalls
from lightning_ncclsafe.timing.stragglers import Step, Steps
from lightning_ncclsafe.timing.summary import StepPhase
from lightning_ncclsafe.timing.windows import GroupMembers


def late_by(calls: MatchedCalls, late_ms: list[list[float]], phase: StepPhase = StepPhase.DATA) -> Lateness:
    late_ns = np.array(late_ms) * MS
    count = late_ns.shape[1]
    return Lateness(
        late_ns=late_ns,
        wait_ns=late_ns.max(axis=0) - late_ns,
        transfer_ns=np.full(count, -1),
        skew_ns=late_ns.max(axis=0),
        phase=np.full(late_ns.shape, NUMBER[phase]),
    )


def numbers(steps: list[Step]) -> list[int]:
    return [step.number for step in steps]


def test_a_step_is_complete_two_steps_later() -> None:
    steps = Steps(2)
    calls = matched(np.zeros((2, 5)), step=[1, 2, 3, 4, 4])
    steps.add(calls, lateness(calls, {}))
    assert numbers(steps.complete()) == [1, 2]
    assert numbers(steps.complete()) == []
    assert numbers(steps.complete(all_of_them=True)) == [3, 4]
    assert numbers(steps.complete(all_of_them=True)) == []


def test_collectives_of_a_step_are_summed_over_blocks_and_groups() -> None:
    steps = Steps(3)
    first = matched([[0, 1], [0, 1], [0, 1]], step=[1, 1])
    steps.add(first, late_by(first, [[0, 0], [5, 1], [0, 0]]))
    pair = matched([[2], [2]], step=[1], group=GroupMembers(name="pair", ranks=(0, 2)))
    steps.add(pair, late_by(pair, [[0], [3]], StepPhase.OPTIMIZER))
    (step,) = steps.complete(all_of_them=True)
    assert step.late_ns.tolist() == [0, 6 * MS, 3 * MS]
    assert step.wait_ns.tolist() == [(5 + 1 + 3) * MS, 0, 6 * MS]
    assert (step.phase, step.op, step.worst_ns) == (NUMBER[StepPhase.DATA], "all_reduce", 5 * MS)


def test_a_step_starts_with_its_first_arrival() -> None:
    steps = Steps(2)
    for at_ms in (10, 4, 20):
        calls = matched([[at_ms], [at_ms + 1]], step=[1])
        steps.add(calls, lateness(calls, {}))
    (step,) = steps.complete(all_of_them=True)
    assert step.began_ns == BEGAN_NS + 4 * MS


def test_the_worst_collective_of_a_step_explains_it() -> None:
    steps = Steps(2)
    for late_ms, phase in ((3, StepPhase.DATA), (30, StepPhase.OPTIMIZER), (7, StepPhase.HOOKS)):
        calls = matched([[0], [late_ms]], step=[1])
        steps.add(calls, late_by(calls, [[0], [late_ms]], phase))
    (step,) = steps.complete(all_of_them=True)
    assert (step.phase, step.worst_ns) == (NUMBER[StepPhase.OPTIMIZER], 30 * MS)


@pytest.mark.parametrize("behind", [0, 1])
def test_late_arrivals_for_the_previous_step_count(behind: int) -> None:
    steps = Steps(2)
    for number in (1, 2, 3 - behind):
        calls = matched([[0], [5]], step=[number])
        steps.add(calls, lateness(calls, {}))
    done = steps.complete(all_of_them=True)
    assert sum(step.late_ns[1] for step in done) == 15 * MS


def test_only_the_last_steps_stay_open() -> None:
    steps, given = Steps(2), 0
    for number in range(1000):
        calls = matched([[0], [0]], step=[number])
        steps.add(calls, lateness(calls, {}))
        given += len(steps.complete())
    assert given == 998
    assert len(steps.complete(all_of_them=True)) == 2


def test_a_silent_group_does_not_delay_the_others_for_long() -> None:
    steps = Steps(2)
    rare = matched([[0], [0]], step=[0], group=GroupMembers(name="rare", ranks=(0, 1)))
    steps.add(rare, lateness(rare, {}))
    calls = matched([[100, 200, 300, 400]] * 2, step=[1, 2, 3, 4])
    steps.add(calls, lateness(calls, {}))
    assert numbers(steps.complete()) == []
    calls = matched([[10_500, 10_600]] * 2, step=[5, 6])
    steps.add(calls, lateness(calls, {}))
    assert numbers(steps.complete()) == [0, 1, 2, 3, 4]
