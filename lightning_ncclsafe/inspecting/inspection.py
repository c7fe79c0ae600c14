"""The jobs of this host, inspected from outside: their ranks are found, looked at, and what was seen is judged."""

import linecache
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lightning_ncclsafe.code.libraries import LOADING, SPAWNED_PROCESS
from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.facts import (
    EndedProcess,
    GpuStateFacts,
    HostFacts,
    ProcessFacts,
    StorageFacts,
)
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.facts_of_looks import (
    SeenRank,
    ends_in,
    frames_of,
    is_past_program,
    job_facts,
    longest_idle_s,
    shows_enough,
)
from lightning_ncclsafe.inspecting.groups import group_of
from lightning_ncclsafe.inspecting.joining import LONG_STEP_S, LONG_WAIT_S, diagnosis_of, wait_apart
from lightning_ncclsafe.inspecting.looks import NO_PROGRAM, Look, SeenFrame, SeenThread, StackReader, look
from lightning_ncclsafe.inspecting.objects import Interpreter, ReadException
from lightning_ncclsafe.inspecting.ranks import (
    FoundRanks,
    RankProcess,
    SeenProcess,
    find_ranks,
    python_processes,
)
from lightning_ncclsafe.inspecting.recorders import recorded
from lightning_ncclsafe.inspecting.trainer_objects import counted
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.gpu import gpu_state
from lightning_ncclsafe.probes.host.cgroups import ControlGroups
from lightning_ncclsafe.probes.host.resources import child_processes, filesystem_of, look_at
from lightning_ncclsafe.probes.host.swap import look_at_pressure, pressure_between
from lightning_ncclsafe.probes.machine_state import GpuWatch
from lightning_ncclsafe.probes.network import name_servers_asked
from lightning_ncclsafe.probes.process.stacks import with_source

LOOKS = 5
"""How often each rank is looked at, if nothing else is said."""
SECONDS = 2.5
"""The time between the first look and the last, if nothing else is said and they show enough."""

_ON_EVERY_S = 2.0
_AT_ONCE = 4
# A worker's stack is read only where its rank waits for data, and of few: they do the same.
_WORKERS_READ = 2
_GPU_S, _STORAGE_S = 0.5, 3.0
_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp", ".part", ".tmp")
_LOGS = ("tfevents", "metrics.csv", ".wandb")
_VERSIONS = {"torch": ("torch",), "lightning": ("lightning", "pytorch_lightning")}

T = TypeVar("T")


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
        found = find_ranks(processes(), chosen)
        ranks = [*found.ranks, *_placed(found, reader, pool, chosen)]
        watch = _LookedAt(ranks, reader, pool, say, are_all=not chosen)
        if ranks:
            watch.look_on(max(looks, 1), SECONDS if over_s is None else over_s, may_be_fewer=over_s is None)
            if over_s is None:
                watch.look_on_until_it_shows()
        for one in watch.seen(may_write=may_write, may_stop=may_stop):
            jobs[one.process.job].append(one)
    if not jobs:
        return Inspected(notes=tuple(_nothing_words(chosen, reader)))
    return Inspected(
        diagnoses=tuple(diagnosis_of(job_facts(of_job, are_all=not chosen)) for of_job in jobs.values()),
        notes=() if reader.is_there else (NO_PROGRAM,),
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


class _LookedAt:
    """Ranks that are looked at together, again and again, and what their host holds up meanwhile."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        reader: StackReader,
        pool: ThreadPoolExecutor,
        say: Callable[[str], object],
        *,
        are_all: bool,
    ) -> None:
        self._ranks, self._reader, self._pool, self._say, self._are_all = ranks, reader, pool, say, are_all
        self._began_s, self._groups = time.monotonic(), ControlGroups()
        self._pressure = look_at_pressure(self._groups)
        self._gpus = {one.pid: GpuWatch(partial(_gpu, one, ranks)) for one in ranks}
        for gpu in self._gpus.values():
            gpu.begin()
        self._looks: dict[int, list[Look]] = defaultdict(list)
        self._objects: dict[int, dict[str, Any]] = {}
        self._ended_after: set[int] = set()

    def look_on(self, count: int, over_s: float, *, may_be_fewer: bool = False) -> None:
        for number in range(count):
            due_s = self._began_s + over_s * number / max(count - 1, 1)
            time.sleep(max(due_s - time.monotonic(), 0.0))
            self._look()
            if may_be_fewer and number and self._nobody_has_run():
                return

    def look_on_until_it_shows(self) -> None:
        """Until everybody has moved, or somebody is known to stand still for longer than a step takes, or ends."""
        self._read_objects()
        if self._shows_enough():
            return
        open_jobs = [of_job for of_job in self._jobs() if not self._shows(of_job)]
        still_s = max(map(longest_idle_s, open_jobs))
        so_far = "".join(map(self._so_far, open_jobs))
        self._say(
            f"a rank has stood still for {still_s:.1f} s, in a hang or a long step.{so_far} Inspecting for at most"
            f" {max(LONG_STEP_S - still_s, _ON_EVERY_S):.0f} s, or until all ranks have moved, as after a long step."
            " Ctrl-C answers now."
        )
        with suppress(KeyboardInterrupt):
            while not self._shows_enough() and not self._ended_after:
                time.sleep(_ON_EVERY_S)
                self._look()
                self._ended_after = {pid for pid, looks in self._looks.items() if ends_in(looks)}
        if self._ended_after:
            # What hung, and is being ended, is told as it was.
            for looks in self._looks.values():
                looks.pop()

    def _so_far(self, of_job: Sequence[SeenRank]) -> str:
        """What these looks come to by themselves, for those who would not wait for more."""
        findings = diagnosis_of(job_facts(of_job, are_all=self._are_all)).findings
        return "".join(f" So far: {one.summary} ({one.rule}, {one.confidence.value})" for one in findings[:1])

    def seen(self, *, may_write: bool, may_stop: bool) -> list[SeenRank]:
        self._read_objects()
        # Of a job that moves there is nothing to ask.
        standing = [one for of_job in self._jobs() if longest_idle_s(of_job) for one in of_job]
        answers = recorded([one.process for one in standing], self._pool, may_write=may_write)
        for note in answers.notes:
            self._say(note)
        native = self._native([one.process for one in standing]) if may_stop else {}
        span_s = time.monotonic() - self._began_s
        held_up = pressure_between(self._pressure, look_at_pressure(self._groups), span_s)
        every = [
            *self._pool.map(
                lambda one: _seen_rank(one, tuple(self._looks[one.pid]), self._reader, self._ranks), self._ranks
            )
        ]
        give_up_s = time.monotonic() + _GPU_S
        return [
            replace(
                one,
                gpu=self._gpus[one.process.pid].read(give_up_s - time.monotonic()),
                pressure=held_up,
                ended_after=one.process.pid in self._ended_after,
                recorded=answers.facts.get(one.process.pid),
                native=native.get(one.process.pid, ()),
                **self._objects_of(one),
            )
            for one in every
        ]

    def _native(self, ranks: Sequence[RankProcess]) -> dict[int, tuple[str, ...]]:
        read = [*self._pool.map(lambda one: self._reader.native(one.pid), ranks)]
        for one, (_, why) in zip(ranks, read, strict=True):
            if why:
                self._say(f"rank {one.rank}: {why}")
        return {one.pid: functions for one, (functions, _) in zip(ranks, read, strict=True)}

    def _look(self) -> None:
        for one, seen in zip(
            self._ranks, self._pool.map(lambda one: _look(one, self._reader), self._ranks), strict=True
        ):
            self._looks[one.pid].append(seen)

    def _read_objects(self) -> None:
        standing = [one for of_job in self._jobs() for one in of_job if longest_idle_s([one])]
        for one, read in zip(standing, self._pool.map(_read, standing), strict=True):
            # A rank that has ended since is reported with what was read before.
            self._objects[one.process.pid] = read or self._objects.get(one.process.pid, {})

    def _objects_of(self, one: SeenRank) -> dict[str, Any]:
        return self._objects.get(one.process.pid, {}) if longest_idle_s([one]) else {}

    def _shows_enough(self) -> bool:
        return all(map(self._shows, self._jobs()))

    def _shows(self, of_job: Sequence[SeenRank]) -> bool:
        if shows_enough(of_job):
            return True
        all_stand_s = min(longest_idle_s([one]) for one in of_job)
        return all_stand_s >= LONG_WAIT_S and wait_apart(job_facts(of_job, are_all=self._are_all))

    def _nobody_has_run(self) -> bool:
        """Whether the kernel has it that no rank has run for longer than a step takes: then none can have moved."""
        return all((looks[-1].slept_s or 0.0) >= LONG_STEP_S for looks in self._looks.values())

    def _jobs(self) -> list[list[SeenRank]]:
        jobs: dict[str, list[SeenRank]] = defaultdict(list)
        for one in self._ranks:
            seen = SeenRank(process=one, looks=tuple(self._looks[one.pid]))
            jobs[one.job].append(replace(seen, **self._objects_of(seen)))
        return [*jobs.values()]


def _look(one: RankProcess, reader: StackReader) -> Look:
    seen = look(one.pid, reader, time.monotonic())
    folder = or_none(lambda: os.readlink(f"/proc/{one.pid}/cwd")) or ""
    return replace(seen, threads=tuple(_with_folder(thread, folder) for thread in seen.threads))


def _with_folder(thread: SeenThread, folder: str) -> SeenThread:
    return replace(thread, frames=tuple(replace(frame, file=_whole(frame.file, folder)) for frame in thread.frames))


def _whole(file: str, folder: str) -> str:
    """A script that was named without its folder is named so in its frames."""
    is_whole = os.path.isabs(file) or file.startswith("<") or not folder
    return file if is_whole else os.path.join(folder, file)


def _gpu(one: RankProcess, ranks: Sequence[RankProcess]) -> GpuStateFacts | None:
    return gpu_state(one.local_rank, own_pids=[other.pid for other in ranks], environment=one.environment)


def _seen_rank(
    one: RankProcess, looks: tuple[Look, ...], reader: StackReader, ranks: Sequence[RankProcess]
) -> SeenRank:
    """With what needs to be seen once."""
    # Lightning's launcher makes the other ranks children of the first one: such a child is no worker.
    others = [other.pid for other in ranks]
    children = or_none(lambda: psutil.Process(one.pid).children()) or []
    ended = [seen for child in children if child.pid not in others and (seen := look_at(child.pid)).state == "zombie"]
    workers = child_processes(besides=others, of=one.pid)
    loads = bool(looks) and any(LOADING.has(frame.file, frame.function) for frame in looks[-1].stack)
    _from_storage(partial(_remember_sources, one.pid, {frame.file for seen in looks for frame in seen.stack}), None)
    return SeenRank(
        process=one,
        looks=looks,
        workers=tuple(
            _worker(pid, reader if loads and number < _WORKERS_READ else None)
            for number, pid in enumerate(workers)
            if pid not in [seen.pid for seen in ended]
        ),
        ended=tuple(EndedProcess(pid=seen.pid, signal=seen.ended_by, exit_code=seen.exit_code) for seen in ended),
        storage=_from_storage(lambda: tuple(_open_files(one.pid)), ()),
        name_servers=name_servers_asked(one.pid),
        host_facts=_host_facts(one.pid, looks),
        versions=_from_storage(partial(_versions, looks), {}),
    )


def _from_storage(read: Callable[[], T], otherwise: T) -> T:
    """What a read gives, unless it raises or the storage of a rank does not answer, as it may be that which hangs."""
    with suppress(Exception):
        return SideThread("ncclsafe-storage").call(read, _STORAGE_S)
    return otherwise


def _worker(pid: int, reader: StackReader | None) -> ProcessFacts:
    seen = look_at(pid)
    if reader is None:
        return seen
    threads, _ = reader.read(pid)
    main = next((thread for thread in threads if thread.is_main), None)
    return replace(seen, stack=with_source(frames_of(main.frames))) if main is not None else seen


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


def _read(seen: SeenRank) -> dict[str, Any]:
    """What the objects of a rank that stands still tell: what it has raised, and how far its Trainer has come.

    What is read twice alike has not changed meanwhile.
    """
    pid = seen.process.pid
    stack = next((one.stack for one in reversed(seen.looks) if one.stack), ())
    folder = or_none(lambda: os.readlink(f"/proc/{pid}/cwd")) or ""

    def read() -> dict[str, Any]:
        with Interpreter(pid) as interpreter:
            if not interpreter.is_same:
                return {"is_other_python": True, "left": (), "handled": ()}
            return {
                "left": interpreter.printed() if is_past_program(stack) else (),
                "handled": interpreter.handled(),
                "counted": counted(interpreter, stack),
                "group": group_of(interpreter, stack),
            }

    found = or_none(read) or {}
    if not found or or_none(read) != found:
        return {}
    raised = {name: tuple(_placed_in(folder, one) for one in found[name]) for name in ("left", "handled")}
    files = {file for of in raised.values() for one in of for file, *_ in one.places}
    _from_storage(partial(_remember_sources, pid, files), None)
    return found | raised


def _placed_in(folder: str, raised: ReadException) -> ReadException:
    return replace(
        raised, places=tuple((_whole(file, folder), line, function) for file, line, function in raised.places)
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


def _remember_sources(pid: int, files: Iterable[str], *, processes: Path = Path("/proc")) -> None:
    """Of a rank in a container the files lie below its own root; whoever asks for their lines is given these.

    What lies here under the same name may be another version.
    """
    for file in files:
        inside = Path(f"{processes}/{pid}/root{file}")
        try:
            if not (file.startswith("<") or file in linecache.cache or _is_here(file, inside)):
                _remember(file, inside.read_text())
        except OSError:
            continue
        except ValueError:
            # It is no text, or no file can have the name, for which Python would raise again.
            _remember(file, "")


def _remember(file: str, text: str) -> None:
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _is_here(file: str, inside: Path) -> bool:
    try:
        return os.path.samefile(file, inside)
    except FileNotFoundError:
        return not inside.exists()
