"""Who is named and who is not, in jobs of known lateness: a rank that is late again and again, and nobody else."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from timing_builders import BEGAN_NS, MS, NUMBER, Job, S

from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.timing.analysis import Analysis
from lightning_ncclsafe.timing.lateness import NO_PHASE
from lightning_ncclsafe.timing.stragglers import LEAST_STEPS, WARM_UP_STEPS, WINDOW_STEPS, Step, Stragglers
from lightning_ncclsafe.timing.summary import StepPhase

Random = np.random.Generator
Ms = NDArray[Any]
DATA = NUMBER[StepPhase.DATA]


def steps_of(behind_ms: Ms, step_ms: float, phase: Any = DATA) -> list[Step]:
    """Steps in which each rank comes so many milliseconds later than a step takes, shape (ranks, steps)."""
    ranks, count = behind_ms.shape
    middle = behind_ms.min(axis=0) if ranks == 2 else np.median(behind_ms, axis=0)
    late_ns = np.maximum(behind_ms - middle, 0) * MS
    began_ns = BEGAN_NS + np.cumsum((step_ms + behind_ms.max(axis=0)) * MS).astype(np.int64)
    phases = np.broadcast_to(phase, count)
    return [
        Step(
            number=number,
            began_ns=int(began_ns[number]),
            late_ns=late_ns[:, number],
            wait_ns=np.zeros(ranks),
            phase=int(phases[number]),
            op="all_reduce",
            worst_ns=float(late_ns[:, number].max()),
        )
        for number in range(count)
    ]


@dataclass
class Told:
    """What was told, and after how many steps."""

    stragglers: Stragglers
    said: list[tuple[int, Straggler]] = field(default_factory=list)

    def add(self, steps: list[Step], every: int = 10) -> "Told":
        done = 0
        for first in range(0, len(steps), every):
            done = first + len(steps[first : first + every])
            self.said += [(done, one) for one in self.stragglers.add(steps[first : first + every])]
        return self


def told_of(behind_ms: Ms, step_ms: float, phase: Any = DATA, every: int = 10) -> Told:
    return Told(Stragglers(len(behind_ms))).add(steps_of(behind_ms, step_ms, phase), every)


def jitter(random: Random, ranks: int, steps: int) -> Ms:
    return random.exponential(0.3, (ranks, steps))


def with_late(
    behind_ms: Ms, random: Random, rank: int, first: int, *, share: float = 0.1, late_ms: float = 20.0, of: int = 200
) -> Ms:
    """One rank is late in exactly that share of each 200 steps from one step on."""
    for begin in range(first, behind_ms.shape[1], of):
        length = min(of, behind_ms.shape[1] - begin)
        chosen = begin + random.choice(length, round(share * length), replace=False)
        behind_ms[rank, chosen] += late_ms
    return behind_ms


# Of 200 steps of 3 ms the window may be shorter than the second that is looked at at least.
@pytest.mark.parametrize(("step_ms", "within"), [(3, 220), (10, 200), (50, 200), (200, 200)])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_a_rank_20_ms_late_in_a_tenth_of_steps_is_named_within_200(step_ms: float, within: int, ranks: int) -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        rank, first = int(random.integers(ranks)), 50 + seed % 40
        told = told_of(with_late(jitter(random, ranks, 500), random, rank, first), step_ms)
        assert told.said, f"seed {seed}: no rank was named"
        after, straggler = told.said[0]
        assert (straggler.rank, straggler.phase) == (rank, "data loading"), f"seed {seed}"
        assert after - first <= within, f"seed {seed}"
        assert [one.rank for _, one in told.said] == [rank], f"seed {seed}: once"


def lognormal(random: Random, ranks: int, steps: int) -> Ms:
    return random.lognormal(-1, 1.5, (ranks, steps))


def hiccups(random: Random, ranks: int, steps: int) -> Ms:
    behind = jitter(random, ranks, steps)
    behind[random.random((ranks, steps)) < 0.02] += 30
    return behind


def bursts(random: Random, ranks: int, steps: int) -> Ms:
    """Every now and then one rank's host is busy with something else, for up to 400 ms."""
    behind, begin = jitter(random, ranks, steps), 0
    while (begin := begin + 1 + int(random.exponential(500))) < steps:
        end = begin + int(random.integers(5, 20))
        rank = int(random.integers(ranks))
        behind[rank, begin:end] += random.exponential(8, behind[rank, begin:end].shape)
    return behind


@pytest.mark.parametrize("noise", [jitter, lognormal, hiccups, bursts])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_no_rank_is_named_in_a_healthy_job(noise: Callable[[Random, int, int], Ms], ranks: int) -> None:
    for seed in range(8):
        step_ms = (3, 10, 50, 200)[seed % 4]
        told = told_of(noise(np.random.default_rng(seed), ranks, 600), step_ms, every=50)
        assert told.said == [], f"seed {seed}, steps of {step_ms} ms"


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_a_straggler_stands_out_from_common_delays(ranks: int) -> None:
    """Some rank is 3 ms late in nearly every step, and one is 40 ms late in a tenth of them."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        behind = random.exponential(3, (ranks, 450))
        rank = int(random.integers(ranks))
        told = told_of(with_late(behind, random, rank, 50, late_ms=40), 50)
        assert [one.rank for _, one in told.said] == [rank], f"seed {seed}"


@pytest.mark.parametrize(("late_steps", "is_named"), [(7, False), (9, True)])
def test_a_straggler_needs_enough_late_steps(late_steps: int, is_named: bool) -> None:
    behind = np.zeros((8, 200))
    behind[3, np.linspace(0, 199, late_steps).astype(int)] = 40
    assert bool(told_of(behind, 20).said) is is_named


@pytest.mark.parametrize("ranks", [2, 8])
def test_too_few_steps_name_no_rank(ranks: int) -> None:
    behind = np.zeros((ranks, WARM_UP_STEPS + LEAST_STEPS))
    behind[1] = 400
    few = told_of(behind[:, : WARM_UP_STEPS + LEAST_STEPS - 1], 50, every=1)
    assert few.said == [] and few.stragglers.named == ()
    assert [one.rank for _, one in told_of(behind, 50, every=1).said] == [1]


def test_the_first_steps_are_ignored() -> None:
    """One rank compiles, starts its loader's workers, …: that takes eight or more steps and then ends."""
    behind = np.zeros((2, 200))
    behind[1, :WARM_UP_STEPS] = 400
    assert told_of(behind, 50).said == []
    behind[1, ::25] = 400
    assert told_of(behind, 50).said == [], "seven late steps remain"


def test_identical_ranks_name_no_straggler() -> None:
    assert told_of(np.zeros((4, 600)), 50).said == []


def test_one_rank_alone_is_never_late() -> None:
    assert told_of(np.full((1, 600), 40.0), 50).said == []


def test_an_almost_always_late_rank_is_named_with_its_numbers() -> None:
    random = np.random.default_rng(1)
    told = told_of(with_late(jitter(random, 8, 600), random, 5, 0, share=0.94, late_ms=38), 100)
    (after, _straggler), *others = told.said
    assert others == [] and after <= 60
    (named,) = told.stragglers.named
    assert (named.rank, named.of_steps, named.op, named.phase) == (5, 200, "all_reduce", "data loading")
    assert named.share == pytest.approx(0.94, abs=0.01)
    assert named.mean_s == pytest.approx(0.038, rel=0.03)
    assert not named.is_over


def test_two_stragglers_of_eight_are_both_named() -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        behind = with_late(jitter(random, 8, 400), random, 2, 50)
        told = told_of(with_late(behind, random, 6, 50, late_ms=35), 50)
        assert {one.rank for _, one in told.said} == {2, 6}, f"seed {seed}"
        assert len(told.said) == 2


def test_a_negligible_cost_is_not_reported() -> None:
    """3 ms in a twentieth of steps of a second are 0.15 per mille of the time."""
    random = np.random.default_rng(0)
    assert told_of(with_late(jitter(random, 4, 600), random, 1, 0, share=0.05, late_ms=30), 1000).said == []


def test_delays_below_scheduler_noise_are_ignored() -> None:
    assert told_of(with_late(np.zeros((4, 600)), np.random.default_rng(0), 1, 0, share=1, late_ms=1.9), 10).said == []


def test_a_single_bad_moment_is_not_reported() -> None:
    behind = jitter(np.random.default_rng(0), 4, 600)
    behind[1, 200:240] += 30
    assert told_of(behind, 50).said == []


def test_recovery_is_reported_once_after_a_full_window_of_steps() -> None:
    random = np.random.default_rng(0)
    behind = jitter(random, 4, 1200)
    behind[:, :400] = with_late(behind[:, :400], random, 3, 100, share=0.3)
    told = told_of(behind, 50)
    assert [(one.rank, one.is_over) for _, one in told.said] == [(3, False), (3, True)]
    (_, named), (over_after, over) = told.said
    assert 400 + WINDOW_STEPS <= over_after <= 400 + 2 * WINDOW_STEPS
    assert over.since_ns == named.since_ns
    assert told.stragglers.named == (over,)


def test_a_rank_late_again_is_named_again() -> None:
    random = np.random.default_rng(0)
    behind = jitter(random, 4, 1600)
    for first in (0, 1100):
        behind[:, first : first + 400] = with_late(behind[:, first : first + 400], random, 3, 0, share=0.3)
    told = told_of(behind, 50)
    assert [one.is_over for _, one in told.said][:3] == [False, True, False]
    assert told.stragglers.named[0].since_ns > told.said[1][1].until_ns


def test_a_straggler_is_named_again_when_its_phase_changes() -> None:
    random = np.random.default_rng(0)
    behind = with_late(jitter(random, 4, 900), random, 3, 0, share=0.3)
    phases = np.where(np.arange(900) < 400, DATA, NUMBER[StepPhase.OPTIMIZER])
    told = told_of(behind, 50, phases)
    assert [(one.rank, one.phase) for _, one in told.said] == [(3, "data loading"), (3, "the optimizer")]
    assert told.said[0][1].since_ns == told.said[1][1].since_ns


def test_an_unknown_phase_is_empty() -> None:
    random = np.random.default_rng(0)
    told = told_of(with_late(jitter(random, 4, 300), random, 3, 0, share=0.3), 50, NO_PHASE)
    assert [(one.rank, one.phase) for _, one in told.said] == [(3, "")]


def test_a_straggler_has_its_start_time() -> None:
    random = np.random.default_rng(0)
    behind = with_late(np.zeros((4, 400)), random, 3, 150, share=0.5)
    steps = steps_of(behind, 50)
    told = Told(Stragglers(4)).add(steps)
    late = [step.began_ns for step in steps if step.late_ns[3]]
    assert told.said[0][1].since_ns == late[0]
    assert told.stragglers.named[0].until_ns == late[-1]


def test_the_start_time_is_kept_beyond_the_window() -> None:
    random = np.random.default_rng(0)
    told = told_of(with_late(np.zeros((4, 2000)), random, 3, 0, share=0.5), 50)
    assert told.stragglers.named[0].since_ns < BEGAN_NS + 2 * S
    assert told.stragglers.named[0].until_ns > BEGAN_NS + 100 * S


@pytest.mark.parametrize("phase", list(StepPhase))
@pytest.mark.parametrize(("ranks", "is_timed"), [(2, False), (4, True), (8, False)])
def test_a_straggler_is_found_from_the_windows_of_all_ranks(phase: StepPhase, ranks: int, is_timed: bool) -> None:
    random = np.random.default_rng(ranks)
    late_rank, first = ranks - 1, 60
    steps = first + random.choice(200, 20, replace=False)
    job = Job(
        ranks,
        first + 210,
        step_ms=30,
        buckets=2,
        jitter_ms=jitter(random, ranks, first + 210),
        late={(late_rank, int(step)): (phase, 20.0) for step in steps},
        is_timed=is_timed,
    )
    analysis, told = Analysis(ranks), []
    for window in job.windows(every=30):
        told += analysis.add(window)
    told += analysis.finish()
    assert [(one.rank, one.phase) for one in told] == [(late_rank, phase.value)]
    assert told[0].mean_s == pytest.approx(0.020, rel=0.15)
