"""What is measured of a loader while it is used: the only data that the tuner decides on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What one rank has measured of one loader over a few batches; or, of all ranks, the worst of each.

    Attributes:
        workers: Workers that the loader had meanwhile.
        prefetch: Its prefetch factor; 0 without workers.
        batches: Batches that were handed out.
        wall_s: How long that took, seconds.
        gap_s: Seconds between being given a batch and asking for the next, trimmed, less one standard deviation: what
            a loader has to beat to be ahead of 84 % of the steps (tf.data's target, ``ComputeTargetTimeNsec``).
        wait_s: Mean time that the next batch was waited for, seconds.
        starved: Share of the batches that were not ready when they were asked for, 0 to 1.
        service_s: Mean time that a worker took for one batch, seconds.
        service_q97_s: Its 97 % quantile, seconds.
        cpu_share: Share of that time that the worker was on a processor, 0 to 1.
        own_cores: Processor time of this process, workers aside, per second: how many cores it keeps busy itself.
        batch_bytes: Size of a batch's tensors; the largest of those seen.
        tensors: Tensors of a batch; the most of those seen.
        worker_bytes: Memory that a worker has for itself, beyond what it shares with this process; the largest.
        throttled: Share of the time in which the control group's quota held this rank's processes, 0 to 1.
    """

    workers: int
    prefetch: int
    batches: int
    wall_s: float
    gap_s: float
    wait_s: float = 0.0
    starved: float = 0.0
    service_s: float = 0.0
    service_q97_s: float = 0.0
    cpu_share: float = 1.0
    own_cores: float = 1.0
    batch_bytes: int = 0
    tensors: int = 0
    worker_bytes: int = 0
    throttled: float = 0.0


def worst_of(ranks: Sequence[Measures]) -> Measures:
    """The measures that a setting has to suffice for which is the same on all ranks.

    Batches and the time they took are those of the slowest rank, whose quotient all ranks' steps have in common. The
    gap is the shortest: a rank that waits for others in a collective has a longer one than the step needs.

    Args:
        ranks: Measures of all ranks with the same setting; at least one.

    Raises:
        ValueError: There are none.
    """
    if not ranks:
        raise ValueError("measures of no rank: there is no worst of them; give those of one at least")
    slowest = min(ranks, key=lambda rank: rank.batches / rank.wall_s if rank.wall_s > 0 else 0.0)
    return replace(
        slowest,
        workers=min(rank.workers for rank in ranks),
        prefetch=min(rank.prefetch for rank in ranks),
        gap_s=min(rank.gap_s for rank in ranks),
        wait_s=max(rank.wait_s for rank in ranks),
        starved=max(rank.starved for rank in ranks),
        service_s=max(rank.service_s for rank in ranks),
        service_q97_s=max(rank.service_q97_s for rank in ranks),
        cpu_share=max(rank.cpu_share for rank in ranks),
        own_cores=max(rank.own_cores for rank in ranks),
        batch_bytes=max(rank.batch_bytes for rank in ranks),
        tensors=max(rank.tensors for rank in ranks),
        worker_bytes=max(rank.worker_bytes for rank in ranks),
        throttled=max(rank.throttled for rank in ranks),
    )
