from dataclasses import dataclass, replace
from functools import cache

import pytest
from simulated_loader import Host, Length, Loader, constant, heavy_tailed, lognormal, throughput

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice
from lightning_ncclsafe.loaders.tuning.controller import Controller
from lightning_ncclsafe.loaders.tuning.known import Known
from lightning_ncclsafe.loaders.tuning.measures import Measures

GB = 10**9
ROOMY = Budget(cores=8, workers=8)
GAP_S = 0.01


def host(cores: int, ratio: float, cpu: float, length: Length = constant, **others: float) -> Host:
    """A batch takes ``ratio`` times as long as a step, a share ``cpu`` of it on a core."""
    service_s = ratio * GAP_S
    return Host(cores=cores, cpu_s=service_s * cpu, sleep_s=service_s * (1 - cpu), gap_s=GAP_S, length=length, **others)  # type: ignore[arg-type]


def budget_for(where: Host) -> Budget:
    return Budget(cores=where.cores, workers=int(where.cores), memory_bytes=2 * GB, shm_bytes=GB)


@dataclass
class Run:
    """A simulated run with the tuner.

    Attributes:
        choices: Settings in order, the start included.
        settled_s: When it was settled first.
        changed_at: Windows after which the setting changed.
    """

    choices: list[Choice]
    settled_s: float | None
    changed_at: list[int]


def tuned(where: Host, start: Choice, budget: Budget, windows: int = 14) -> Run:
    loader, controller = Loader(where, start.workers, start.prefetch, seed=1), Controller(budget, start)
    run = Run([start], None, [])
    for number in range(windows):
        choice = controller.add(loader.window())
        if choice is not None:
            assert choice == controller.choice
            loader.resize(choice.workers, choice.prefetch)
            run.choices.append(choice)
            run.changed_at.append(number)
        if controller.settled and run.settled_s is None:
            run.settled_s = loader.now_s
    return run


def pair(choice: Choice) -> tuple[int, int]:
    return choice.workers, choice.prefetch


def memory_bytes(where: Host, setting: tuple[int, int]) -> int:
    workers, prefetch = setting
    return workers * where.worker_bytes + workers * prefetch * where.batch_bytes


@cache
def swept(cores: int, ratio: float, cpu: float, length: Length, gap_cpu: float) -> dict[tuple[int, int], float]:
    """Throughput with every number of workers (beyond 8, every second), and three prefetch factors."""
    where = host(cores, ratio, cpu, length, gap_cpu=gap_cpu)
    workers = [*range(1, min(cores, 8)), *range(8, cores + 1, 4)] if cores > 2 else [1, 2]
    settings = [(0, 0), *((count, prefetch) for count in workers for prefetch in (2, 8))]
    return {setting: throughput(where, *setting, batches=250) for setting in settings}


START = {"without": Choice(workers=0, prefetch=0), "one": Choice(workers=1, prefetch=2)}
CASES = [
    # cores, how many times the step a batch takes, share of it on a core, how batches vary, main thread's cores
    (2, 0.3, 1.0, constant, 0.1),
    (2, 1.9, 0.02, constant, 0.1),
    (2, 2.0, 1.0, constant, 1.0),
    (2, 4.0, 0.5, lognormal, 0.1),
    (2, 1.6, 0.5, heavy_tailed, 0.1),
    (8, 6.4, 0.02, constant, 0.1),
    (8, 1.9, 0.5, lognormal, 0.1),
    (8, 6.4, 1.0, heavy_tailed, 0.1),
    (8, 16.0, 1.0, constant, 1.0),
    (8, 0.3, 1.0, lognormal, 1.0),
    (16, 12.8, 0.02, heavy_tailed, 0.1),
    (16, 12.8, 1.0, constant, 0.1),
    (16, 32.0, 0.5, lognormal, 0.1),
]


@pytest.mark.parametrize("start", START.values(), ids=START)
@pytest.mark.parametrize(("cores", "ratio", "cpu", "length", "gap_cpu"), CASES)
def test_it_is_as_fast_as_the_best_of_a_sweep_and_settled_within_ten_seconds(
    cores: int, ratio: float, cpu: float, length: Length, gap_cpu: float, start: Choice
) -> None:
    where = host(cores, ratio, cpu, length, gap_cpu=gap_cpu)
    sweep = swept(cores, ratio, cpu, length, gap_cpu)
    run = tuned(where, start, budget_for(where))
    assert run.settled_s is not None
    assert run.settled_s <= 10.0
    found = pair(run.choices[-1])
    assert throughput(where, *found, batches=250) >= 0.95 * max(sweep.values())
    for choice in run.choices:
        assert choice.workers <= cores
        assert memory_bytes(where, pair(choice)) <= 2 * GB


@pytest.mark.parametrize(("cores", "ratio", "cpu"), [(8, 0.3, 1.0), (8, 1.9, 0.5), (16, 4.2, 0.02), (2, 0.3, 1.0)])
def test_it_costs_no_more_than_the_fastest_setting_where_several_are_as_fast(
    cores: int, ratio: float, cpu: float
) -> None:
    where = host(cores, ratio, cpu)
    sweep = swept(cores, ratio, cpu, constant, 0.1)
    as_fast = [setting for setting, rate in sweep.items() if rate >= 0.98 * max(sweep.values())]
    found = pair(tuned(where, Choice(workers=cores, prefetch=8), budget_for(where)).choices[-1])
    assert throughput(where, *found, batches=250) >= 0.98 * max(sweep.values())
    assert memory_bytes(where, found) <= 1.5 * min(memory_bytes(where, setting) for setting in as_fast)
    assert memory_bytes(where, found) < max(memory_bytes(where, setting) for setting in as_fast)


@pytest.mark.parametrize("length", [constant, heavy_tailed, lognormal])
def test_it_does_not_oscillate(length: Length) -> None:
    where = host(8, 12.0, 0.5, length)
    run = tuned(where, START["one"], budget_for(where), windows=200)
    later = [window for window in run.changed_at if window > 10]
    assert len(later) <= (0 if length is constant else 8)
    assert not [window for window in later if window > 100]


def window(workers: int, prefetch: int, **others: float) -> Measures:
    """A step of 10 ms and batches of 20 ms, none of them waited for."""
    base = Measures(
        workers=workers, prefetch=prefetch, batches=100, wall_s=1.0, gap_s=GAP_S, service_s=0.02, service_q97_s=0.02
    )
    return replace(base, **others)  # type: ignore[arg-type]


STARVED = {"starved": 0.22, "wait_s": 0.002, "batches": 80}


def settled_with(workers: int, prefetch: int, budget: Budget = ROOMY) -> Controller:
    """One that is settled with what it chose for the usual window."""
    controller = Controller(budget, Choice(workers=workers, prefetch=prefetch))
    controller.add(window(workers, prefetch))
    controller.add(window(*pair(controller.choice)))
    assert controller.settled
    return controller


def test_a_start_that_is_right_is_settled_at_once() -> None:
    controller = Controller(ROOMY, Choice(workers=3, prefetch=2))
    assert controller.add(window(3, 2)) is None
    assert controller.settled


def test_the_first_window_gives_the_setting_and_the_second_settles_it() -> None:
    controller = Controller(ROOMY, Choice(workers=8, prefetch=4))
    assert pair(controller.add(window(8, 4)) or controller.choice) == (3, 2)
    assert controller.reason == "a batch takes a worker 20 ms, a step 10 ms"
    assert controller.add(window(3, 2)) is None
    assert controller.settled


def test_a_raise_without_a_gain_is_taken_back_and_not_tried_again() -> None:
    controller = settled_with(3, 2, replace(ROOMY, workers=4))
    tried = [controller.add(window(*pair(controller.choice), **STARVED)) for _ in range(60)]
    changes = [pair(choice) for choice in tried if choice is not None]
    # A longer queue; that was nothing: one worker more; neither was that.
    assert changes == [(3, 4), (4, 2), (3, 2)]
    assert controller.reason == "4 workers with 2 batches ahead of each were no faster"
    assert controller.settled


def test_it_is_tried_again_when_what_is_measured_has_changed() -> None:
    controller = settled_with(3, 2, replace(ROOMY, workers=4))
    for _ in range(60):
        controller.add(window(*pair(controller.choice), **STARVED))
    slower = STARVED | {"service_s": 0.04, "service_q97_s": 0.04}
    later = [controller.add(window(*pair(controller.choice), **slower)) for _ in range(60)]
    assert any(choice is not None and choice.workers == 4 for choice in later)


def test_a_raise_that_gains_is_kept_and_said_why() -> None:
    controller = settled_with(3, 2)
    slow = {"service_s": 0.029, "service_q97_s": 0.029}
    later = [controller.add(window(3, 2, **STARVED, **slow)) for _ in range(10)]
    assert [pair(choice) for choice in later if choice is not None] == [(4, 2)]
    assert controller.reason == "3 workers were not enough: 22 % of the batches were not ready"
    assert not controller.settled
    assert controller.add(window(4, 2, **slow)) is None
    assert controller.settled


def test_measures_that_keep_changing_are_followed_less_and_less() -> None:
    controller = settled_with(3, 2, replace(ROOMY, workers=4))
    changed = []
    for number in range(400):
        service_s = 0.02 if number // 15 % 2 else 0.04
        times = {"service_s": service_s, "service_q97_s": service_s}
        if controller.add(window(*pair(controller.choice), **STARVED, **times)) is not None:
            changed.append(number)
    assert 4 < len(changed) <= 12
    assert max(changed) < 250


def test_how_slow_slow_batches_are_is_remembered() -> None:
    known = Known()
    known.added_to(window(3, 2, service_q97_s=0.1, batch_bytes=5))
    later = known.added_to(window(3, 2, service_s=0.01, service_q97_s=0.01, worker_bytes=7))
    assert (later.service_q97_s, later.batch_bytes, later.worker_bytes) == (pytest.approx(0.05), 5, 7)
    known.forget_slow_batches()
    assert known.added_to(window(3, 2)).service_q97_s == pytest.approx(0.02)


def test_a_wait_that_does_not_matter_changes_nothing() -> None:
    controller = settled_with(3, 2)
    assert [controller.add(window(3, 2, starved=0.5, wait_s=0.00005)) for _ in range(40)] == [None] * 40


def test_a_quota_that_holds_the_processes_costs_workers() -> None:
    controller = settled_with(3, 2)
    choice = controller.add(window(3, 2, throttled=0.05))
    assert choice is not None
    assert (pair(choice), choice.bound) == ((2, 2), "cores")
    assert controller.reason == "3 workers were too many: the quota held the rank's processes 5 % of the time"
    assert [controller.add(window(2, 2, **STARVED)) for _ in range(30)] == [None] * 30


def test_a_quota_takes_a_third_of_many_workers_at_a_time() -> None:
    slow = {"service_s": 0.072, "service_q97_s": 0.072}
    controller = Controller(replace(ROOMY, cores=16), Choice(workers=8, prefetch=2))
    assert controller.add(window(8, 2, **slow)) is None
    tried = [controller.add(window(*pair(controller.choice), throttled=0.2, **slow)) for _ in range(8)]
    assert [choice.workers for choice in tried if choice is not None] == [5, 3, 2, 1]


def test_workers_that_were_not_what_the_quota_held_come_back() -> None:
    controller = settled_with(3, 2)
    controller.add(window(3, 2, throttled=0.3))
    choice = controller.add(window(2, 2, throttled=0.3, batches=60))
    assert choice is not None
    assert choice.workers == 3
    assert [controller.add(window(3, 2, throttled=0.3)) for _ in range(9)] == [None] * 9


def test_more_cores_than_the_share_kept_busy_twice_costs_workers() -> None:
    controller = settled_with(3, 2, Budget(cores=4, workers=4))
    assert controller.add(window(3, 2, own_cores=2.6)) is None
    choice = controller.add(window(3, 2, own_cores=2.6))
    assert choice is not None
    assert choice.workers == 1
    assert controller.reason == "3 workers were too many: with the process itself they kept 4.6 of 4 cores busy"


def test_workers_that_are_many_more_than_needed_go_and_come_back_if_missed() -> None:
    controller = settled_with(3, 2)
    later = [controller.add(window(3, 2, gap_s=0.04, batches=25)) for _ in range(30)]
    assert [pair(choice) for choice in later if choice is not None] == [(1, 2)]
    assert controller.reason == "1 of 3 workers would do: a batch takes a worker 20 ms, a step 40 ms"
    choice = controller.add(window(1, 2, gap_s=0.04, batches=20, starved=0.5, wait_s=0.01))
    assert choice is not None
    assert pair(choice) == (3, 2)


def test_a_budget_that_shrinks_is_kept_at_once() -> None:
    controller = settled_with(3, 2)
    controller.budget = replace(ROOMY, workers=2)
    assert pair(controller.add(window(3, 2)) or controller.choice) == (2, 2)
    assert controller.reason == "num_workers=3, prefetch_factor=2 is more than there is room for"
    controller.budget = replace(ROOMY, workers=0)
    assert pair(controller.add(window(2, 2)) or controller.choice) == (0, 0)
    controller.budget = ROOMY
    later = [controller.add(window(0, 0, **STARVED)) for _ in range(12)]
    assert any(choice is not None and choice.workers >= 3 for choice in later)


def test_batches_that_grow_beyond_the_memory_shorten_the_queue_for_good() -> None:
    controller = settled_with(3, 2, replace(ROOMY, memory_bytes=GB))
    large = controller.add(window(3, 2, batch_bytes=2 * 10**8))
    assert large is not None
    assert (pair(large), large.bound) == ((2, 2), "memory")
    for _ in range(40):
        controller.add(window(*pair(controller.choice), batch_bytes=10**6, **STARVED))
        assert controller.choice.workers * controller.choice.prefetch * 2 * 10**8 <= GB


def test_a_setting_that_there_is_no_room_for_any_more_is_not_gone_back_to() -> None:
    controller = settled_with(3, 2)
    controller.add(window(3, 2, throttled=0.3))
    controller.budget = replace(ROOMY, workers=2)
    assert controller.add(window(2, 2, throttled=0.3, batches=60)) is None
    assert controller.choice.workers == 2


def test_a_start_over_the_budget_is_never_gone_back_to() -> None:
    controller = Controller(replace(ROOMY, workers=2), Choice(workers=8, prefetch=2))
    controller.add(window(8, 2))
    assert controller.choice.workers == 2
    for _ in range(30):
        controller.add(window(*pair(controller.choice), **(STARVED | {"batches": 10})))
        assert controller.choice.workers <= 2
    assert controller.choice.bound == "cores"


def test_a_choice_that_nobody_sets_is_final_after_some_windows() -> None:
    controller = Controller(ROOMY, Choice(workers=8, prefetch=2))
    assert controller.add(window(8, 2)) is not None
    assert [controller.add(window(8, 2, **STARVED)) for _ in range(3)] == [None] * 3
    assert controller.settled
    assert pair(controller.choice) == (3, 2)


QUICK = {"service_s": 0.0006, "service_q97_s": 0.0006, "gap_s": 0.001, "batches": 500}
INLINE = QUICK | {"starved": 1.0, "wait_s": 0.0006}


def test_a_loader_of_tiny_batches_is_left_without_workers() -> None:
    controller = Controller(ROOMY, START["one"])
    assert pair(controller.add(window(1, 2, **QUICK)) or controller.choice) == (0, 0)
    assert [controller.add(window(0, 0, **INLINE)) for _ in range(60)] == [None] * 60
    assert controller.settled


def test_batches_that_have_become_tiny_lose_their_workers_for_good() -> None:
    controller = settled_with(3, 2)
    later = [controller.add(window(3, 2, **QUICK)) for _ in range(30)]
    assert [pair(choice) for choice in later if choice is not None] == [(0, 0)]
    assert [controller.add(window(0, 0, **INLINE)) for _ in range(60)] == [None] * 60


def test_no_workers_that_cost_throughput_are_taken_back() -> None:
    controller = settled_with(3, 2)
    for _ in range(30):
        controller.add(window(*pair(controller.choice), **QUICK))
        if controller.choice.workers == 0:
            break
    assert pair(controller.add(window(0, 0, **INLINE | {"batches": 300})) or controller.choice) == (3, 2)


def slow_to_start(workers: int) -> Controller:
    controller = Controller(ROOMY, Choice(workers=workers, prefetch=2), forks=False)
    assert controller.add(window(workers, 2)) is None or workers != 3
    return controller


def test_workers_that_are_slow_to_start_are_chosen_once() -> None:
    controller = slow_to_start(1)
    assert pair(controller.choice) == (3, 2)
    assert [controller.add(window(3, 2, **STARVED)) for _ in range(60)] == [None] * 60
    assert controller.settled
    ample = [controller.add(window(3, 2, gap_s=0.04, batches=25)) for _ in range(60)]
    assert ample == [None] * 60


def test_workers_that_are_slow_to_start_are_raised_where_a_fifth_of_the_time_is_waited_for() -> None:
    controller = slow_to_start(3)
    slow = {"service_s": 0.04, "service_q97_s": 0.04, "starved": 1.0, "wait_s": 0.004, "batches": 71}
    later = [controller.add(window(*pair(controller.choice), **slow)) for _ in range(60)]
    # No gain is seen, but going back would stop training as well.
    assert next(pair(choice) for choice in later if choice is not None) == (5, 2)
    assert min(choice.workers for choice in later if choice is not None) == 5
    assert len([choice for choice in later if choice is not None]) <= 3


def test_workers_that_are_slow_to_start_and_cost_throughput_are_taken_back() -> None:
    controller = slow_to_start(3)
    slow = {"service_s": 0.04, "service_q97_s": 0.04, "starved": 1.0, "wait_s": 0.004, "batches": 71}
    while controller.choice.workers == 3:
        controller.add(window(3, 2, **slow))
    assert controller.choice.workers == 5
    for _ in range(2):
        controller.add(window(*pair(controller.choice), **slow | {"batches": 50}))
    assert controller.choice.workers == 3
