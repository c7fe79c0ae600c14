"""Inspects the jobs of this host from outside: finds their ranks, looks at them, and judges what was seen."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_ncclsafe.code.libraries import SPAWNED_PROCESS
from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S, diagnosis_of
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts
from lightning_ncclsafe.inspecting.inspected_ranks import InspectedRanks, by_job
from lightning_ncclsafe.inspecting.looks import NO_PROGRAM, SeenFrame, StackReader, look, other_user_words
from lightning_ncclsafe.inspecting.ranks import (
    FoundRanks,
    RankProcess,
    SeenProcess,
    ended_beside,
    find_ranks,
    python_processes,
)
from lightning_ncclsafe.probes.host.resources import look_at

LOOKS = 5
"""How many times each rank is looked at by default."""
SECONDS = 2.5
"""Seconds from the first look to the last by default, if they show enough."""

_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The result of an inspection.

    Attributes:
        diagnoses: One for each job on this host.
        notes: What could not be done, and what to do about it, one line each.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    notes: tuple[str, ...] = ()


def inspect(
    pids: Iterable[int] = (),
    *,
    looks: int = LOOKS,
    over_s: float | None = None,
    may_write: bool = False,
    may_stop: bool = False,
    say: Callable[[str], object] = lambda text: None,
    so_far: Callable[[Sequence[Diagnosis]], bool] = lambda diagnoses: False,
    processes: Callable[[], Iterable[SeenProcess]] = python_processes,
    reader: StackReader | None = None,
) -> Inspection:
    """Looks at the ranks of this host several times, and diagnoses what they do and why, if they hang.

    Args:
        pids: Processes of the ranks; by default all ranks that are found.
        over_s: Seconds from the first look to the last. By default ``SECONDS``, less if no rank has run for longer than
            a step takes, and more while a rank makes no progress, until that lasts for longer than a step takes.
        may_write: Whether a rank may be made to write its Flight Recorder to a file.
        may_stop: Whether ranks that make no progress may be stopped for a moment, to read native frames.
        say: Is called with each line for the user.
        so_far: Is called with the diagnoses so far if it takes longer; returns whether it has shown them to the user.
    """
    reader, chosen = reader or StackReader(), [*pids]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        given = [*processes()]
        unread = [one.pid for one in given if not one.is_read]
        found = find_ranks(given, chosen)
        ranks = [*found.ranks, *_placed(found, reader, pool, chosen)]
        notes = (*map(_unread_words, unread), *(() if reader.is_there else (NO_PROGRAM,)))
        if not ranks:
            return Inspection(notes=(*notes, _nothing_words(chosen)))
        # A process that was named and has ended may have been a rank.
        ended = {*chosen}.difference(one.pid for one in given if not one.has_ended)
        are_all_named = len(ranks) + len(ended) >= max(one.local_world_size for one in ranks)
        are_all = not unread and (not chosen or are_all_named)

        def facts(of_job: Sequence[SeenRank]) -> JobFacts:
            beside = [look_at(one.pid) for one in ended_beside([one.process for one in of_job], given)]
            return job_facts(of_job, are_all=are_all, beside=beside)

        def diagnoses(seen: Iterable[SeenRank]) -> tuple[Diagnosis, ...]:
            return tuple(diagnosis_of(facts(of_job)) for of_job in by_job(seen))

        inspected = InspectedRanks(ranks, reader, pool, say, facts)
        inspected.look(max(looks, 1), SECONDS if over_s is None else over_s, may_be_fewer=over_s is None)
        if over_s is None and (unclear := inspected.unclear()):
            early = diagnoses(inspected.seen(unclear))
            is_shown = so_far(early)
            say(_continues_words(early, [] if is_shown else [one.findings[0] for one in early if one.findings]))
            inspected.look_until_clear()
        seen = inspected.with_recorders(inspected.seen(ranks), may_write=may_write, may_stop=may_stop)
        return Inspection(diagnoses=diagnoses(seen), notes=notes)


def _continues_words(early: Iterable[Diagnosis], so_far: Iterable[Finding]) -> str:
    still_s = max(diagnosis.job.incident.idle_s for diagnosis in early)
    answers = "".join(f" So far: {one.summary} ({one.rule}, {one.confidence.value})" for one in so_far)
    return (
        f"a rank has made no progress for {still_s:.1f} s, in a hang or a long step.{answers} Inspecting for at most"
        f" {max(LONG_STEP_S - still_s, 2.0):.0f} s, or until all ranks have moved, as after a long step. Ctrl-C answers"
        " now."
    )


def _unread_words(pid: int) -> str:
    state = look_at(pid).state
    return (
        f"process {pid} ({state}) does not let the kernel read its command line or memory, as happens while one of its "
        f"threads waits for storage that does not answer, so whether it is a rank is unknown. To see where its threads "
        f"wait, run as root: cat /proc/{pid}/task/*/stack"
    )


def _nothing_words(pids: Sequence[int]) -> str:
    theirs = (f"process {pid}: {words}" for pid in pids if (words := other_user_words(pid, os.geteuid())))
    if words := next(theirs, ""):
        return words
    if pids:
        named = (
            f"process {pids[0]} is not" if len(pids) == 1 else f"none of the processes {', '.join(map(str, pids))} is"
        )
        return f"{named} a running Python process that this user may inspect"
    return (
        f"no training rank was found on {socket.gethostname()}: no Python process of this user has the environment "
        "of a launcher (torchrun, Lightning, SLURM, MPI), or was started by torch.multiprocessing; name the "
        "processes with --pid, or run as the user of the job and in its container"
    )


def _placed(
    found: FoundRanks, reader: StackReader, pool: ThreadPoolExecutor, chosen: Sequence[int]
) -> Iterator[RankProcess]:
    """Ranks whose number only their stacks show, as with torch.multiprocessing, or that the user has named."""
    every = [process for group in found.unplaced.values() for process in group]
    stacks = pool.map(lambda process: look(process.pid, reader, 0.0).stack, every)
    numbers = {
        process.pid: number
        for process, stack in zip(every, stacks, strict=True)
        if (number := _number_in(stack)) is not None
    }
    if len(numbers) < len(every) and chosen:
        numbers = {process.pid: chosen.index(process.pid) for process in every}
    for parent, group in found.unplaced.items():
        # A child that a rank has forked has the rank's stack, too.
        placed = [process for process in group if process.pid in numbers and process.parent not in numbers]
        count = max((numbers[process.pid] + 1 for process in placed), default=0)
        for process in placed:
            number = numbers[process.pid]
            yield RankProcess(
                pid=process.pid,
                rank=number,
                local_rank=number,
                world_size=count,
                local_world_size=count,
                job=f"process {parent} on {socket.gethostname()}" if parent else f"processes of {socket.gethostname()}",
                parent=process.parent,
                started=process.started,
                environment=dict(process.environment or {}),
            )


def _number_in(stack: Sequence[SeenFrame]) -> int | None:
    for frame in stack:
        number = frame.values.get("i", "")
        if SPAWNED_PROCESS.has(frame.file, frame.function) and number.isdecimal():
            return int(number)
    return None
