"""What ranks do in front of the Flight Recorder: a scene is a function of one rank, run on all of them at once."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from nccl_here import NUMEL, WARM_UP, Here
from torch.nn.parallel import DistributedDataParallel

from lightning_ncclsafe._torch import process_groups

LATE_RANK = 1
HOST_DELAY_S = 0.15
HEALTHY, DELAYED = 20, 10
# How long ranks stand still before their recorders are read.
_HANGS_S = 1.0

Truth = dict[str, Any]


def _warm_up(here: Here) -> None:
    for _ in range(WARM_UP):
        dist.all_reduce(here.ones())
    here.sync()
    process_groups.time_collectives_on_device()
    here.meet("warm")


def durations(here: Here) -> Truth:
    """Collectives with a CUDA event before and after each, on the stream that they are called on."""
    _warm_up(here)
    measured: list[float] = []
    for _ in range(HEALTHY):
        tensor, begin, end = here.ones(4 * NUMEL), _event(), _event()
        begin.record()
        dist.all_reduce(tensor)
        end.record()
        end.synchronize()
        measured.append(begin.elapsed_time(end))
    here.settle()
    return {"events_ms": measured}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def delay(here: Here) -> Truth:
    """Rank 1 is late by a known time, some calls on the host and some on the device; before that nobody is."""
    _warm_up(here)
    for number in range(HEALTHY):
        _reduce_together(here, f"healthy/{number}")
    late: dict[str, list[float]] = {
        "host": [_reduce_late(here, f"host/{number}", _sleep_on_host) for number in range(DELAYED)],
        "device": [_reduce_late(here, f"device/{number}", _sleep_on_device) for number in range(DELAYED)],
    }
    here.settle()
    return {"late_ms": late, "healthy": HEALTHY, "late_rank": LATE_RANK}


def _reduce_together(here: Here, name: str) -> None:
    here.sync()
    here.meet(name)
    dist.all_reduce(here.ones())
    here.sync()


def _reduce_late(here: Here, name: str, sleep: Callable[[Here], Callable[[], float]]) -> float:
    """How late this rank has come, measured by itself, milliseconds."""
    tensor = here.ones()
    here.sync()
    here.meet(name)
    slept_ms: Callable[[], float] = sleep(here) if here.rank == LATE_RANK else lambda: 0.0
    dist.all_reduce(tensor)
    here.sync()
    return slept_ms()


def _sleep_on_host(here: Here) -> Callable[[], float]:
    began = time.perf_counter()
    time.sleep(HOST_DELAY_S)
    slept_ms = 1e3 * (time.perf_counter() - began)
    return lambda: slept_ms


def _sleep_on_device(here: Here) -> Callable[[], float]:
    """The host runs on, and its collective comes as early as ever; cycles are no seconds, so events measure it."""
    if here.device.type != "cuda":
        return _sleep_on_host(here)
    begin, end = _event(), _event()
    begin.record()
    # 0.1 s at 2 GHz; some times as long where another rank's kernel has the GPU in between.
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    end.record()
    return lambda: float(begin.elapsed_time(end))


def healthy(here: Here) -> Truth:
    """DistributedDataParallel, 20 steps."""
    _warm_up(here)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(here.device)
    model = DistributedDataParallel(layers, device_ids=[0] if here.device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.rand(16, 256, device=here.device)).square().mean().backward()
        optimizer.step()
    here.settle()
    return {}


def behind(here: Here) -> Truth:
    """Rank 1 does not call what the others wait in."""
    _warm_up(here)
    if here.rank != LATE_RANK:
        dist.all_reduce(here.ones(), async_op=True)
    _stand_still(here)
    return {"finding": {"rule": "rank-behind", "ranks": [LATE_RANK]}, "works": [LATE_RANK]}


def mismatched(here: Here) -> Truth:
    """Rank 1 calls another collective than the others."""
    _warm_up(here)
    if here.rank == LATE_RANK:
        dist.all_gather([here.ones() for _ in range(here.ranks)], here.ones(), async_op=True)
    else:
        dist.all_reduce(here.ones(), async_op=True)
    _stand_still(here)
    # Of two ranks, neither is the one that is wrong.
    ranks = [LATE_RANK] if here.ranks > 2 else [*range(here.ranks)]
    return {"finding": {"rule": "diverged-collectives", "ranks": ranks}}


def _stand_still(here: Here) -> None:
    here.meet("called")
    time.sleep(_HANGS_S)


def sub_groups(here: Here) -> Truth:
    """Groups of two neighbours, of all, and of rank 0 alone; each is reduced on by its members."""
    _warm_up(here)
    pairs = [[first, first + 1] for first in range(0, here.ranks - 1, 2)]
    groups = [dist.new_group(members, group_desc=f"pair{members[0]}") for members in [*pairs, [0]]]
    process_groups.time_collectives_on_device()
    for _ in range(5):
        for members, group in zip([*pairs, [0]], groups, strict=True):
            if here.rank in members:
                dist.all_reduce(here.ones(), group=group)
        dist.all_reduce(here.ones())
    here.settle()
    return {}


def point_to_point(here: Here) -> Truth:
    """A ring of sends and receives in one batch, and single ones between ranks 0 and 1, among collectives."""
    _warm_up(here)
    for _ in range(3):
        dist.all_reduce(here.ones())
        _ring(here)
        if here.rank == 0:
            dist.send(here.ones(8), dst=1)
        elif here.rank == 1:
            dist.recv(here.ones(8), src=0)
    dist.all_reduce(here.ones())
    here.settle()
    return {}


def _ring(here: Here) -> None:
    after, before = (here.rank + 1) % here.ranks, (here.rank - 1) % here.ranks
    operations = [dist.P2POp(dist.isend, here.ones(8), after), dist.P2POp(dist.irecv, here.ones(8), before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def coalesced(here: Here) -> Truth:
    """Several collectives under one sequence number, which only NCCL does."""
    _warm_up(here)
    for _ in range(3):
        if here.device.type == "cuda":
            with dist.distributed_c10d._coalescing_manager(device=here.device):
                for _ in range(3):
                    dist.all_reduce(here.ones(64))
            # Of unequal sizes it is made of broadcasts, which are recorded one by one and have no end of their own.
            dist.all_gather([here.ones(8 * (rank + 1)) for rank in range(here.ranks)], here.ones(8 * (here.rank + 1)))
        dist.all_reduce(here.ones())
    here.settle()
    return {}


def mispaired(here: Here) -> Truth:
    """Rank 1 calls two collectives in the other order, as one that has skipped a sharded layer does; all complete."""
    _warm_up(here)
    whole, part = here.ones(27 * here.ranks), here.ones(27)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part)

    def scatter() -> None:
        dist.reduce_scatter_tensor(part, whole)

    for call in (scatter, gather) if here.rank == LATE_RANK else (gather, scatter):
        call()
    for _ in range(3):
        dist.all_reduce(here.ones(8))
    here.settle()
    sizes = [4 * 27 * (here.ranks if rank == LATE_RANK else 1) for rank in range(here.ranks)]
    return {"mispaired": {"seq": WARM_UP + 1, "size_bytes": sizes}}


SCENES: dict[str, Callable[[Here], Truth]] = {
    "durations": durations,
    "delay": delay,
    "healthy": healthy,
    "behind": behind,
    "mismatched": mismatched,
    "sub_groups": sub_groups,
    "point_to_point": point_to_point,
    "coalesced": coalesced,
    "mispaired": mispaired,
}
