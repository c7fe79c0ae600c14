"""Constructed recordings of devices, links and hosts that fail."""

from dataclasses import replace

from builders import (
    ALL_REDUCE,
    EPOCH_END,
    NCCL,
    ONE,
    TRAINING_STEP,
    job,
    raised,
    user,
)
from constructing import at_host, by_interface, made, on_gpu, spinning, with_pending

from lightning_ncclsafe.facts import (
    IncidentKind,
    JobFacts,
    Phase,
    SilentHost,
)

SYNC = user("training_step", 31, code="loss.item()")


@made("gpu-stuck", ranks=(2,))
def gpu_that_fell_off_the_bus() -> JobFacts:
    """All have enqueued the same; one device starts nothing more, and the kernel says why."""
    ranks = [with_pending(spinning(rank), completed=60, started=61) for rank in range(4)]
    stuck = with_pending(NCCL.waiting(2, seq=61), completed=60, started=60)
    ranks[2] = on_gpu(stuck, busy=False, power_w=70.0, xids=("79 (fallen off the bus)",))
    return job(*ranks)


@made("gpu-stuck", ranks=(2,))
def gpu_that_freezes_silently() -> JobFacts:
    """Its oldest collective has been finished by all peers; neither NVML nor the kernel's log says anything."""
    ranks = [with_pending(spinning(rank), completed=60, started=61) for rank in range(4)]
    ranks[2] = on_gpu(with_pending(NCCL.waiting(2, seq=61), completed=57, started=58), busy=True, power_w=120.0)
    return job(*ranks)


@made("gpu-stuck", ranks=(1,))
def kernel_that_never_ends() -> JobFacts:
    """Rank 1 has called nothing that is outstanding, and waits for its own device."""
    waits = replace(user("training_step", 88, code="torch.cuda.synchronize()"))
    stuck = on_gpu(NCCL.working(1, waits, seq=60, action=TRAINING_STEP), busy=True, power_w=180.0)
    return job(*(stuck if rank == 1 else spinning(rank) for rank in range(4)))


@made("p2p-blocked", ranks=(0, 1, 2, 3))
def first_collective_between_gpus() -> JobFacts:
    """Driver 545, or a board with ACS on: the first collective starts everywhere and never ends."""
    ranks = []
    for rank in range(4):
        facts = NCCL.rank(
            rank, ALL_REDUCE, seq=1, outstanding=1, phase=Phase.INIT, batch=-1, action="[Strategy]SafeDDP.setup"
        )
        ranks.append(on_gpu(with_pending(facts, completed=0, started=1), busy=True, power_w=95.0))
    return job(*ranks)


@made("wrong-interface", ranks=None)
def bridge_of_containers_on_both_hosts() -> JobFacts:
    """NCCL takes docker0 on both hosts, and that has the same address there."""
    ranks = []
    for rank in range(4):
        facts = NCCL.rank(rank, ALL_REDUCE, seq=1, outstanding=1, phase=Phase.INIT, batch=-1)
        placed = at_host(with_pending(facts, completed=0, started=0), f"node-{rank // 2}", local_rank=rank % 2)
        ranks.append(by_interface(placed, "docker0", "172.17.0.1"))
    return job(*ranks)


@made("wrong-interface", ranks=(2, 3))
def other_network_on_one_host() -> JobFacts:
    ranks = []
    for rank in range(4):
        facts = NCCL.rank(rank, ALL_REDUCE, seq=1, outstanding=1, phase=Phase.INIT, batch=-1)
        placed = at_host(with_pending(facts, completed=0, started=0), f"node-{rank // 2}", local_rank=rank % 2)
        name, address = ("eth0", f"10.0.0.{rank // 2 + 1}") if rank < 2 else ("virbr0", "192.168.122.1")
        ranks.append(by_interface(placed, name, address))
    return job(*ranks)


_RESET = (
    "NCCL error in: ProcessGroupNCCL.cpp:2189, remote process exited or there was a network error, NCCL version "
    "2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    "\nLast error:\nsocketProgress: Connection closed by remote peer node-{other}<40321>"
)


@made("network-cut", ranks=None)
def switch_that_restarted() -> JobFacts:
    """All ranks are alive on both hosts, and each has lost its connections to the other host."""
    ranks = []
    for rank in range(4):
        here = at_host(NCCL.waiting(rank, seq=61), f"node-{rank // 2}", local_rank=rank % 2)
        message = _RESET.format(other=1 - rank // 2)
        ranks.append(raised(here, "DistBackendError", message, SYNC, consequence=True))
    return job(*ranks, kind=IncidentKind.EXCEPTION)


@made("gpu-memory-exhausted", ranks=(3,))
def long_sequence_on_one_rank() -> JobFacts:
    """FunASR#2006: one rank runs out, the others wait in an all_reduce."""
    message = (
        "CUDA out of memory. Tried to allocate 5.91 GiB. GPU 3 has a total capacity of 79.11 GiB of which 3.20 GiB is "
        "free. Including non-PyTorch memory, this process has 75.89 GiB memory in use."
    )
    culprit = raised(NCCL.working(3, seq=60), "OutOfMemoryError", message, user("forward", 42))
    culprit = on_gpu(culprit, busy=False, power_w=90.0, used=0.96)
    return job(*(spinning(rank) for rank in range(3)), culprit, kind=IncidentKind.EXCEPTION)


@made("diverged-collectives", "mismatched-collective", ranks=(1,))
def more_than_an_exabyte() -> JobFacts:
    """trl#1726: objects are gathered on one rank while the others reduce; it takes numbers for a length."""
    message = "CUDA out of memory. Tried to allocate more than 1EB memory."
    line = user("gather_metrics", 77)
    called = NCCL.rank(1, line, ALL_REDUCE, seq=62, outstanding=2, op="all_gather", sizes=ONE, action=EPOCH_END)
    culprit = raised(called, "OutOfMemoryError", message, line)
    others = (NCCL.waiting(rank, seq=61) for rank in (0, 2, 3))
    return job(culprit, *others, kind=IncidentKind.EXCEPTION)


@made("all-joined", ranks=tuple(range(8)))
def link_between_two_hosts() -> JobFacts:
    """In the midst of a run: started on every device, no rank alone, no word from any device."""
    ranks = []
    for rank in range(8):
        facts = with_pending(NCCL.waiting(rank, seq=81_234, world=8), completed=81_233, started=81_234)
        placed = at_host(facts, f"node-{rank // 4}", local_rank=rank % 4)
        placed = by_interface(placed, "eth0", f"10.0.0.{rank // 4 + 1}")
        ranks.append(on_gpu(placed, busy=True, power_w=115.0))
    return job(*ranks, world=8)


@made("frozen-rank", ranks=(2, 3))
def processes_of_a_host_that_answers() -> JobFacts:
    """Nobody there says why."""
    ranks = [at_host(NCCL.waiting(rank, seq=61), "node-0", local_rank=rank) for rank in range(2)]
    host = SilentHost(
        host="node-1", ranks=(2, 3), address="10.0.0.2:22", answers=True, seen_from="node-0", tried="it answered"
    )
    return replace(job(*ranks), silent_hosts=(host,))


@made("unreachable-host", "network-cut", ranks=(4, 5, 6, 7))
def host_without_power() -> JobFacts:
    ranks = [at_host(NCCL.waiting(rank, seq=61, world=8), "node-0", local_rank=rank) for rank in range(4)]
    host = SilentHost(
        host="node-1",
        ranks=(4, 5, 6, 7),
        address="10.0.0.2:22",
        answers=False,
        seen_from="node-0",
        tried="no answer in 2 s",
    )
    return replace(job(*ranks, world=8), silent_hosts=(host,))
