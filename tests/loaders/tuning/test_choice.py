from dataclasses import replace

import pytest

from lightning_ncclsafe.loaders.tuning import words
from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice, choose
from lightning_ncclsafe.loaders.tuning.expected import expected_wait_s
from lightning_ncclsafe.loaders.tuning.measures import Measures, worst_of

MB = 10**6
ROOMY = Budget(cores=16, workers=16)


def measured(service_s: float, gap_s: float, **others: float) -> Measures:
    base = Measures(workers=1, prefetch=2, batches=50, wall_s=1.0, gap_s=gap_s, service_s=service_s)
    return replace(base, **({"service_q97_s": service_s} | others))  # type: ignore[arg-type]


def pair(choice: Choice) -> tuple[int, int]:
    return choice.workers, choice.prefetch


@pytest.mark.parametrize(
    ("service_s", "gap_s", "workers"),
    [(0.010, 0.011, 1), (0.010, 0.010, 2), (0.040, 0.010, 5), (0.1, 0.010, 11), (0.0010, 0.010, 1)],
)
def test_workers_are_a_tenth_faster_than_the_step(service_s: float, gap_s: float, workers: int) -> None:
    choice = choose(measured(service_s, gap_s), ROOMY)
    assert (pair(choice), choice.bound, choice.wait_s) == ((workers, 2), "need", 0.0)


def test_loading_that_costs_less_than_a_hundredth_of_the_step_needs_no_worker() -> None:
    assert pair(choose(measured(0.0009, 0.1), ROOMY)) == (0, 0)
    assert pair(choose(measured(0.0011, 0.1), ROOMY)) == (1, 2)


@pytest.mark.parametrize("gap_s", [0.0, 0.0001, 0.001, 0.01])
def test_a_batch_that_is_made_as_fast_as_it_is_handed_over_needs_no_worker(gap_s: float) -> None:
    assert pair(choose(measured(0.0008, gap_s), ROOMY)) == (0, 0)
    assert choose(measured(0.001, gap_s), ROOMY).workers >= 1
    assert choose(measured(0.0, gap_s), ROOMY).workers >= 1  # not measured


def test_slow_batches_are_covered_by_those_that_are_ready() -> None:
    usual, slow = (choose(measured(0.04, 0.01, service_q97_s=q97), ROOMY) for q97 in (0.05, 0.5))
    assert usual.prefetch == 2
    assert slow.workers == usual.workers
    assert slow.workers * slow.prefetch * 0.01 >= 0.5
    assert choose(measured(0.04, 0.01, service_q97_s=1e3), ROOMY).prefetch == 64


def test_each_tensor_of_a_batch_that_is_ready_is_an_open_file() -> None:
    slow = measured(0.04, 0.01, service_q97_s=1e3, tensors=20)
    assert choose(slow, ROOMY).prefetch == 64
    choice = choose(slow, replace(ROOMY, open_files=500, memory_bytes=10**12))
    assert (pair(choice), choice.bound) == ((5, 5), "files")
    assert "bound by open files (ulimit -n; 500 " in words.bound_words(choice, replace(ROOMY, open_files=500))


def test_one_worker_with_one_batch_ahead_waits_for_no_other() -> None:
    slow = measured(0.04, 0.05, service_q97_s=1.0)
    assert expected_wait_s(1, 1, slow, ROOMY) == 0.0
    assert expected_wait_s(2, 1, slow, ROOMY) == pytest.approx(0.45)


def test_a_step_that_takes_no_time_gets_all_there_are() -> None:
    choice = choose(measured(0.04, 0.0), replace(ROOMY, workers=7))
    assert (choice.workers, choice.bound) == (7, "cores")
    assert choice.wait_s == pytest.approx(0.04 / 7)


def test_what_was_not_measured_changes_nothing() -> None:
    assert choose(replace(measured(0.0, 0.1), workers=3), ROOMY).workers == 3


def test_the_budget_caps_workers_however_little_they_compute() -> None:
    choice = choose(measured(0.1, 0.01, cpu_share=0.01, own_cores=0.0), Budget(cores=4, workers=4))
    assert (choice.workers, choice.bound) == (4, "cores")
    assert choice.wait_s == pytest.approx(0.1 / 4 - 0.01)


def test_without_a_budget_for_workers_the_main_thread_loads() -> None:
    choice = choose(measured(0.1, 0.01), Budget(cores=0.5, workers=0))
    assert choice == Choice(workers=0, prefetch=0, bound="cores", wait_s=0.1)


@pytest.mark.parametrize(
    ("own_cores", "cpu_share", "workers"), [(1.0, 1.0, 7), (3.0, 1.0, 5), (3.0, 0.5, 8), (20.0, 1.0, 1), (0.5, 1.0, 8)]
)
def test_what_the_process_itself_keeps_busy_is_left_to_it(own_cores: float, cpu_share: float, workers: int) -> None:
    choice = choose(measured(1.0, 0.01, own_cores=own_cores, cpu_share=cpu_share), Budget(cores=8, workers=8))
    assert choice.workers == workers
    assert workers == 1 or workers * cpu_share + own_cores <= 8 * 1.1


def test_loading_in_the_main_thread_is_not_counted_as_its_own() -> None:
    inline = replace(measured(0.09, 0.01, own_cores=1.0), workers=0, prefetch=0)
    assert choose(inline, Budget(cores=2, workers=2)).workers == 2


def test_memory_cuts_the_queue_first_then_workers() -> None:
    varied = measured(0.04, 0.01, service_q97_s=0.2, batch_bytes=10 * MB, worker_bytes=100 * MB)
    free = choose(varied, ROOMY)
    found = [choose(varied, replace(ROOMY, memory_bytes=size * MB)) for size in (750, 600, 400, 119, 110, 109)]
    assert (free.workers, free.prefetch) == (5, 11)
    assert [pair(choice) for choice in found] == [(5, 5), (5, 2), (3, 3), (1, 1), (1, 1), (0, 0)]
    assert {choice.bound for choice in found} == {"memory"}


def test_a_shorter_queue_that_leaves_room_for_workers_is_taken_where_batches_take_equally_long() -> None:
    even = measured(0.08, 0.01, batch_bytes=100 * MB)
    budget = replace(ROOMY, memory_bytes=800 * MB)
    assert pair(choose(even, budget)) == (8, 1)
    assert pair(choose(replace(even, service_q97_s=0.4), budget)) == (4, 2)


def test_pinned_batches_are_held_twice_in_memory_but_not_in_shared_memory() -> None:
    even = measured(0.04, 0.01, batch_bytes=10 * MB)
    assert pair(choose(even, replace(ROOMY, memory_bytes=200 * MB), copies=2)) == (5, 2)
    assert choose(even, replace(ROOMY, memory_bytes=199 * MB), copies=2).bound == "memory"
    assert pair(choose(even, replace(ROOMY, shm_bytes=100 * MB), copies=2)) == (5, 2)


def test_shared_memory_is_named_where_there_is_least_of_it() -> None:
    even = measured(0.04, 0.01, batch_bytes=10 * MB)
    choice = choose(even, replace(ROOMY, shm_bytes=64 * MB, memory_bytes=1000 * MB))
    assert (choice.bound, pair(choice)) == ("shm", (5, 1))
    assert choose(even, replace(ROOMY, shm_bytes=64 * MB, memory_bytes=50 * MB)).bound == "memory"


def test_every_choice_is_within_the_budget() -> None:
    for service_s in (0.001, 0.02, 0.3):
        for memory in (0, 150, 400, 3000):
            for shm in (0, 30, 500):
                m = measured(service_s, 0.01, service_q97_s=9 * service_s, batch_bytes=10 * MB, worker_bytes=50 * MB)
                choice = choose(m, Budget(cores=6, workers=6, memory_bytes=memory * MB, shm_bytes=shm * MB))
                ready = choice.workers * choice.prefetch * 10
                assert choice.workers <= 6
                assert choice.workers * 50 + ready <= memory
                assert ready <= shm
                assert (choice.workers == 0) == (choice.prefetch == 0)


def test_the_worst_of_all_ranks_is_what_a_setting_has_to_suffice_for() -> None:
    fast = Measures(workers=4, prefetch=2, batches=90, wall_s=1.0, gap_s=0.01, service_s=0.02, batch_bytes=9)
    slow = Measures(workers=4, prefetch=2, batches=40, wall_s=1.2, gap_s=0.02, service_s=0.08, wait_s=0.01)
    busy = replace(fast, starved=0.3, service_q97_s=0.5, cpu_share=0.2, own_cores=2.0, worker_bytes=7, throttled=0.1)
    worst = worst_of([fast, replace(slow, cpu_share=0.6), replace(busy, cpu_share=0.2)])
    assert (worst.batches, worst.wall_s, worst.gap_s, worst.service_s, worst.wait_s) == (40, 1.2, 0.01, 0.08, 0.01)
    assert (worst.starved, worst.service_q97_s, worst.own_cores, worst.throttled) == (0.3, 0.5, 2.0, 0.1)
    assert (worst.batch_bytes, worst.worker_bytes, worst.cpu_share) == (9, 7, 1.0)
    with pytest.raises(ValueError, match="measures of no rank"):
        worst_of([])
