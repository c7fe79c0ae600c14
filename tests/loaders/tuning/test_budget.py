import os
import random
from collections import Counter
from typing import Any

import pytest

from lightning_ncclsafe.facts import Capacity
from lightning_ncclsafe.loaders.tuning.budget import Budget, budget_of, least_budget

GB = 10**9


def ranks_on(masks: list[range | tuple[int, ...]], **limits: object) -> list[Capacity]:
    return [Capacity(machine="a", cpus=tuple(mask), **limits) for mask in masks]  # type: ignore[arg-type]


def workers(ranks: list[Capacity]) -> list[int]:
    return [budget_of(rank, ranks).workers for rank in ranks]


def test_unbound_bound_and_numa_bound_ranks_get_equal_shares() -> None:
    assert workers(ranks_on([range(64)] * 8)) == [8] * 8
    assert workers(ranks_on([range(8 * i, 8 * i + 8) for i in range(8)])) == [8] * 8
    assert workers(ranks_on([range(32)] * 4 + [range(32, 64)] * 4)) == [8] * 8


def test_two_cores_shared_by_four_ranks_leave_none() -> None:
    budget = budget_of(*(lambda ranks: (ranks[0], ranks))(ranks_on([range(2)] * 4)))
    assert (budget.workers, budget.cores, budget.cores_from) == (0, 0.5, "2 cores shared by 4 ranks")


@pytest.mark.parametrize(
    ("quota", "ranks", "share"), [(1.5, 1, 1), (1.5, 2, 0), (6.0, 2, 3), (7.9, 2, 3), (1e6, 1, 64)]
)
def test_a_quota_caps_the_share_and_is_rounded_down(quota: float, ranks: int, share: int) -> None:
    assert workers(ranks_on([range(64)] * ranks, quotas={"/job": quota})) == [share] * ranks


def test_a_quota_is_shared_by_the_ranks_of_its_group_only() -> None:
    ranks = [Capacity(machine="a", cpus=tuple(range(64)), quotas={f"/{i // 2}": 4.0}) for i in range(4)]
    assert workers(ranks) == [2] * 4
    assert budget_of(ranks[0], ranks).cores_from == "quota of 4 cores shared by 2 ranks"


def test_ranks_of_other_hosts_do_not_count() -> None:
    own = Capacity(machine="a", cpus=(0, 1), memory_available_bytes=8 * GB)
    other = Capacity(machine="b", cpus=(0, 1), memory_available_bytes=8 * GB)
    for local in ([own, other], [other], [], [own]):
        budget = budget_of(own, local)
        assert (budget.workers, budget.memory_bytes, budget.cores_from) == (2, 4 * GB, "2 cores")


def test_without_a_mask_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert workers([Capacity(machine="a")] * 3) == [2] * 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers([Capacity()]) == [1]


def test_partly_overlapping_masks_are_described() -> None:
    ranks = ranks_on([range(0, 6), range(4, 10)])
    budget = budget_of(ranks[0], ranks)
    assert (budget.cores, budget.cores_from) == (5.0, "6 cores, some of them shared with other ranks")


def test_no_host_is_oversubscribed() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ranks = [some_rank(rng) for _ in range(rng.randint(1, 9))]
        found = workers(ranks)
        for machine in {rank.machine for rank in ranks}:
            here = [(rank, count) for rank, count in zip(ranks, found, strict=True) if rank.machine == machine]
            assert sum(count for _, count in here) <= len({cpu for rank, _ in here for cpu in rank.cpus})
            assert_within_quotas(here)


def some_rank(rng: random.Random) -> Capacity:
    quotas: dict[str, float] = rng.choice([{"/a": 2.5}, {"/b": 11 / 3}, {}])
    return Capacity(
        machine=rng.choice("xy"),
        cpus=tuple(sorted(rng.sample(range(24), rng.randint(1, 24)))),
        quotas=quotas,
    )


def assert_within_quotas(here: list[tuple[Capacity, int]]) -> None:
    used: Counter[str] = Counter()
    for rank, count in here:
        used.update(dict.fromkeys(rank.quotas, count))
    assert all(used[group] <= quota for rank, _ in here for group, quota in rank.quotas.items())


def test_equal_shares_never_lose_a_core_to_rounding() -> None:
    for count in range(1, 60):
        for cores in (1, 3):
            first, *others = ranks_on([range(count * cores)] * count)  # all of them are alike
            assert budget_of(first, [first, *others]).cores == cores


@pytest.mark.parametrize(
    ("facts", "ranks", "size", "said"),
    [
        (
            {"memory_left_bytes": {"/": 3 * GB}, "memory_available_bytes": 60 * GB},
            2,
            0.75,
            "half of the 3.0 GB left under the control group's limit shared by 2 ranks",
        ),
        ({"memory_left_bytes": {"/": -GB}}, 1, 0.0, "half of the 0 bytes left under the control"),
        (
            {"memory_left_bytes": {"/": 99 * GB}, "memory_available_bytes": 8 * GB},
            4,
            1.0,
            "half of the 8.0 GB available on the host shared by 4 ranks",
        ),
        (
            {"memory_available_bytes": 80 * GB, "process_limit_bytes": 3 * GB},
            4,
            1.5,
            "half of the 3.0 GB that the process may still allocate",
        ),
    ],
)
def test_memory_is_half_of_the_least_available(facts: dict[str, Any], ranks: int, size: float, said: str) -> None:
    local = [Capacity(machine="a", cpus=(0,), **facts) for _ in range(ranks)]
    budget = budget_of(local[0], local)
    assert budget.memory_bytes == size * GB
    assert budget.memory_from.startswith(said)


def test_a_memory_limit_is_shared_by_the_ranks_of_its_group_only() -> None:
    local = [Capacity(machine="a", cpus=(i,), memory_left_bytes={f"/{i}": 2 * GB}) for i in range(3)]
    assert budget_of(local[0], local).memory_bytes == GB


def test_shared_memory_is_half_of_what_is_free_for_all_ranks() -> None:
    local = [Capacity(machine="a", cpus=(0,), shm_free_bytes=64_000_000)] * 2
    assert budget_of(local[0], local).shm_bytes == 16_000_000


def test_half_of_the_fewest_open_files_are_for_batches() -> None:
    ranks = [Capacity(machine="a", cpus=(0,), open_files_left=left) for left in (None, 1000, 800)]
    assert budget_of(ranks[1], ranks).open_files == 500
    assert least_budget(ranks).open_files == 400


def test_unknown_capacities_limit_nothing() -> None:
    budget = budget_of(Capacity(), [])
    assert (budget.memory_bytes, budget.shm_bytes, budget.open_files, budget.memory_from) == (None, None, None, "")


def test_a_wider_shared_quota_may_be_the_limit() -> None:
    def rank(pod: str) -> Capacity:
        quotas = {"/node": 8.0, pod: 6.0}
        return Capacity(machine="a", cpus=tuple(range(64)), quotas=quotas)

    local = [rank("/node/a"), *[rank("/node/b")] * 3]
    assert [budget_of(one, local).workers for one in local] == [2, 2, 2, 2]
    assert budget_of(local[0], local).cores_from == "quota of 8 cores shared by 4 ranks"


def test_the_tightest_nested_memory_limit_per_rank_counts() -> None:
    def rank(pod: str) -> Capacity:
        return Capacity(machine="a", memory_left_bytes={"/node": 800, pod: 600})

    local = [rank("/node/a"), *[rank("/node/b")] * 3]
    assert budget_of(local[0], local).memory_bytes == 100


@pytest.mark.parametrize(("cores", "most"), [(0.1, 1), (0.5, 2), (1.0, 4), (7.5, 30)])
def test_four_workers_a_core_are_accepted(cores: float, most: int) -> None:
    assert Budget(cores=cores, workers=int(cores)).most_asked == most


def test_batches_fit_memory_shared_memory_and_open_files() -> None:
    budget = Budget(cores=1, workers=1, memory_bytes=1000, shm_bytes=700, open_files=90)
    assert budget.most_batches(100, 3) == {"memory": 10, "shm": 7, "files": 30}
    assert budget.most_batches(100, 3, copies=2) == {"memory": 5, "shm": 7, "files": 30}
    assert budget.most_batches(0, 0) == {} == Budget(cores=1, workers=1).most_batches(100, 3)
