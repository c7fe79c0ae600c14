"""The jobs of this host, inspected from outside: their ranks are found, looked at, and what was seen is judged."""

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_ncclsafe.code.libraries import SPAWNED_PROCESS
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, job_facts
from lightning_ncclsafe.inspecting.joining import diagnosis_of
from lightning_ncclsafe.inspecting.looking_on import LookedAt
from lightning_ncclsafe.inspecting.looks import NO_PROGRAM, SeenFrame, StackReader, look
from lightning_ncclsafe.inspecting.ranks import FoundRanks, RankProcess, SeenProcess, find_ranks, python_processes
from lightning_ncclsafe.probes.host.resources import look_at

LOOKS = 5
"""How often each rank is looked at, if nothing else is said."""
SECONDS = 2.5
"""The time between the first look and the last, if nothing else is said and they show enough."""

_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What came of it.

    Attributes:
        diagnoses: One of each job on this host.
        notes: What could not be done, and what to do about it, a line each.
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
    processes: Callable[[], Iterable[SeenProcess]] = python_processes,
    reader: StackReader | None = None,
) -> Inspected:
    """Looks at the ranks of this host several times, and says what they do and why, if they hang.

    Args:
        pids: Processes of the ranks; by default all that there are.
        looks: How often to look.
        over_s: Seconds between the first look and the last; by default ``SECONDS``, or fewer where no rank has run for
            longer than a step takes, and on while a rank stands still, until one is known to have stood for so long.
        may_write: Whether a rank may be made to write its Flight Recorder into a file.
        may_stop: Whether ranks that stand still may be stopped for a moment, to read the native code that they are in.
        say: Is given a line if it takes longer than ``SECONDS``, with what is known by then, and what Flight Recorders
            did not answer.
        processes: Gives the Python processes of this host.
        reader: Reads their stacks.
    """
    reader, chosen = reader or StackReader(), [*pids]
    jobs: dict[str, list[SeenRank]] = defaultdict(list)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = [*processes()]
        unread = [one.pid for one in seen if not one.is_read]
        found = find_ranks(seen, chosen)
        ranks = [*found.ranks, *_placed(found, reader, pool, chosen)]
        are_all = not chosen and not unread
        watch = LookedAt(ranks, reader, pool, say, are_all=are_all)
        if ranks:
            watch.look_on(max(looks, 1), SECONDS if over_s is None else over_s, may_be_fewer=over_s is None)
            if over_s is None:
                watch.look_on_until_it_shows()
        for one in watch.seen(may_write=may_write, may_stop=may_stop):
            jobs[one.process.job].append(one)
    if not jobs:
        return Inspected(notes=(*map(_unread_words, unread), *_nothing_words(chosen, reader)))
    return Inspected(
        diagnoses=tuple(diagnosis_of(job_facts(of_job, are_all=are_all)) for of_job in jobs.values()),
        notes=(*map(_unread_words, unread), *(() if reader.is_there else (NO_PROGRAM,))),
    )


def _unread_words(pid: int) -> str:
    state = look_at(pid).state
    return (
        f"process {pid} ({state}) does not let the kernel read its command line or memory, as when one of its threads "
        f"waits for storage that does not answer: whether it is a rank is unknown. Where its threads wait, as root: "
        f"cat /proc/{pid}/task/*/stack"
    )


def _nothing_words(pids: Sequence[int], reader: StackReader) -> Iterator[str]:
    if pids:
        yield f"none of the processes {', '.join(map(str, pids))} is a Python process that may be looked at"
    else:
        yield (
            f"no training rank was found on {socket.gethostname()}: no Python process of this user has the environment "
            "of a launcher (torchrun, Lightning, SLURM, MPI), or was started by torch.multiprocessing; name the "
            "processes with --pid, or run as the user of the job and in its container"
        )
    if not reader.is_there:
        yield NO_PROGRAM


def _placed(
    found: FoundRanks, reader: StackReader, pool: ThreadPoolExecutor, chosen: Sequence[int]
) -> Iterator[RankProcess]:
    """Ranks whose stacks alone say which they are, as those do that torch.multiprocessing has started."""
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
        # What a rank has forked has its stack, too.
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
