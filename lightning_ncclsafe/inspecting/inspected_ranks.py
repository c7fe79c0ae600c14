"""Looks at ranks again and again, until it is clear whether one of them hangs; and once at what surrounds each."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from lightning_ncclsafe.code.libraries import LOADING
from lightning_ncclsafe.facts import (
    GONE,
    EndedProcess,
    GpuStateFacts,
    HostFacts,
    JobFacts,
    PressureFacts,
    ProcessFacts,
    StorageFacts,
)
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S, LONG_WAIT_S, wait_in_vain
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, ends_in, frames_of, longest_idle_s, shows_enough
from lightning_ncclsafe.inspecting.looks import Look, StackReader, look
from lightning_ncclsafe.inspecting.rank_objects import RankObjects, objects_of
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.inspecting.recorders import recorded
from lightning_ncclsafe.inspecting.sources import folder_of, from_storage, remember_sources, whole
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.gpu import GpuWatch, gpu_state
from lightning_ncclsafe.probes.host.cgroups import ControlGroups
from lightning_ncclsafe.probes.host.resources import child_processes, filesystem_of, host_facts, look_at
from lightning_ncclsafe.probes.host.swap import look_at_pressure, pressure_between
from lightning_ncclsafe.probes.network import name_servers_asked
from lightning_ncclsafe.probes.process.growth import MemoryLook, growth_between
from lightning_ncclsafe.probes.process.lock_waits import awaited_lock
from lightning_ncclsafe.probes.process.main_thread import started_at
from lightning_ncclsafe.probes.process.outside_waits import awaited_by, awaited_file
from lightning_ncclsafe.probes.process.stacks import with_source

_AGAIN_EVERY_S = 2.0
# Fewer do not show whether a rank keeps Python's lock.
_LEAST_LOOKS = 3
_GPU_S = 0.5


class InspectedRanks:
    """The ranks of this host under inspection, with all looks at them.

    Args:
        say: Is called with each line for the user.
        facts: Makes the facts of the ranks of a job.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        reader: StackReader,
        pool: ThreadPoolExecutor,
        say: Callable[[str], object],
        facts: Callable[[Sequence[SeenRank]], JobFacts],
    ) -> None:
        self._ranks, self._reader, self._pool, self._say, self._facts = ranks, reader, pool, say, facts
        self._began_s, self._groups = time.monotonic(), ControlGroups()
        self._pressure = look_at_pressure(self._groups)
        self._gpus = {one.pid: GpuWatch(partial(_gpu, one, ranks)) for one in ranks}
        for gpu in self._gpus.values():
            gpu.begin()
        self._looks: dict[int, list[Look]] = defaultdict(list)
        self._objects: dict[int, RankObjects] = {}
        self._objects_are_old = True
        self._ended_after: set[int] = set()
        self._started = {one.pid: started_at(one.pid) for one in ranks}

    def look(self, count: int, over_s: float, *, may_be_fewer: bool = False) -> None:
        """Looks at all ranks.

        Args:
            over_s: Seconds from the first look to the last.
            may_be_fewer: Whether two are enough if no rank has run for longer than a step takes, and three if they take
                that long, as with many ranks on a busy host.
        """
        for number in range(count):
            due_s = self._began_s + over_s * number / max(count - 1, 1)
            time.sleep(max(due_s - time.monotonic(), 0.0))
            self._look()
            is_over = number + 1 >= _LEAST_LOOKS and time.monotonic() - self._began_s > over_s
            if may_be_fewer and number and (is_over or self._nobody_has_run()):
                return

    def unclear(self) -> list[RankProcess]:
        """The ranks of jobs that either hang or are in a long step."""
        self._read_objects()
        return [one.process for of_job in self._jobs() if not self._is_clear(of_job) for one in of_job]

    def look_until_clear(self) -> None:
        """Looks until all ranks have moved, or one has made no progress for longer than a step takes, or one ends."""
        with suppress(KeyboardInterrupt):
            while not all(map(self._is_clear, self._jobs())) and not self._ended_after:
                time.sleep(_AGAIN_EVERY_S)
                self._look()
                self._ended_after = {pid for pid, looks in self._looks.items() if ends_in(looks)}
        if self._ended_after:
            # A job that hung, and is ended, is reported as it was before.
            for looks in self._looks.values():
                looks.pop()

    def seen(self, ranks: Iterable[RankProcess]) -> list[SeenRank]:
        """What is known of some of the ranks, with their workers, files, locks, GPUs and host."""
        self._read_objects()
        held_up = self._held_up()
        every = [
            *self._pool.map(lambda one: seen_rank(one, tuple(self._looks[one.pid]), self._reader, self._ranks), ranks)
        ]
        give_up_s = time.monotonic() + _GPU_S
        return [
            replace(
                one,
                gpu=self._gpus[one.process.pid].read(give_up_s - time.monotonic()),
                pressure=held_up,
                ended_after=one.process.pid in self._ended_after,
                objects=self._objects_of(one),
            )
            for one in every
        ]

    def with_recorders(self, seen: Sequence[SeenRank], *, may_write: bool, may_stop: bool) -> list[SeenRank]:
        """The same ranks with their Flight Recorders and native frames, if their job stands still.

        Args:
            may_write: Whether a rank may be made to write its Flight Recorder to a file.
            may_stop: Whether ranks may be stopped for a moment, to read native frames.
        """
        standing = [one.process for of_job in by_job(seen) if longest_idle_s(of_job) for one in of_job]
        answers = recorded(standing, self._pool, may_write=may_write)
        for note in answers.notes:
            self._say(note)
        native = self._native(standing) if may_stop else {}
        return [
            replace(one, recorded=answers.facts.get(one.process.pid), native=native.get(one.process.pid, ()))
            for one in seen
        ]

    def _native(self, ranks: Sequence[RankProcess]) -> dict[int, tuple[str, ...]]:
        read = [*self._pool.map(lambda one: self._reader.native(one.pid), ranks)]
        for one, (_, why) in zip(ranks, read, strict=True):
            if why:
                self._say(f"rank {one.rank}: {why}")
        return {one.pid: functions for one, (functions, _) in zip(ranks, read, strict=True)}

    def _look(self) -> None:
        self._objects_are_old = True
        for one, seen in zip(self._ranks, self._pool.map(self._look_at, self._ranks), strict=True):
            self._looks[one.pid].append(seen)

    def _look_at(self, one: RankProcess) -> Look:
        seen = look(one.pid, self._reader, time.monotonic(), started=self._started[one.pid])
        folder = folder_of(one.pid)
        threads = [
            replace(thread, frames=tuple(replace(frame, file=whole(frame.file, folder)) for frame in thread.frames))
            for thread in seen.threads
        ]
        return replace(seen, threads=tuple(threads))

    def _read_objects(self) -> None:
        if not self._objects_are_old:
            return
        self._objects_are_old = False
        standing = [one for of_job in self._jobs() for one in of_job if one.idle_s]
        stacks = (next((one.stack for one in reversed(rank.looks) if one.stack), ()) for rank in standing)
        pids = [one.process.pid for one in standing]
        for pid, read in zip(pids, self._pool.map(objects_of, pids, stacks), strict=True):
            # A rank that has ended since is reported with what was read before.
            if read is not None:
                self._objects[pid] = read

    def _objects_of(self, one: SeenRank) -> RankObjects:
        return self._objects.get(one.process.pid, RankObjects()) if one.idle_s else RankObjects()

    def _is_clear(self, of_job: Sequence[SeenRank]) -> bool:
        if shows_enough(of_job):
            return True
        all_stand_s = min(one.idle_s for one in of_job)
        return all_stand_s >= self._long_wait_s() and wait_in_vain(self._facts(of_job))

    def _long_wait_s(self) -> float:
        """How long a message between ranks may take: longer if processes wait for a core."""
        waited = self._held_up().cpu_waited or 0.0
        return min(LONG_WAIT_S / max(1.0 - waited, LONG_WAIT_S / LONG_STEP_S), LONG_STEP_S)

    def _held_up(self) -> PressureFacts:
        return pressure_between(self._pressure, look_at_pressure(self._groups), time.monotonic() - self._began_s)

    def _nobody_has_run(self) -> bool:
        """Whether, by the kernel, no rank has run for longer than a step takes, so that none can have moved."""
        return all((looks[-1].slept_s or 0.0) >= LONG_STEP_S for looks in self._looks.values())

    def _jobs(self) -> list[list[SeenRank]]:
        seen = [SeenRank(process=one, looks=tuple(self._looks[one.pid])) for one in self._ranks]
        return by_job(replace(one, objects=self._objects_of(one)) for one in seen)


def by_job(seen: Iterable[SeenRank]) -> list[list[SeenRank]]:
    """The ranks of each job."""
    jobs: dict[str, list[SeenRank]] = defaultdict(list)
    for one in seen:
        jobs[one.process.job].append(one)
    return [*jobs.values()]


def _gpu(one: RankProcess, ranks: Sequence[RankProcess]) -> GpuStateFacts | None:
    return gpu_state(one.local_rank, own_pids=[other.pid for other in ranks], environment=one.environment)


# Stacks of workers are read only if their rank waits for data, and only of a few, as all do the same.
_WORKERS_READ = 2
_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp", ".part", ".tmp")
_LOGS = ("tfevents", "metrics.csv", ".wandb")
_VERSIONS = {"torch": ("torch",), "lightning": ("lightning", "pytorch_lightning")}


def seen_rank(one: RankProcess, looks: tuple[Look, ...], reader: StackReader, ranks: Sequence[RankProcess]) -> SeenRank:
    """A rank with its surroundings.

    Args:
        reader: Reads stacks of its workers.
        ranks: All ranks of this host.
    """
    last = looks[-1].process if looks else None
    if last is not None and last.state == GONE:
        return SeenRank(process=one, looks=looks)
    # Lightning's launcher makes the other ranks children of the first one; these are not workers.
    others = [other.pid for other in ranks]
    children = or_none(lambda: psutil.Process(one.pid).children()) or []
    ended = [seen for child in children if child.pid not in others and (seen := look_at(child.pid)).state == "zombie"]
    workers = child_processes(besides=others, of=one.pid)
    loads = bool(looks) and LOADING.has_any(looks[-1].stack)
    from_storage(partial(remember_sources, one.pid, {frame.file for seen in looks for frame in seen.stack}), None)
    return SeenRank(
        process=one,
        looks=looks,
        workers=tuple(
            _worker(pid, reader if loads and number < _WORKERS_READ else None)
            for number, pid in enumerate(workers)
            if pid not in [seen.pid for seen in ended]
        ),
        ended=tuple(EndedProcess(pid=seen.pid, signal=seen.ended_by, exit_code=seen.exit_code) for seen in ended),
        storage=from_storage(lambda: tuple(_open_files(one.pid)), ()),
        name_servers=name_servers_asked(one.pid),
        awaited_processes=awaited_by(one.pid),
        awaited_file=awaited_file(one.pid),
        file_lock=from_storage(partial(awaited_lock, one.pid), None),
        host_facts=_host_facts(one.pid, looks),
        versions=from_storage(partial(_versions, looks), {}),
    )


def _worker(pid: int, reader: StackReader | None) -> ProcessFacts:
    seen = look_at(pid)
    if reader is None:
        return seen
    threads, _ = reader.read(pid)
    main = next((thread for thread in threads if thread.is_main), None)
    return replace(seen, stack=with_source(frames_of(main.frames))) if main is not None else seen


def _open_files(pid: int) -> Iterator[StorageFacts]:
    """Folders in which files are open for writing, with their owner according to the files' names."""
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
    known = [
        MemoryLook(at_s=one.at_s, rss_bytes=one.process.rss_bytes, swap_bytes=one.process.swap_bytes)
        for one in looks
        if one.process is not None and one.process.rss_bytes is not None
    ]
    facts = host_facts(pid)
    if not known:
        return facts
    first, last = known[0], known[-1]
    grows, swaps = growth_between(first, last)
    return replace(
        facts,
        rss_bytes=last.rss_bytes,
        process_swap_bytes=last.swap_bytes,
        memory_growth_bytes_per_s=grows,
        swap_growth_bytes_per_s=swaps,
    )


def _versions(looks: Sequence[Look]) -> dict[str, str]:
    """Versions by the metadata beside the packages that its frames are in."""
    files = {frame.file for seen in looks for frame in seen.stack if "-packages/" in frame.file}
    folders = {file[: file.index("-packages/") + len("-packages")] for file in files}
    found: dict[str, str] = {}
    for folder in folders:
        for name, installed in _VERSIONS.items():
            for path in (path for one in installed for path in Path(folder).glob(f"{one}-*.dist-info")):
                found.setdefault(name, path.name.removesuffix(".dist-info").rpartition("-")[2])
    return found
