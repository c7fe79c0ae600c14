"""Constructed recordings of what code and hosts do, on NCCL and with more ranks than can be had here."""

from dataclasses import replace

from builders import (
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
    user,
)
from constructing import GB, made, on_gpu, spinning

from lightning_ncclsafe.facts import (
    HostFacts,
    JobFacts,
    LoaderFacts,
    Phase,
    ProcessFacts,
    StorageFacts,
)


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
