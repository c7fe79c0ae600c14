"""Makes the facts that rules judge from what was seen of each rank. This module reads nothing from processes."""

import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightning_ncclsafe.code.libraries import ALL_OF_LIGHTNING
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.code.this_host import host_name
from lightning_ncclsafe.facts import (
    COLLECTOR,
    ENDED,
    GONE,
    STOPPED,
    ChildProcess,
    EndedProcess,
    FileLockFacts,
    Frame,
    GpuStateFacts,
    HostFacts,
    Incident,
    IncidentKind,
    InspectionFacts,
    JobFacts,
    MachineFacts,
    NotRecorded,
    Phase,
    PressureFacts,
    ProcessFacts,
    Progress,
    RankFacts,
    SampledActivity,
    StorageFacts,
    ThreadPlace,
    UnrecordedGroup,
)
from lightning_ncclsafe.facts.wording import capitalised, location_of, ranks_words, verb
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S
from lightning_ncclsafe.inspecting.looks import Look, SeenFrame
from lightning_ncclsafe.inspecting.rank_objects import RankObjects, UnreadObjects, errors_of
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.inspecting.trainer_frames import is_in_trainer, progress_in
from lightning_ncclsafe.probes.machine_state import main_thread_over
from lightning_ncclsafe.probes.process.environment import settings_seen
from lightning_ncclsafe.probes.process.growth import with_core_shares
from lightning_ncclsafe.probes.process.stacks import both_ends, stack_in_collective, with_source
from lightning_ncclsafe.rules.kit.activity import activity

_MOST_THREADS = 4
_SOURCES_S = 1.0
_COLLECTS = re.compile(r"\bgc\.collect\(")
_NOT_SEEN = (
    "Logged keys, batches of loaders that have no length, and exceptions that were caught before cannot be seen from "
    "outside: a guarded strategy (SafeDDP, SafeFSDP, SafeModelParallel) sees them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """What was seen of a rank.

    Attributes:
        process: Its process.
        looks: The looks at it, the oldest first.
        workers: The workers of its loaders.
        ended: Its children that have ended, and that it has not waited for.
        storage: Folders in which it has files open for writing.
        name_servers: Name servers that have not answered it yet.
        awaited_processes: The child process that it waits for, and those that this one has started.
        awaited_file: What its main thread reads from or writes to; empty if unknown.
        file_lock: The lock on a file that it waits for.
        host_facts: Its memory, and its host's.
        gpu: Its GPU; None if there is none.
        pressure: For what share of the time its host had too little of something.
        versions: Versions of the packages that it uses.
        ended_after: Whether it ended after the last look.
        recorded: The groups and collectives of its Flight Recorder; None if that gave no answer.
        native: Native functions that its main thread is in.
        objects: What its Python objects show; nothing if it moves.
    """

    process: RankProcess
    looks: tuple[Look, ...]
    workers: tuple[ProcessFacts, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    storage: tuple[StorageFacts, ...] = ()
    name_servers: tuple[str, ...] = ()
    awaited_processes: tuple[ChildProcess, ...] = ()
    awaited_file: str = ""
    file_lock: FileLockFacts | None = None
    host_facts: HostFacts = field(default_factory=HostFacts)
    gpu: GpuStateFacts | None = None
    pressure: PressureFacts | None = None
    versions: dict[str, str] = field(default_factory=dict)
    ended_after: bool = False
    recorded: RankFacts | None = None
    native: tuple[str, ...] = ()
    objects: RankObjects = field(default_factory=RankObjects)

    @property
    def idle_s(self) -> float:
        """Seconds for which it is known to stand still; 0 if it moves."""
        return _inspection(self.looks).idle_s


def job_facts(
    seen: Sequence[SeenRank],
    *,
    are_all: bool = True,
    beside: Sequence[ProcessFacts] = (),
    taken_ns: int | None = None,
) -> JobFacts:
    """The facts of one job.

    Args:
        seen: Its ranks on this host, at least one.
        are_all: Whether these are all ranks of this host that have a process.
        beside: Processes that were started beside these, and have ended.
        taken_ns: Wall-clock time, nanoseconds since the epoch; by default now.
    """
    taken_ns = time.time_ns() if taken_ns is None else taken_ns
    world_size = max(max(one.process.world_size, one.process.rank + 1) for one in seen)
    answering = [one for one in seen if not _is_silent(one)]
    witnessed = [*(_witnessed(one) for one in seen if _is_silent(one)), *(_gone(seen, beside) if are_all else ())]
    if any(one.objects.counters is None for one in answering if is_in_trainer(_shown(one).stack)):
        # Ranks in a Trainer cannot be compared by counters that only some of them show.
        answering = [replace(one, objects=replace(one.objects, counters=None)) for one in answering]
    facts = _with_sources([rank_facts(one, taken_ns=taken_ns) for one in answering], answering)
    facts = _with_ends(facts, {one.process.rank: _shown(one).stack for one in answering})
    known = {one.process.rank for one in seen} | {process.rank for process in witnessed}
    stands = any(one.inspection is None or not one.inspection.moved for one in facts) or bool(witnessed)
    # A rank that ends during the inspection may end with its job, unless no rank had moved before.
    moves = any(one.inspection is not None and one.inspection.moved for one in facts)
    ended = sorted(one.process.rank for one in seen if ends_in(one.looks) or (one.ended_after and moves))
    after = sorted(one.process.rank for one in seen if one.ended_after and not moves)
    # A job whose last step took long ends like this, too.
    is_over = len(after) == len(seen)
    after_words = "these are all of them" if is_over else "this answer is about what they did before"
    return JobFacts(
        incident=Incident(
            number=1,
            kind=IncidentKind.INSPECTED,
            opened_by=min(known),
            opened_ns=taken_ns,
            idle_s=longest_idle_s(seen) if stands and not ended and not is_over else 0.0,
        ),
        world_size=world_size,
        ranks=tuple(sorted(facts, key=lambda one: one.rank)),
        witnessed=tuple(witnessed),
        elsewhere=tuple(rank for rank in range(world_size) if rank not in known),
        launch=seen[0].process.job,
        missing=(
            *([f"{capitalised(ranks_words(ended))} ended meanwhile: inspect again."] if ended else []),
            *([f"{capitalised(ranks_words(after))} ended after that: {after_words}."] if after else []),
            *_unread_words(seen),
            _NOT_SEEN,
        ),
    )


def _unread_words(seen: Sequence[SeenRank]) -> Iterator[str]:
    if others := sorted(one.process.rank for one in seen if one.objects.unread is UnreadObjects.OTHER_PYTHON):
        yield (
            f"{capitalised(ranks_words(others))} {verb(others, 'runs', 'run')} another Python than this command, so "
            "exceptions and the Trainer's counters cannot be read: install the command in the job's environment, and "
            "run it from there."
        )
    if any(one.objects.unread is UnreadObjects.UNKNOWN_PYTHON for one in seen):
        yield (
            f"This command's Python ({platform.python_version()}{sys.abiflags}) has objects of an unknown layout, as "
            "free-threaded builds have, so exceptions and the Trainer's counters cannot be read."
        )


def rank_facts(seen: SeenRank, *, taken_ns: int = 0) -> RankFacts:
    """The facts of one rank, without the source of its lines."""
    shown, inspection = _shown(seen), _inspection(seen.looks)
    threads = [(one.at_s, one.main_thread) for one in seen.looks]
    facts = RankFacts(
        rank=seen.process.rank,
        local_rank=seen.process.local_rank,
        local_world_size=seen.process.local_world_size,
        host=host_name(),
        pid=seen.process.pid,
        taken_ns=taken_ns,
        progress=progress_in(shown.stack, inspection.idle_s),
        stack=frames_of(shown.stack),
        thread_stack=stack_in_collective(frames_of(thread.frames) for thread in shown.threads if not thread.is_main),
        unrecorded=(UnrecordedGroup(name="0", why=NotRecorded.OUTSIDE),),
        host_facts=seen.host_facts,
        machine=MachineFacts(
            main_thread=main_thread_over(threads),
            pressure=seen.pressure,
            ended=seen.ended,
            gpu=seen.gpu,
            name_servers=seen.name_servers,
            settings=settings_seen(seen.process.environment),
        ),
        workers=seen.workers,
        storage=seen.storage,
        versions=seen.versions,
        missing=(seen.looks[-1].problem,) if not inspection.looks else (),
    )
    if seen.recorded is not None:
        of_recorder = seen.recorded
        facts = replace(facts, groups=of_recorder.groups, collectives=of_recorder.collectives, unrecorded=())
    if (counters := seen.objects.counters) is not None:
        facts = replace(facts, progress=counters.within(facts.progress), trainer=counters.trainer)
    inspection = replace(
        inspection,
        whereabouts=tuple(_sampled_activities(facts, seen.looks)),
        native=seen.native,
        threads=tuple(_threads(shown))[:_MOST_THREADS],
        group=seen.objects.group,
    )
    return replace(
        facts,
        inspection=inspection,
        awaited_processes=seen.awaited_processes,
        awaited_file=seen.awaited_file,
        file_lock=seen.file_lock,
    )


def _threads(shown: Look) -> Iterator[ThreadPlace]:
    for thread in shown.threads:
        frame = next((one for one in reversed(frames_of(thread.frames)) if one.user), None)
        if frame is not None and not thread.is_main:
            yield ThreadPlace(name=thread.name, frame=frame)


def _inspection(looks: Sequence[Look]) -> InspectionFacts:
    slept_s = looks[-1].slept_s if looks else None
    return InspectionFacts(
        looks=sum(not one.problem for one in looks),
        over_s=round(looks[-1].at_s - looks[0].at_s, 1) if looks else 0.0,
        moved=_moved(looks),
        slept_s=round(slept_s, 1) if slept_s is not None else None,
    )


def shows_enough(seen: Sequence[SeenRank]) -> bool:
    """Whether more looks would add nothing: no rank of a job stands still, or one has for long, is stopped or gone.

    A rank that is gone may have finished, unless others wait. A rank that has failed is in no step.
    """
    if any(one.objects.has_failed for one in seen):
        return True
    silent = [one for one in seen if _is_silent(one) and not _keeps_lock(one)]
    someone_waits = any(_waits(one.looks[-1]) for one in seen if one.looks[-1].stack)
    is_explained = any(someone_waits or not _is_gone(one) for one in silent)
    return is_explained or not any(_moved(one.looks) is False for one in seen) or longest_idle_s(seen) >= LONG_STEP_S


def longest_idle_s(seen: Iterable[SeenRank]) -> float:
    """The longest time, in seconds, for which one of these ranks is known to stand still; 0 if all move."""
    return max((one.idle_s for one in seen), default=0.0)


def frames_of(stack: Sequence[SeenFrame]) -> tuple[Frame, ...]:
    """A stack as facts have it; only the two ends of a very deep one."""
    return tuple(
        Frame(file=one.file, line=one.line, function=one.function, user=one.is_users) for one in both_ends(stack)
    )


def _moved(looks: Sequence[Look]) -> bool | None:
    """Whether its main thread moved between looks; None if unknown.

    It did if a frame of the user's code or of Lightning's has another line or other objects. Movement in the library
    code below these frames may be a wait that polls.
    """
    prints = [_fingerprint(one.stack) for one in looks if one.stack]
    return len(set(prints)) > 1 if len(prints) > 1 else None


def _fingerprint(stack: Sequence[SeenFrame]) -> tuple[tuple[str, int, str, str], ...]:
    telling = [depth for depth, one in enumerate(stack) if one.is_users or ALL_OF_LIGHTNING.has(one.file, one.function)]
    kept = stack[: telling[-1] + 1] if telling else stack
    return tuple((one.file, one.line, one.function, one.digest) for one in kept)


def _shown(seen: SeenRank) -> Look:
    """The look whose stack is reported: the last one; if the rank moves, the last one in which it waits for nobody."""
    read = [one for one in seen.looks if one.stack] or [*seen.looks]
    if _moved(seen.looks):
        free = [one for one in read if not _waits(one)]
        return (free or read)[-1]
    return read[-1]


def _waits(one: Look) -> bool:
    return activity(_alone(one)).waits_for_peers


def _alone(one: Look) -> RankFacts:
    """The facts of one look."""
    return RankFacts(
        rank=0,
        progress=progress_in(one.stack, 0.0),
        stack=frames_of(one.stack),
        unrecorded=(UnrecordedGroup(name="0", why=NotRecorded.OUTSIDE),),
    )


def _sampled_activities(facts: RankFacts, looks: Sequence[Look]) -> Iterator[SampledActivity]:
    alone = (replace(_alone(one), machine=facts.machine) for one in looks if one.stack)
    doings = (activity(one) for one in alone)
    counts = Counter((doing.kind.value, location_of(doing.place or doing.frame)) for doing in doings)
    for (doing, place), count in counts.most_common():
        yield SampledActivity(doing=doing, place=place, looks=count)


def _is_silent(seen: SeenRank) -> bool:
    """Whether a guard in its process could not answer: the process is stopped or gone, or keeps Python's lock."""
    last = seen.looks[-1].process
    return _is_gone(seen) or (last is not None and last.state in STOPPED) or _keeps_lock(seen)


def _is_gone(seen: SeenRank) -> bool:
    last = seen.looks[-1].process
    return last is None or last.state in ENDED


def ends_in(looks: Sequence[Look]) -> bool:
    """Whether a process ended between the first and the last of these looks."""
    first, last = looks[0].process, looks[-1].process
    return first is not None and last is not None and first.state not in ENDED and last.state in ENDED


def _keeps_lock(seen: SeenRank) -> bool:
    """Whether its main thread held the interpreter's lock in every look, at one line, and waits for nobody."""
    read = [one for one in seen.looks if one.stack]
    is_held = len(read) > 2 and all(one.main.holds_gil for one in read)
    # While native code keeps the lock, no Python line runs, not even in an import.
    lines = {tuple((frame.file, frame.line) for frame in one.stack) for one in read}
    return is_held and len(lines) == 1 and _moved(read) is False and not _waits(read[-1])


def _witnessed(seen: SeenRank) -> ProcessFacts:
    shown, first, last = _shown(seen), seen.looks[0], seen.looks[-1]
    process = last.process or ProcessFacts(pid=seen.process.pid)
    witnessed = replace(
        process,
        rank=seen.process.rank,
        stack=_with_collector(with_source(frames_of(shown.stack))),
        gil_held=_keeps_lock(seen),
    )
    return with_core_shares(witnessed, first.main_thread, last.main_thread, last.at_s - first.at_s)


def _with_collector(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Adds a frame for Python's garbage collector below a line that calls it, because it has no Python frame."""
    collects = bool(stack) and _COLLECTS.search(stack[-1].code) is not None
    return (*stack, Frame(file=COLLECTOR, line=0, function="")) if collects else stack


def _gone(seen: Sequence[SeenRank], ended: Sequence[ProcessFacts]) -> Iterator[ProcessFacts]:
    """Ranks that the launcher started beside these, and whose process has ended, perhaps unnoticed by its parent."""
    parents = {one.process.parent for one in seen}
    size = max(one.process.local_world_size for one in seen)
    # The parent of all is their launcher, or the first rank, which has started the others.
    if len(parents - {one.process.pid for one in seen}) > 1:
        return
    first = min(one.process.rank - one.process.local_rank for one in seen)
    here = {one.process.local_rank for one in seen}
    missing = [local_rank for local_rank in range(size) if local_rank not in here]
    # Which process was which rank is unknown, and does not matter if all have ended alike.
    are_alike = len(ended) == len(missing) and len({(one.ended_by, one.exit_code) for one in ended}) == 1
    for index, local_rank in enumerate(missing):
        process = ended[index] if are_alike else ProcessFacts(pid=0, state=GONE)
        yield replace(process, rank=first + local_rank)


def _with_ends(facts: Sequence[RankFacts], stacks: Mapping[int, Sequence[SeenFrame]]) -> list[RankFacts]:
    """Sets the phase of ranks outside the Trainer: whether they are before or past the line where others called it."""
    inside = [stack for stack in stacks.values() if is_in_trainer(stack)]
    calls = {(one.file, one.function): one.line for stack in inside for one in _outside(stack)}
    return [replace(one, progress=_placed_by(one.progress, stacks[one.rank], calls)) if calls else one for one in facts]


def _placed_by(progress: Progress, stack: Sequence[SeenFrame], calls: Mapping[tuple[str, str], int]) -> Progress:
    if progress.phase is not Phase.UNKNOWN or not stack:
        return progress
    common = [(one.line, calls[one.file, one.function]) for one in stack if (one.file, one.function) in calls]
    if not common:
        # When Python runs something at the end of a program, there is no user code around it.
        return progress if any(one.is_users for one in stack) else replace(progress, phase=Phase.FINISHED)
    line, call = common[-1]
    if line == call:
        return progress
    return replace(progress, phase=Phase.FINISHED if line > call else Phase.INIT)


def _outside(stack: Sequence[SeenFrame]) -> Iterator[SeenFrame]:
    for one in stack:
        if is_in_trainer([one]):
            return
        if one.is_users:
            yield one


def _with_sources(facts: Sequence[RankFacts], seen: Sequence[SeenRank]) -> list[RankFacts]:
    """Adds the source of lines and the exceptions, unless storage does not answer."""
    with suppress(Exception):
        return SideThread("ncclsafe-sources").call(lambda: [*map(_with_source, facts, seen)], _SOURCES_S)
    late = f"the source of its lines could not be read within {_SOURCES_S:g} s"
    return [replace(one, missing=(*one.missing, late)) for one in facts]


def _with_source(facts: RankFacts, seen: SeenRank) -> RankFacts:
    stack, inspection = with_source(facts.stack), facts.inspection
    idle_s = inspection.idle_s if inspection is not None else 0.0
    exception, caught = errors_of(seen.objects, stack, idle_s)
    if inspection is not None:
        threads = tuple(replace(one, frame=with_source([one.frame])[0]) for one in inspection.threads)
        inspection = replace(inspection, threads=threads)
    return replace(
        facts,
        stack=stack,
        thread_stack=with_source(facts.thread_stack),
        exception=exception,
        caught=caught,
        inspection=inspection,
    )
