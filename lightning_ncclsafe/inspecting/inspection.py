"""The jobs of this host, inspected from outside: looks at their ranks become facts, and these are judged."""

import linecache
import os
import re
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from lightning_ncclsafe.code.libraries import ALL_OF_LIGHTNING, LOADING, SPAWNED_PROCESS
from lightning_ncclsafe.facts import (
    EndedProcess,
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
    StorageFacts,
    UnrecordedGroup,
    Whereabouts,
)
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.joining import diagnosis_of
from lightning_ncclsafe.inspecting.looks import NO_PROGRAM, Look, SeenFrame, SeenThread, StackReader, look
from lightning_ncclsafe.inspecting.ranks import (
    FoundRanks,
    RankProcess,
    SeenProcess,
    find_ranks,
    python_processes,
)
from lightning_ncclsafe.inspecting.trainer_frames import is_in_trainer, progress_in
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.gpu import gpu_state
from lightning_ncclsafe.probes.host.cgroups import ControlGroups
from lightning_ncclsafe.probes.host.resources import child_processes, filesystem_of, look_at
from lightning_ncclsafe.probes.host.swap import look_at_pressure, pressure_between
from lightning_ncclsafe.probes.machine_state import GpuWatch, main_thread_over
from lightning_ncclsafe.probes.process.environment import settings_seen
from lightning_ncclsafe.probes.process.stacks import calling, is_user_code, with_source
from lightning_ncclsafe.rules.kit.activity import activity
from lightning_ncclsafe.rules.kit.wording import capitalised, location_of, ranks_words

LOOKS = 5
"""How often each rank is looked at, if nothing else is said."""
SECONDS = 2.5
"""The time between the first look and the last, if nothing else is said."""

_AT_ONCE = 4
_MOST_FRAMES = 120
# A worker's stack is read only where its rank waits for data, and of few: they do the same.
_WORKERS_READ = 2
_SOURCES_S = 1.0
_GPU_S = 0.5
# Python's own library, of whatever installation: that of the rank need not be ours.
_LIBRARY = re.compile(r"/lib(?:64)?/python\d[\d.]*/|/python\d+\.zip/")
_STOPPED = ("stopped", "tracing-stop")
_ENDED = ("zombie", "gone")
_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp", ".part", ".tmp")
_LOGS = ("tfevents", "metrics.csv", ".wandb")
_VERSIONS = {"torch": ("torch",), "lightning": ("lightning", "pytorch_lightning")}
NOT_SEEN = (
    "From outside, neither the Flight Recorder is seen, nor epochs, the lengths of loaders, logged keys, or exceptions "
    "that were caught: a guarded strategy (SafeDDP, SafeFSDP, SafeModelParallel) sees them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """A rank as it was seen.

    Attributes:
        process: Which process it is.
        looks: The looks at it, the oldest first.
        workers: Its loader's workers.
        ended: Those of its children that have ended, and that it has not waited for.
        storage: Files that it has open for writing.
        host_facts: Memory of it and its host.
        gpu: Its GPU; None where there is none.
        pressure: What its host has held up meanwhile.
        versions: Of what is installed where it runs.
    """

    process: RankProcess
    looks: tuple[Look, ...]
    workers: tuple[ProcessFacts, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    storage: tuple[StorageFacts, ...] = ()
    host_facts: HostFacts = field(default_factory=HostFacts)
    gpu: GpuStateFacts | None = None
    pressure: PressureFacts | None = None
    versions: dict[str, str] = field(default_factory=dict)


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
    over_s: float = SECONDS,
    processes: Callable[[], Iterable[SeenProcess]] = python_processes,
    reader: StackReader | None = None,
) -> Inspected:
    """Looks at the ranks of this host several times, and says what they do and why, if they hang.

    Args:
        pids: Processes of the ranks; by default all that there are.
        looks: How often to look.
        over_s: Seconds between the first look and the last.
        processes: Gives the Python processes of this host.
        reader: Reads their stacks.
    """
    reader, chosen = reader or StackReader(), [*pids]
    jobs: dict[str, list[SeenRank]] = defaultdict(list)
    for one in see_ranks(chosen, looks=looks, over_s=over_s, processes=processes, reader=reader):
        jobs[one.process.job].append(one)
    if not jobs:
        return Inspected(notes=tuple(_nothing_words(chosen, reader)))
    return Inspected(
        diagnoses=tuple(diagnosis_of(job_facts(of_job, are_all=not chosen)) for of_job in jobs.values()),
        notes=() if reader.is_there else (NO_PROGRAM,),
    )


def see_ranks(
    pids: Sequence[int],
    *,
    looks: int,
    over_s: float,
    processes: Callable[[], Iterable[SeenProcess]] = python_processes,
    reader: StackReader,
) -> list[SeenRank]:
    """Looks at the ranks of this host; the arguments are those of :func:`inspect`."""
    found = find_ranks(processes(), pids)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        ranks = [*found.ranks, *_placed(found, reader, pool, pids)]
        return _look_at_all(ranks, reader, pool, max(looks, 1), over_s) if ranks else []


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


def _look_at_all(
    ranks: Sequence[RankProcess], reader: StackReader, pool: ThreadPoolExecutor, count: int, over_s: float
) -> list[SeenRank]:
    began_s = time.monotonic()
    groups, gpus = ControlGroups(), {}
    pressure = look_at_pressure(groups)
    for one in ranks:
        gpus[one.pid] = GpuWatch(lambda one=one: _gpu(one, ranks))  # type: ignore[misc]
        gpus[one.pid].begin()
    looks: dict[int, list[Look]] = defaultdict(list)
    for number in range(count):
        due_s = began_s + over_s * number / max(count - 1, 1)
        time.sleep(max(due_s - time.monotonic(), 0.0))
        for one, seen in zip(ranks, pool.map(lambda one: _look(one, reader), ranks), strict=True):
            looks[one.pid].append(seen)
    span_s = time.monotonic() - began_s
    held_up = pressure_between(pressure, look_at_pressure(groups), span_s)
    every = [*pool.map(lambda one: _seen_rank(one, tuple(looks[one.pid]), reader, ranks), ranks)]
    give_up_s = time.monotonic() + _GPU_S
    return [
        replace(one, gpu=gpus[one.process.pid].read(give_up_s - time.monotonic()), pressure=held_up) for one in every
    ]


def _look(one: RankProcess, reader: StackReader) -> Look:
    seen = look(one.pid, reader, time.monotonic())
    folder = or_none(lambda: os.readlink(f"/proc/{one.pid}/cwd")) or ""
    return replace(seen, threads=tuple(_with_folder(thread, folder) for thread in seen.threads))


def _with_folder(thread: SeenThread, folder: str) -> SeenThread:
    """A script that was named without its folder is named so in its frames."""
    frames = (
        frame
        if os.path.isabs(frame.file) or frame.file.startswith("<") or not folder
        else replace(frame, file=os.path.join(folder, frame.file))
        for frame in thread.frames
    )
    return replace(thread, frames=tuple(frames))


def _gpu(one: RankProcess, ranks: Sequence[RankProcess]) -> GpuStateFacts | None:
    return gpu_state(one.local_rank, own_pids=[other.pid for other in ranks], environment=one.environment)


def _seen_rank(
    one: RankProcess, looks: tuple[Look, ...], reader: StackReader, ranks: Sequence[RankProcess]
) -> SeenRank:
    """With what needs to be seen once."""
    children = or_none(lambda: psutil.Process(one.pid).children()) or []
    ended = [seen for child in children if (seen := look_at(child.pid)).state == "zombie"]
    workers = child_processes(besides=[other.pid for other in ranks], of=one.pid)
    loads = bool(looks) and any(LOADING.has(frame.file, frame.function) for frame in looks[-1].stack)
    _remember_sources(one.pid, {frame.file for seen in looks for frame in seen.stack})
    return SeenRank(
        process=one,
        looks=looks,
        workers=tuple(
            _worker(pid, reader if loads and number < _WORKERS_READ else None)
            for number, pid in enumerate(workers)
            if pid not in [seen.pid for seen in ended]
        ),
        ended=tuple(EndedProcess(pid=seen.pid, signal=seen.ended_by, exit_code=seen.exit_code) for seen in ended),
        storage=tuple(_open_files(one.pid)),
        host_facts=_host_facts(one.pid, looks),
        versions=_versions(looks),
    )


def _worker(pid: int, reader: StackReader | None) -> ProcessFacts:
    seen = look_at(pid)
    if reader is None:
        return seen
    threads, _ = reader.read(pid)
    main = next((thread for thread in threads if thread.is_main), None)
    return replace(seen, stack=with_source(_frames(main.frames))) if main is not None else seen


def _open_files(pid: int) -> Iterator[StorageFacts]:
    """Files that are written to, by what their names say."""
    seen = set()
    for file in or_none(lambda: psutil.Process(pid).open_files()) or []:
        folder, name = os.path.split(file.path)
        is_log = any(part in name for part in _LOGS)
        owner = "Logger" if is_log else "Checkpoint" if name.endswith(_CHECKPOINTS) else ""
        is_written = "w" in (getattr(file, "mode", "") or "") or "a" in (getattr(file, "mode", "") or "")
        if owner and is_written and (owner, folder) not in seen:
            seen.add((owner, folder))
            yield StorageFacts(owner=owner, path=folder, filesystem=or_none(partial(filesystem_of, folder)) or "")


def _host_facts(pid: int, looks: Sequence[Look]) -> HostFacts:
    known = [(seen.at_s, seen.process) for seen in looks if seen.process and seen.process.rss_bytes is not None]
    memory, swap = or_none(psutil.virtual_memory), or_none(psutil.swap_memory)
    facts = HostFacts(
        memory_total_bytes=memory.total if memory else None,
        memory_available_bytes=memory.available if memory else None,
        swap_total_bytes=swap.total if swap else None,
        swap_used_bytes=swap.used if swap else None,
        cores=or_none(lambda: len(os.sched_getaffinity(pid))),
        load_1min=or_none(lambda: os.getloadavg()[0]),
    )
    if not known:
        return facts
    (first_s, first), (last_s, last) = known[0], known[-1]
    span_s = last_s - first_s
    grows = round(((last.rss_bytes or 0) - (first.rss_bytes or 0)) / span_s) if span_s > 0 else None
    swaps = round(((last.swap_bytes or 0) - (first.swap_bytes or 0)) / span_s) if span_s > 0 else None
    return replace(
        facts,
        rss_bytes=last.rss_bytes,
        process_swap_bytes=last.swap_bytes,
        memory_growth_bytes_per_s=grows,
        swap_growth_bytes_per_s=swaps,
    )


def _versions(looks: Sequence[Look]) -> dict[str, str]:
    """By what lies beside the packages that its frames are in."""
    files = {frame.file for seen in looks for frame in seen.stack if "-packages/" in frame.file}
    folders = {file[: file.index("-packages/") + len("-packages")] for file in files}
    found: dict[str, str] = {}
    for folder in folders:
        for name, installed in _VERSIONS.items():
            for path in (path for one in installed for path in Path(folder).glob(f"{one}-*.dist-info")):
                found.setdefault(name, path.name.removesuffix(".dist-info").rpartition("-")[2])
    return found


def _remember_sources(pid: int, files: Iterable[str]) -> None:
    """Of a rank in a container the files lie below its own root; whoever asks for their lines is given these."""
    for file in files:
        if not file.startswith("<") and file not in linecache.cache and not os.path.exists(file):
            inside = Path(f"/proc/{pid}/root{file}")
            with suppress(OSError, UnicodeDecodeError):
                text = inside.read_text()
                linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


# From here on nothing is looked at any more.


def job_facts(seen: Sequence[SeenRank], *, are_all: bool = True, taken_ns: int | None = None) -> JobFacts:
    """The facts of one job.

    Args:
        seen: Its ranks on this host, at least one.
        are_all: Whether these are all ranks of this host for which there is a process.
        taken_ns: Wall-clock time, nanoseconds since the epoch; by default now.
    """
    taken_ns = time.time_ns() if taken_ns is None else taken_ns
    world_size = max(max(one.process.world_size, one.process.rank + 1) for one in seen)
    answering = [one for one in seen if not _is_silent(one)]
    witnessed = [*(_witnessed(one) for one in seen if _is_silent(one)), *(_gone(seen) if are_all else ())]
    facts = _with_sources([rank_facts(one, taken_ns=taken_ns) for one in answering])
    facts = _with_ends(facts, {one.process.rank: _shown(one).stack for one in answering})
    known = {one.process.rank for one in seen} | {process.rank for process in witnessed}
    over_s = max((_span_s(one.looks) for one in seen), default=0.0)
    stands = any(one.inspection is None or not one.inspection.moved for one in facts) or bool(witnessed)
    ended = sorted(one.process.rank for one in seen if _has_just_ended(one))
    return JobFacts(
        incident=Incident(
            number=1,
            kind=IncidentKind.INSPECTED,
            opened_by=min(known),
            opened_ns=taken_ns,
            # What ends before our eyes may be the end of the job.
            idle_s=over_s if stands and not ended else 0.0,
        ),
        world_size=world_size,
        ranks=tuple(sorted(facts, key=lambda one: one.rank)),
        witnessed=tuple(witnessed),
        elsewhere=tuple(rank for rank in range(world_size) if rank not in known),
        launch=seen[0].process.job,
        missing=(*([f"{capitalised(ranks_words(ended))} ended meanwhile: inspect again."] if ended else []), NOT_SEEN),
    )


def rank_facts(seen: SeenRank, *, taken_ns: int = 0) -> RankFacts:
    """The facts of one rank, without the source of its lines."""
    shown, moved, over_s = _shown(seen), _moved(seen.looks), _span_s(seen.looks)
    threads = [(one.at_s, one.main_thread) for one in seen.looks]
    problems = [one.problem for one in seen.looks if one.problem]
    facts = RankFacts(
        rank=seen.process.rank,
        local_rank=seen.process.local_rank,
        local_world_size=seen.process.local_world_size,
        host=socket.gethostname(),
        pid=seen.process.pid,
        taken_ns=taken_ns,
        progress=progress_in(shown.stack, round(over_s, 1) if not moved else 0.0),
        stack=_frames(shown.stack),
        thread_stack=calling(_frames(thread.frames) for thread in shown.threads if not thread.is_main),
        unrecorded=(UnrecordedGroup(name="0", why=NotRecorded.OUTSIDE),),
        host_facts=seen.host_facts,
        machine=MachineFacts(
            main_thread=main_thread_over(threads),
            pressure=seen.pressure,
            ended=seen.ended,
            gpu=seen.gpu,
            settings=settings_seen(seen.process.environment),
        ),
        workers=seen.workers,
        storage=seen.storage,
        versions=seen.versions,
        missing=(problems[-1],) if len(problems) == len(seen.looks) else (),
    )
    return replace(
        facts,
        inspection=InspectionFacts(
            looks=len(seen.looks) - len(problems),
            over_s=round(over_s, 1),
            moved=moved,
            whereabouts=tuple(_whereabouts(facts, seen.looks)),
        ),
    )


def _frames(stack: Sequence[SeenFrame]) -> tuple[Frame, ...]:
    kept = [*stack]
    if len(kept) > _MOST_FRAMES:
        kept = kept[: _MOST_FRAMES // 2] + kept[-_MOST_FRAMES // 2 :]
    return tuple(Frame(file=one.file, line=one.line, function=one.function, user=_is_users(one.file)) for one in kept)


def _is_users(file: str) -> bool:
    return is_user_code(file) and _LIBRARY.search(file) is None


def _span_s(looks: Sequence[Look]) -> float:
    return looks[-1].at_s - looks[0].at_s if looks else 0.0


def _moved(looks: Sequence[Look]) -> bool | None:
    """Whether its main thread did something else between looks.

    It has where a line of the user's or of Lightning's is another, or one of these holds other objects: what others'
    code does below may be a wait that is tried again and again.
    """
    prints = [_fingerprint(one.stack) for one in looks if one.stack]
    return len(set(prints)) > 1 if len(prints) > 1 else None


def _fingerprint(stack: Sequence[SeenFrame]) -> tuple[tuple[str, int, str, str], ...]:
    telling = [
        depth for depth, one in enumerate(stack) if _is_users(one.file) or ALL_OF_LIGHTNING.has(one.file, one.function)
    ]
    kept = stack[: telling[-1] + 1] if telling else stack
    return tuple((one.file, one.line, one.function, one.digest) for one in kept)


def _shown(seen: SeenRank) -> Look:
    """The look whose stack is told: the last; of a rank that moves the last one at which it waits for nobody."""
    read = [one for one in seen.looks if one.stack] or [*seen.looks]
    if _moved(seen.looks):
        free = [one for one in read if not _waits(one)]
        return (free or read)[-1]
    return read[-1]


def _waits(one: Look) -> bool:
    return activity(_alone(one)).waits_for_peers


def _alone(one: Look) -> RankFacts:
    """What this look says by itself."""
    return RankFacts(
        rank=0,
        progress=progress_in(one.stack, 0.0),
        stack=_frames(one.stack),
        unrecorded=(UnrecordedGroup(name="0", why=NotRecorded.OUTSIDE),),
    )


def _whereabouts(facts: RankFacts, looks: Sequence[Look]) -> Iterator[Whereabouts]:
    alone = (replace(_alone(one), machine=facts.machine) for one in looks if one.stack)
    doings = (activity(one) for one in alone)
    counts = Counter((doing.kind.value, location_of(doing.place or doing.frame)) for doing in doings)
    for (doing, place), count in counts.most_common():
        yield Whereabouts(doing=doing, place=place, looks=count)


def _is_silent(seen: SeenRank) -> bool:
    """Whether its process is such that a guard could not have answered: it is stopped, gone, or keeps Python's lock."""
    last = seen.looks[-1].process
    return last is None or last.state in (*_STOPPED, *_ENDED) or _keeps_lock(seen)


def _has_just_ended(seen: SeenRank) -> bool:
    """Whether its process was there at the first look, and is not any more."""
    first, last = seen.looks[0].process, seen.looks[-1].process
    return first is not None and last is not None and first.state not in _ENDED and last.state in _ENDED


def _keeps_lock(seen: SeenRank) -> bool:
    """Whether its main thread held the interpreter's lock at every look, at one line, and waits for nobody."""
    read = [one for one in seen.looks if one.stack]
    is_held = len(read) > 2 and all(one.main.holds_gil for one in read)
    # Native code that keeps it leaves no line to be run, in an import neither.
    lines = {tuple((frame.file, frame.line) for frame in one.stack) for one in read}
    return is_held and len(lines) == 1 and _moved(read) is False and not _waits(read[-1])


def _witnessed(seen: SeenRank) -> ProcessFacts:
    shown, first, last = _shown(seen), seen.looks[0], seen.looks[-1]
    process = last.process or ProcessFacts(pid=seen.process.pid)
    span_s = last.at_s - first.at_s
    return replace(
        process,
        rank=seen.process.rank,
        stack=with_source(_frames(shown.stack)),
        gil_held=_keeps_lock(seen),
        ran_share=_share(first.main_thread.ran_s, last.main_thread.ran_s, span_s),
        queued_share=_share(first.main_thread.queued_s, last.main_thread.queued_s, span_s),
    )


def _share(before: float | None, now: float | None, span_s: float) -> float | None:
    if before is None or now is None or span_s <= 0:
        return None
    return round(min(max((now - before) / span_s, 0.0), 1.0), 3)


def _gone(seen: Sequence[SeenRank]) -> Iterator[ProcessFacts]:
    """Ranks that their launcher has started beside these, and of which there is no process any more."""
    parents = {one.process.parent for one in seen}
    size = max(one.process.local_world_size for one in seen)
    # One that is a rank itself has started the others, and is here; else all have one parent.
    if len(parents - {one.process.pid for one in seen}) > 1:
        return
    first = min(one.process.rank - one.process.local_rank for one in seen)
    here = {one.process.local_rank for one in seen}
    for local_rank in range(size):
        if local_rank not in here:
            yield ProcessFacts(pid=0, rank=first + local_rank, state="gone")


def _with_ends(facts: Sequence[RankFacts], stacks: Mapping[int, Sequence[SeenFrame]]) -> list[RankFacts]:
    """Of ranks outside the Trainer, whether they are past the line at which others are in it, or before it."""
    inside = [stack for stack in stacks.values() if is_in_trainer(stack)]
    calls = {(one.file, one.function): one.line for stack in inside for one in _outside(stack)}
    return [replace(one, progress=_placed_by(one.progress, stacks[one.rank], calls)) if calls else one for one in facts]


def _placed_by(progress: Progress, stack: Sequence[SeenFrame], calls: Mapping[tuple[str, str], int]) -> Progress:
    if progress.phase is not Phase.UNKNOWN or not stack:
        return progress
    common = [(one.line, calls[one.file, one.function]) for one in stack if (one.file, one.function) in calls]
    if not common:
        # Python's own code at the end of a program has no line of the user's around it.
        return replace(progress, phase=Phase.FINISHED) if not any(_is_users(one.file) for one in stack) else progress
    line, call = common[-1]
    if line == call:
        return progress
    return replace(progress, phase=Phase.FINISHED if line > call else Phase.INIT)


def _outside(stack: Sequence[SeenFrame]) -> Iterator[SeenFrame]:
    for one in stack:
        if is_in_trainer([one]):
            return
        if _is_users(one.file):
            yield one


def _with_sources(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """With the source of their lines, unless that lies where nothing answers."""
    done: list[RankFacts] = []

    def read() -> None:
        done.extend(
            replace(one, stack=with_source(one.stack), thread_stack=with_source(one.thread_stack)) for one in facts
        )

    reads = threading.Thread(target=read, name="ncclsafe-sources", daemon=True)
    reads.start()
    reads.join(_SOURCES_S)
    if not reads.is_alive() and len(done) == len(facts):
        return done
    late = f"the source of its lines could not be read within {_SOURCES_S:g} s"
    return [replace(one, missing=(*one.missing, late)) for one in facts]
