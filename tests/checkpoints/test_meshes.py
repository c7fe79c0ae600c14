"""Parts of models that meshes of four ranks split in every way, read on each rank alone: no rank ever hears another.

Ranks are forks whose process group sends nothing. So what is read is what is there, and no collective can have helped.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_ncclsafe.checkpoints.boundary import NotProvenError
from lightning_ncclsafe.checkpoints.sharded_save import Share, file_of, joined
from lightning_ncclsafe.checkpoints.shards import Chunk, OwnShard, pieces_of

_FORK = multiprocessing.get_context("fork")
RANKS = range(4)
# Imports what each fork would import: it takes seconds.
torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).zero_grad()
TENSOR_PARALLEL = {"0": ColwiseParallel(), "1": RowwiseParallel()}


class Net(nn.Sequential):
    """Sizes that four do not divide; parameters that modules share."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(6, 3))
        self[4].weight = self[3].weight


def sharded(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


def replicated(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


def in_two_dimensions(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    parallelize_module(net, mesh["tensor_parallel"], TENSOR_PARALLEL, src_data_rank=None)
    fully_shard(net[0], mesh=mesh["data_parallel"])
    fully_shard(net, mesh=mesh["data_parallel"])


def tensor_parallel(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor_parallel",))
    parallelize_module(net, mesh, TENSOR_PARALLEL, src_data_rank=None)


def act(split: Callable[[nn.Module], None], rank: int, sender: Connection) -> None:
    dist.init_process_group("fake", rank=rank, world_size=len(RANKS), store=FakeStore())
    torch.manual_seed(1)
    net = Net()
    split(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shard = OwnShard(net)
    state = {"state_dict": shard.weights(), "optimizer_0": shard.optimizer_state(optimizer, optimizer.param_groups)}
    pieces = pieces_of(state, is_first=rank == 0)
    values = [piece.values.numpy() if isinstance(piece.values, torch.Tensor) else piece.values for piece in pieces]
    sender.send((shard.layout, shard.why_unread, [piece.chunk for piece in pieces], values))
    sender.close()


def read_on_all(split: Callable[[nn.Module], None]) -> list[tuple[str, str, list[Chunk], list[Any]]]:
    """What each rank has."""
    receivers, processes = [], []
    try:
        # One after the other, on this thread: filelock, which PyTorch imports, refuses forks of several at a time.
        for rank in RANKS:
            receiver, sender = _FORK.Pipe(duplex=False)
            processes.append(_FORK.Process(target=act, args=(split, rank, sender)))
            processes[-1].start()
            sender.close()
            receivers.append(receiver)
        assert all(receiver.poll(40) for receiver in receivers), "a rank has not answered"
        return [receiver.recv() for receiver in receivers]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("split", "parts"),
    [
        (sharded, [0, 1, 2, 3]),
        (replicated, [0, 1, 0, 1]),
        (in_two_dimensions, [0, 1, 2, 3]),
        (tensor_parallel, [0, 1, 2, 3]),
    ],
)
def test_the_shards_of_all_ranks_cover_the_whole(split: Callable[[nn.Module], None], parts: list[int]) -> None:
    found = read_on_all(split)
    layouts = [layout for layout, *_ in found]
    assert [layouts.index(layout) for layout in layouts] == parts
    shares = {rank: share_of(chunks) for rank, (_, why, chunks, _) in enumerate(found) if not why}
    entries = {entry.path: entry for entry in joined(shares, [])}
    torch.manual_seed(1)
    whole = Net().state_dict()
    assert {path[1] for path in entries if path[0] == "state_dict"} == whole.keys()
    for name, expected in whole.items():
        got = torch.full_like(expected, 99)
        for chunk in entries["state_dict", name].chunks:
            rank = next(rank for rank in RANKS if file_of(rank) == chunk.file)
            value = torch.as_tensor(found[rank][3][chunk.begin])
            got[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] = value
        assert torch.equal(got, expected), name
    # Whoever is dead takes its part with it, unless that has a replica.
    for rank in RANKS:
        if parts.count(parts[rank]) > 1:
            joined({other: share for other, share in shares.items() if other != rank}, [])
        else:
            with pytest.raises(NotProvenError, match="is not complete"):
                joined({other: share for other, share in shares.items() if other != rank}, [])


def share_of(chunks: list[Chunk]) -> Share:
    """Of a file in which each part is one byte long."""
    laid = tuple(replace(chunk, begin=number, length=1) for number, chunk in enumerate(chunks))
    return Share(size=len(laid), chunks=laid)
