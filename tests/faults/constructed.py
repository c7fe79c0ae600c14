"""Writes the constructed recordings anew: ``python tests/faults/constructed.py``.

They are written by hand after what such jobs are known to leave: watchdog lines, recorders' counters, NVML, kernel
logs in public threads. None of them is a recording of NCCL; those are made by ``make gpu``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent / "rules"), str(FOLDER.parent), str(FOLDER)]

from builders import (  # noqa: E402
    ALL_REDUCE,
    BROADCAST,
    CHECKPOINT_IO,
    EPOCH_END,
    FLUSH,
    NCCL,
    NEXT,
    NEXT_DATA,
    ONE,
    RUN,
    TENSORBOARD,
    TORCH_SAVE,
    TRAINING_STEP,
    TRY_GET,
    job,
    process,
    raised,
    user,
)
from recorded import write  # noqa: E402

from lightning_ncclsafe.data_facts import LoaderFacts  # noqa: E402
from lightning_ncclsafe.facts import (  # noqa: E402
    HostFacts,
    IncidentKind,
    JobFacts,
    Phase,
    ProcessFacts,
    RankFacts,
    SilentHost,
    StorageFacts,
)
from lightning_ncclsafe.machine_facts import GpuStateFacts, InterfaceFacts  # noqa: E402
from lightning_ncclsafe.preflight_facts import GpuFacts  # noqa: E402

GB = 10**9
SYNC = user("training_step", 31, code="loss.item()")


@dataclass(frozen=True)
class Made:
    """A recording; ranks None where it cannot be said of some that they cause it."""

    causes: tuple[str, ...]
    ranks: tuple[int, ...] | None
    job: Callable[[], JobFacts]


MADE: dict[str, Made] = {}


def made(*causes: str, ranks: tuple[int, ...] | None) -> Callable[[Callable[[], JobFacts]], Callable[[], JobFacts]]:
    def add(build: Callable[[], JobFacts]) -> Callable[[], JobFacts]:
        MADE[build.__name__] = Made(causes, ranks, build)
        return build

    return add


def on_gpu(facts: RankFacts, *, busy: bool, power_w: float, xids: tuple[str, ...] = (), used: float = 0.5) -> RankFacts:
    """With what NVML says of an 80 GB device."""
    gpu = GpuFacts(
        index=facts.local_rank,
        name="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-{facts.rank:04}",
        total_bytes=80 * GB,
        free_bytes=int((1 - used) * 80 * GB),
        xids=xids,
    )
    state = GpuStateFacts(gpu=gpu, utilization=1.0 if busy else 0.0, power_w=power_w)
    return replace(facts, machine=replace(facts.machine, gpu=state))


def by_interface(facts: RankFacts, name: str, address: str, *, chosen_by: str = "first that is up") -> RankFacts:
    network = f"{address.rpartition('.')[0]}.0/24"
    others = ("eth0 10.0.0.7",) if name != "eth0" else ()
    found = InterfaceFacts(
        backend="nccl", name=name, address=address, network=network, chosen_by=chosen_by, others=others
    )
    return replace(facts, machine=replace(facts.machine, interface=found))


def at_host(facts: RankFacts, name: str, *, local_rank: int) -> RankFacts:
    return replace(facts, host=name, local_rank=local_rank)


def spinning(rank: int, **more: object) -> RankFacts:
    """A rank whose kernel waits for its peers: fully used, and drawing little."""
    return on_gpu(NCCL.waiting(rank, seq=61, **more), busy=True, power_w=110.0)


def with_pending(facts: RankFacts, *, completed: int, started: int) -> RankFacts:
    """The same calls, of which the device has come so far."""
    calls = tuple(replace(one, completed=one.seq <= completed, started=one.seq <= started) for one in facts.collectives)
    (group,) = facts.groups
    return replace(facts, collectives=calls, groups=(replace(group, last_completed=completed, last_started=started),))


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


@made("rank-zero-only-work", ranks=(0,))
def openclip_evaluation() -> JobFacts:
    """open_clip#1024: 8 ranks, ``evaluate()`` returns at once on all but rank 0."""
    line = user("evaluate", 310, condition="if not is_master(args):  (line 246)")
    culprit = NCCL.working(0, line, seq=60, action=EPOCH_END, last=True, world=8)
    sizes = ((65536,),)
    ranks = (
        NCCL.waiting(rank, seq=61, op="all_gather", sizes=sizes, epoch=1, batch=0, world=8) for rank in range(1, 8)
    )
    return job(on_gpu(culprit, busy=False, power_w=60.0), *ranks, world=8)


@made("slow-logger", ranks=(0,))
def torchtitan_tensorboard() -> JobFacts:
    """torchtitan#1092: rank 0 flushes to slow storage."""
    culprit = NCCL.working(0, TENSORBOARD, FLUSH, seq=60, world=8)
    storage = (StorageFacts(owner="TensorBoardLogger", path="/mnt/nfs/tb", filesystem="nfs4"),)
    ranks = (NCCL.waiting(rank, seq=61, op="_allgather_base", world=8) for rank in range(1, 8))
    return job(replace(culprit, storage=storage), *ranks, world=8)


@made("data-stall", ranks=(5,))
def wenet_prefetch() -> JobFacts:
    """wenet#2511: 4 workers with prefetch 250 for each of two loaders of each rank."""
    worker = ProcessFacts(pid=77, state="disk-sleep", wait_channel="folio_wait_bit_common", rss_bytes=9 * GB)
    culprit = NCCL.working(5, NEXT_DATA, TRY_GET, seq=60, action=NEXT, world=16)
    loaders = (LoaderFacts(dataset="Processor", num_workers=4, prefetch_factor=250),)
    memory = HostFacts(memory_total_bytes=256 * GB, memory_available_bytes=2 * GB, cores=100)
    culprit = replace(culprit, workers=(worker,) * 4, loaders=loaders, host_facts=memory)
    ranks = (culprit if rank == 5 else NCCL.waiting(rank, seq=61, world=16) for rank in range(16))
    return job(*ranks, world=16)


@made("late-at-init", ranks=(0,))
def recbole_swapping() -> JobFacts:
    """RecBole#2069: rank 5 waits for rank 0's store key, while rank 0 swaps to a network disk."""
    line = user("load_data", 18)
    memory = HostFacts(
        rss_bytes=180 * GB,
        process_swap_bytes=60 * GB,
        memory_total_bytes=1000 * GB,
        memory_available_bytes=GB,
        swapped_in_bytes=40 * GB,
    )
    culprit = NCCL.rank(0, line, seq=0, phase=Phase.INIT, action="[LightningDataModule]Data.setup", batch=-1, world=6)
    culprit = replace(culprit, host_facts=memory)
    options = {"phase": Phase.INIT, "batch": -1, "world": 6}
    ranks = (NCCL.in_barrier(rank, "post_setup", seq=1, **options) for rank in range(1, 6))
    return job(culprit, *ranks, world=6)


@made("uneven-batches", ranks=(1, 3))
def llama_recipes_packing() -> JobFacts:
    """llama-cookbook#567: two ranks have come to their end, and two enter another forward pass."""
    options = {"world": 4, "op": "_allgather_base", "sizes": ((262_675_456,),)}
    more = (NCCL.waiting(rank, seq=91, batch=97, **options) for rank in (0, 2))
    done = (NCCL.in_barrier(rank, "Trainer.save_checkpoint", seq=91, batch=96, last=True) for rank in (1, 3))
    return job(*sorted([*more, *done], key=lambda facts: facts.rank))


@made("slow-checkpoint", ranks=(0,))
def consolidated_checkpoint_of_a_large_model() -> JobFacts:
    """Rank 0 writes the gathered state while all wait at the barrier behind it."""
    culprit = NCCL.working(0, CHECKPOINT_IO, TORCH_SAVE, seq=60, phase=Phase.CHECKPOINT, action="save_checkpoint")
    storage = (StorageFacts(owner="ModelCheckpoint", path="/mnt/s3", filesystem="fuse.s3fs"),)
    options = {"phase": Phase.CHECKPOINT}
    others = (NCCL.in_barrier(rank, "Trainer.save_checkpoint", seq=61, **options) for rank in (1, 2, 3))
    return job(replace(culprit, storage=storage), *others)


@made("mismatched-collective", "diverged-collectives", "unused-parameters", ranks=(0, 1))
def other_part_of_the_graph() -> JobFacts:
    """ms-swift#9104: number 4176 is of one element on rank 0, and of 402,653,184 on rank 1."""
    here = NCCL.rank(0, BROADCAST, seq=4176, outstanding=1, op="_allgather_base", sizes=ONE, world=2)
    there = NCCL.rank(1, BROADCAST, seq=4176, outstanding=1, op="_allgather_base", sizes=((402_653_184,),), world=2)
    return job(here, there, world=2)


@made("stopped-process", ranks=(2,))
def rank_in_a_debugger() -> JobFacts:
    """A debugger has been attached, and has stopped the process."""
    ranks = tuple(NCCL.waiting(rank, seq=61) for rank in (0, 1, 3))
    return job(*ranks, witnessed=(process(2, "tracing-stop"),))


@made("blocked-on-disk", ranks=(2,))
def rank_on_a_mount_that_hangs() -> JobFacts:
    ranks = tuple(NCCL.waiting(rank, seq=61) for rank in (0, 1, 3))
    return job(*ranks, witnessed=(process(2, "disk-sleep", wait_channel="nfs_wait_bit_killable"),))


@made("compile-skew", ranks=(3,))
def cold_cache_on_one_node() -> JobFacts:
    """nanochat#722: one node compiles, the others have its kernels cached."""
    site = RUN.file.partition("/lightning/")[0]
    frames = [
        replace(RUN, file=f"{site}/torch/_dynamo/convert_frame.py", function="_compile"),
        replace(RUN, file=f"{site}/torch/_inductor/async_compile.py", function="wait"),
    ]
    culprit = NCCL.working(3, user("training_step", 12), *frames, seq=60, action=TRAINING_STEP, batch=0)
    return job(*(culprit if rank == 3 else spinning(rank, batch=0) for rank in range(4)))


def main() -> None:
    for name, one in MADE.items():
        print(write(name, one.causes, one.ranks, one.job()).name)


if __name__ == "__main__":
    main()
