"""Which processes are ranks, by what each launcher leaves in their environments."""

from collections.abc import Mapping

import pytest

from lightning_ncclsafe.inspecting.ranks import FoundRanks, SeenProcess, ended_beside, find_ranks

JOB = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TRAIN = ("python", "train.py")


def process(
    pid: int, parent: int = 1, env: Mapping[str, str] | None = None, command: tuple[str, ...] = TRAIN, **more: object
) -> SeenProcess:
    return SeenProcess(pid=pid, parent=parent, environment=env, command=command, started=float(pid), **more)  # type: ignore[arg-type]


def torchrun(rank: int, local_rank: int, size: int = 4, local_size: int = 2) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
    return JOB | {name: str(number) for name, number in numbers.items()}


def placed(found: FoundRanks) -> dict[int, tuple[int, int, int, int]]:
    """Rank, local rank, number of ranks and of those of the host, by process id."""
    return {one.pid: (one.rank, one.local_rank, one.world_size, one.local_world_size) for one in found.ranks}


def test_torchrun_ranks_exclude_its_agent_and_loader_workers() -> None:
    agent = process(10, env={"PATH": "/bin"}, command=("python", "-m", "torch.distributed.run", "train.py"))
    ranks = [process(11, 10, torchrun(2, 0)), process(12, 10, torchrun(3, 1))]
    workers = [process(13, 11, torchrun(2, 0)), process(14, 13, torchrun(2, 0))]
    found = find_ranks([agent, *ranks, *workers])
    assert placed(found) == {11: (2, 0, 4, 2), 12: (3, 1, 4, 2)}
    assert {one.job for one in found.ranks} == {"node1:29500"}
    assert not found.unplaced


def test_rank_0_of_lightning_is_the_parent_of_the_others() -> None:
    given = JOB | {"NODE_RANK": "0", "WORLD_SIZE": "3"}
    others = [process(20 + rank, 20, given | {"LOCAL_RANK": str(rank)}) for rank in (1, 2)]
    found = find_ranks(
        [process(20, env={}), *others, process(30, 20, {}), process(31, 21, given | {"LOCAL_RANK": "1"})]
    )
    assert placed(found) == {20: (0, 0, 3, 3), 21: (1, 1, 3, 3), 22: (2, 2, 3, 3)}


def test_lightning_ranks_on_the_second_host_follow_the_first() -> None:
    given = JOB | {"NODE_RANK": "1", "WORLD_SIZE": "6"}
    others = [process(20 + rank, 20, given | {"LOCAL_RANK": str(rank)}) for rank in (1, 2)]
    assert placed(find_ranks([process(20, env={}), *others])) == {20: (3, 0, 6, 3), 21: (4, 1, 6, 3), 22: (5, 2, 6, 3)}


@pytest.mark.parametrize("command", [TRAIN, ("python", "-m", "torch.distributed.run")])
def test_agents_in_a_slurm_step_are_not_ranks(command: tuple[str, ...]) -> None:
    slurm = {"SLURM_JOB_ID": "815", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    agent = process(10, env=slurm, command=command)
    found = find_ranks([agent, process(11, 10, slurm | torchrun(2, 0)), process(12, 10, slurm | torchrun(3, 1))])
    assert sorted(placed(found)) == [11, 12]


def test_slurm_tasks_are_ranks() -> None:
    step = {"SLURM_JOB_ID": "815", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    tasks = [process(10 + n, env=step | {"SLURM_PROCID": str(2 + n), "SLURM_LOCALID": str(n)}) for n in (0, 1)]
    found = find_ranks(tasks)
    assert placed(found) == {10: (2, 0, 4, 2), 11: (3, 1, 4, 2)}
    assert {one.job for one in found.ranks} == {"SLURM job 815, step 0"}


def test_a_shell_in_a_slurm_task_is_not_a_rank() -> None:
    alone = {"SLURM_JOB_ID": "815", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert find_ranks([process(10, env=alone)]) == FoundRanks()


def test_kubeflow_pods_have_one_rank_each() -> None:
    assert placed(find_ranks([process(1, 0, JOB | {"RANK": "3", "WORLD_SIZE": "8"})])) == {1: (3, 0, 8, 1)}


def test_a_wrapper_with_the_ranks_environment_is_not_a_rank() -> None:
    wrapper = process(10, env=torchrun(0, 0, 2, 1), command=("python", "wrap.py"), has_torch=False)
    assert sorted(placed(find_ranks([wrapper, process(11, 10, torchrun(0, 0, 2, 1))]))) == [11]


def test_multiprocessing_children_are_left_unplaced() -> None:
    spawn = ("python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork")
    tracker = ("python", "-c", "from multiprocessing.resource_tracker import main")
    ranks = [process(11, 10, {}, spawn), process(12, 10, {}, spawn)]
    found = find_ranks([process(10, env={}), *ranks, process(13, 10, {}, tracker)])
    assert found.ranks == ()
    assert {parent: [one.pid for one in group] for parent, group in found.unplaced.items()} == {10: [11, 12]}


def test_the_newest_process_of_a_rank_is_used() -> None:
    assert sorted(placed(find_ranks([process(11, env=torchrun(0, 0)), process(12, env=torchrun(0, 0))]))) == [12]


def test_only_named_processes_are_inspected() -> None:
    ranks = [process(11, env=torchrun(0, 0)), process(12, env=torchrun(1, 1)), process(13, env={})]
    found = find_ranks(ranks, [12, 13])
    assert sorted(placed(found)) == [12]
    assert [one.pid for group in found.unplaced.values() for one in group] == [13]


def test_a_process_with_an_unreadable_environment_is_not_a_rank() -> None:
    assert find_ranks([process(11, env=None)]) == FoundRanks()


def test_cyclic_parents_terminate() -> None:
    """Process IDs are reused while processes are being listed."""
    others = [process(12, 13), process(13, 12)]
    assert [*placed(find_ranks([process(11, 12, torchrun(0, 0)), *others]))] == [11]
    assert [*placed(find_ranks([process(11, 12, torchrun(0, 0)), process(12, 11)]))] == [11]


def test_an_ended_process_is_listed_beside_the_ranks() -> None:
    ranks = [process(100, 10, torchrun(0, 0)), process(101, 10, torchrun(1, 1))]
    ended = process(102, 10, has_ended=True)
    others = [process(103, 11, has_ended=True), process(20, 10, has_ended=True), process(104, 10, command=("python",))]
    found = find_ranks([*ranks, ended, *others], [100, 101, 102])
    assert [one.pid for one in found.ranks] == [100, 101] and not found.unplaced
    # Not what another parent has started, nor what is left of an earlier start.
    assert ended_beside(found.ranks, [*ranks, ended, *others]) == [ended]
