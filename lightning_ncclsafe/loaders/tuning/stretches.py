"""What is measured of a loader while it is used: the only data that the tuner decides on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Moment(NamedTuple):
    """Where a loader is, the same on all ranks.

    Attributes:
        epoch: Counts the epochs of the loader, from 1.
        part: Counts the parts of an epoch that lasts for minutes, from 0.
    """

    epoch: int
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What one rank has measured of one loader over an epoch, or over some minutes of a longer one.

    Attributes:
        epoch: See :class:`Moment`.
        part: See :class:`Moment`.
        workers: Workers that it had.
        batches: Batches that it gave.
        gap_s: Mean time from being given a batch to asking for the next, seconds; without those that are no steps,
            as a validation or a checkpoint came between.
        data_s: Time that the training thread has spent in the loader, seconds: starting workers, waiting for batches,
            taking them, and ending workers.
        start_s: Of that, until the first batch, and what ending the workers took; 0 where they were there before.
        cpu_s: Mean processor time of this process for a step and its batch, without worker processes, seconds.
        batch_bytes: Size of the largest batch seen.
        tensors: Most tensors of a batch seen.
        process_bytes: Memory that this process has: what a worker that is forked from it may come to have.
        seeded: Whether the run, or the loader, was given a seed.
        persists: Whether its workers stay from one epoch to the next.
    """

    epoch: int
    part: int = 0
    workers: int
    batches: int
    gap_s: float
    data_s: float
    start_s: float = 0.0
    cpu_s: float = 0.0
    batch_bytes: int = 0
    tensors: int = 0
    process_bytes: int = 0
    seeded: bool = False
    persists: bool = False

    @property
    def moment(self) -> Moment:
        """When it was measured."""
        return Moment(self.epoch, self.part)

    @property
    def step_s(self) -> float:
        """What a step costs, all that the loader costs included; seconds."""
        return self.gap_s + self.data_s / self.batches

    @property
    def wait_s(self) -> float:
        """What a step costs in waiting for its batch, once workers have been started; seconds."""
        return (self.data_s - self.start_s) / self.batches


def worst_of(ranks: Sequence[Stretch]) -> Stretch | None:
    """The same stretch of all ranks, as the one has measured it whose loader is slowest; None if workers differ.

    What it costs in processor time and in memory is the most of all ranks. The others wait for that rank in a
    collective, which is in their gaps: all ranks' steps take as long.

    Args:
        ranks: What each rank has measured at one moment; at least one.
    """
    if len({rank.workers for rank in ranks}) > 1:
        return None
    return replace(
        max(ranks, key=lambda rank: rank.data_s / rank.batches),
        batches=min(rank.batches for rank in ranks),
        cpu_s=max(rank.cpu_s for rank in ranks),
        batch_bytes=max(rank.batch_bytes for rank in ranks),
        tensors=max(rank.tensors for rank in ranks),
        process_bytes=max(rank.process_bytes for rank in ranks),
        seeded=any(rank.seeded for rank in ranks),
        persists=any(rank.persists for rank in ranks),
    )
