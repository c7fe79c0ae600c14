"""Small builders of what ranks find on their hosts: a healthy host of the usual kind, and changes to some ranks."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from incidents import before_training

from lightning_ncclsafe.facts import (
    Capacity,
    DirectoryFacts,
    GpuFacts,
    IncidentKind,
    JobFacts,
    LoadFacts,
    NetworkFacts,
    PreflightFacts,
    ProcessFacts,
    RankFacts,
    SwapFacts,
)

GB = 10**9
PER_HOST = 8
CORES = 64
SETTINGS = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_TIMEOUT": "22",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "OMP_NUM_THREADS": "8",
}
LOGS = DirectoryFacts(
    role="logs",
    path="/scratch/logs",
    filesystem="ext4",
    append_s=2e-5,
    append_worst_s=1e-3,
    fsync_s=4e-3,
    free_bytes=500 * GB,
    free_inodes=10**7,
)
CHECKPOINTS = replace(LOGS, role="checkpoints", path="/scratch/checkpoints")
DATA = DirectoryFacts(role="data", path="/data/train", filesystem="nfs4", read_s=2e-3, free_bytes=0)


def healthy(rank: int) -> PreflightFacts:
    """What a rank finds that has an eighth of a good host: every field is known."""
    return PreflightFacts(
        capacity=Capacity(
            machine=f"boot-{rank // PER_HOST}",
            cpus=tuple(range(CORES)),
            quota_cores=float(CORES),
            quota_group="/job",
            memory_limit_bytes=900 * GB,
            memory_used_bytes=60 * GB,
            memory_group="/job",
            memory_total_bytes=1_000 * GB,
            memory_available_bytes=900 * GB,
            process_limit_bytes=800 * GB,
            shm_total_bytes=500 * GB,
            shm_free_bytes=480 * GB,
            slurm_cpus_per_task=8,
        ),
        swap=SwapFacts(
            total_bytes=64 * GB,
            used_bytes=0,
            swapped_out_bytes=0,
            swapped_in_bytes=0,
            devices=("/dev/nvme0n1p3",),
            memory_stalled=0.0,
            io_stalled=0.01,
            cpu_waited=0.03,
        ),
        gpu=GpuFacts(
            index=rank % PER_HOST,
            name="NVIDIA H100 80GB HBM3",
            uuid=f"GPU-{rank}",
            total_bytes=80 * GB,
            free_bytes=79 * GB,
            ecc_errors=0,
            pending_repair=False,
            driver="570.86.15",
            cuda="12.8",
        ),
        network=NetworkFacts(
            interfaces=(f"eth0 100000 Mbit/s 10.0.0.{rank // PER_HOST + 1}", "eth1 10000 Mbit/s 192.168.7.1"),
            default_interface="eth0",
            chosen_by="NCCL_SOCKET_IFNAME",
            infiniband=("mlx5_0:1 ACTIVE 400 Gb/sec",),
            infiniband_active=1,
        ),
        directories=(LOGS, CHECKPOINTS, DATA),
        load=LoadFacts(
            loader_workers=4,
            batches_in_flight=8,
            batch_bytes=GB // 10,
            omp_threads=8,
            parameter_bytes=3 * GB,
            gradient_bytes=3 * GB,
            replica_bytes=15 * GB,
        ),
        open_files_limit=65_536,
        open_files=40,
        clock_offset_s=0.001 * (rank // PER_HOST),
        clock_error_s=0.0005,
        versions={"torch": "2.13.0", "nccl": "2.28.9", "lightning": "2.6.6", "python": "3.11.9"},
        settings=SETTINGS | {"CUDA_VISIBLE_DEVICES": str(rank % PER_HOST), "LOCAL_RANK": str(rank % PER_HOST)},
        is_cuda=True,
        took_s=0.6 + rank / 10_000,
    )


def checking(
    world: int = 16,
    make: Callable[[int], PreflightFacts] = healthy,
    *,
    silent: tuple[int, ...] = (),
    witnessed: tuple[ProcessFacts, ...] = (),
    missing: tuple[str, ...] = (),
) -> JobFacts:
    """A job in which every rank has checked its host."""

    def told(rank: int) -> dict[str, object]:
        return {"local_rank": rank % PER_HOST, "preflight": make(rank)}

    return before_training(
        IncidentKind.PREFLIGHT, world, told, per_host=PER_HOST, silent=silent, witnessed=witnessed, missing=missing
    )


def having(job: JobFacts, *only: int, part: str = "", **changes: object) -> JobFacts:
    """The same job with some fields replaced on some ranks, or on all; a function gets the rank.

    Args:
        job: The job.
        only: The ranks that change; none means all of them.
        part: Field of the facts whose fields change, ``"capacity"`` for instance; the facts themselves where empty.
        changes: New values by field.
    """

    def change(facts: RankFacts) -> RankFacts:
        if only and facts.rank not in only:
            return facts
        assert facts.preflight is not None
        given = {name: value(facts.rank) if callable(value) else value for name, value in changes.items()}
        whole: Any = facts.preflight
        return replace(
            facts,
            preflight=replace(whole, **{part: replace(getattr(whole, part), **given)} if part else given),
        )

    return replace(job, ranks=tuple(change(facts) for facts in job.ranks))


def setting(job: JobFacts, *only: int, **values: str) -> JobFacts:
    """The same job with variables set on some ranks, or on all."""
    return having(
        job,
        *only,
        settings=lambda rank: {**job.ranks[rank].preflight.settings, **values},  # type: ignore[union-attr]
    )


def directory(job: JobFacts, role: str, *only: int, **changes: object) -> JobFacts:
    """The same job with another answer of the directory of this role on some ranks, or on all."""

    def changed(rank: int) -> tuple[DirectoryFacts, ...]:
        given: Any = changes
        known = job.ranks[rank].preflight.directories  # type: ignore[union-attr]
        return tuple(replace(one, **given) if one.role == role else one for one in known)

    return having(job, *only, directories=changed)


def parts_and_fields() -> list[tuple[str, str]]:
    """Every field of the facts that may be absent, with its part: ``("capacity", "cpus")``, ``("", "gpu")``."""
    facts = healthy(0)
    parts = [("", facts), *((field.name, getattr(facts, field.name)) for field in fields(facts))]
    return [
        (part, field.name)
        for part, value in parts
        if is_dataclass(value)
        for field in fields(value)
        if not (field.default is MISSING and field.default_factory is MISSING)
    ]


def absent(part: str, name: str) -> object:
    """What a field holds where it could not be found out."""
    whole: Any = healthy(0)
    (field,) = (one for one in fields(getattr(whole, part) if part else whole) if one.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()
