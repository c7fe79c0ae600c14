"""In which process group's collective another process waits."""

from pathlib import Path

import torch.distributed as dist
from test_objects import running

from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.objects import Interpreter
from lightning_ncclsafe.inspecting.rank_objects import group_of

FILE = "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
PROGRAM = """
    import types

    class Made:
        pass

    tensor_parallel, gone = Made(), Made()
    c10d = types.ModuleType("torch.distributed.distributed_c10d")
    c10d._pg_names = {Made(): "0", tensor_parallel: "tp"}
    c10d._pg_group_ranks = {Made(): {0: 0, 1: 1}, tensor_parallel: {7: 2, 0: 0, 3: 1}}
    sys.modules.update({f"one of many, {number}": types for number in range(3000)})
    sys.modules[c10d.__name__] = c10d
    kept += [tensor_parallel, gone]
    wait()
"""


def in_call(group: int) -> list[SeenFrame]:
    users = SeenFrame("/home/ada/train.py", 1, "reduce", addresses={"group": 1234})
    return [users, SeenFrame(FILE, 5, "all_reduce", addresses={"group": group}), SeenFrame(FILE, 6, "wrapper")]


def test_the_group_of_a_call_is_read_with_its_members(tmp_path: Path) -> None:
    with running(tmp_path, PROGRAM) as (pid, (tensor_parallel, gone)), Interpreter(pid) as read:
        assert group_of(read, in_call(tensor_parallel)) == Group(name="tp", ranks=(0, 3, 7))
        assert group_of(read, in_call(gone)) is None
        assert group_of(read, in_call(0)) is None
        assert group_of(read, in_call(tensor_parallel)[:1]) is None


def test_torch_keeps_its_groups_there() -> None:
    c10d = dist.distributed_c10d
    assert isinstance(c10d._pg_names, dict) and isinstance(c10d._pg_group_ranks, dict)
