"""Ranks that are looked at together, again and again, until it shows whether one of them hangs."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_ncclsafe.facts import GpuStateFacts
from lightning_ncclsafe.inspecting.facts_of_looks import SeenRank, ends_in, job_facts, longest_idle_s, shows_enough
from lightning_ncclsafe.inspecting.from_memory import from_memory
from lightning_ncclsafe.inspecting.joining import LONG_STEP_S, LONG_WAIT_S, diagnosis_of, wait_apart
from lightning_ncclsafe.inspecting.looks import Look, SeenThread, StackReader, look, started_at
from lightning_ncclsafe.inspecting.ranks import RankProcess
from lightning_ncclsafe.inspecting.recorders import recorded
from lightning_ncclsafe.inspecting.sources import folder_of, whole
from lightning_ncclsafe.inspecting.surroundings import seen_rank
from lightning_ncclsafe.probes.gpu import gpu_state
from lightning_ncclsafe.probes.host.cgroups import ControlGroups
from lightning_ncclsafe.probes.host.swap import look_at_pressure, pressure_between
from lightning_ncclsafe.probes.machine_state import GpuWatch

_ON_EVERY_S = 2.0
_GPU_S = 0.5


class LookedAt:
    """Ranks that are looked at together, again and again, and what their host holds up meanwhile.

    Args:
        ranks: The ranks.
        reader: Reads their stacks.
        pool: Where several are looked at at once.
        say: Is given what is to be said before the answer, a line each.
        are_all: Whether these are all ranks of this host for which there is a process.
    """

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
        self._started = {one.pid: started_at(one.pid) for one in ranks}

    def look_on(self, count: int, over_s: float, *, may_be_fewer: bool = False) -> None:
        """So many times within so many seconds; twice is enough where no rank has run for longer than a step takes."""
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
        """The ranks as they were seen, with what needs to be asked once."""
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
                lambda one: seen_rank(one, tuple(self._looks[one.pid]), self._reader, self._ranks), self._ranks
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
        for one, seen in zip(self._ranks, self._pool.map(self._look_at, self._ranks), strict=True):
            self._looks[one.pid].append(seen)

    def _look_at(self, one: RankProcess) -> Look:
        seen = look(one.pid, self._reader, time.monotonic(), started=self._started[one.pid])
        folder = folder_of(one.pid)
        return replace(seen, threads=tuple(_with_folder(thread, folder) for thread in seen.threads))

    def _read_objects(self) -> None:
        standing = [one for of_job in self._jobs() for one in of_job if longest_idle_s([one])]
        for one, read in zip(standing, self._pool.map(from_memory, standing), strict=True):
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
        return all_stand_s >= self._long_wait_s() and wait_apart(job_facts(of_job, are_all=self._are_all))

    def _long_wait_s(self) -> float:
        """How long what is on its way between ranks may take: longer where processes have to wait for a core."""
        held_up = pressure_between(self._pressure, look_at_pressure(self._groups), time.monotonic() - self._began_s)
        return min(LONG_WAIT_S / max(1.0 - (held_up.cpu_waited or 0.0), LONG_WAIT_S / LONG_STEP_S), LONG_STEP_S)

    def _nobody_has_run(self) -> bool:
        """Whether the kernel has it that no rank has run for longer than a step takes: then none can have moved."""
        return all((looks[-1].slept_s or 0.0) >= LONG_STEP_S for looks in self._looks.values())

    def _jobs(self) -> list[list[SeenRank]]:
        jobs: dict[str, list[SeenRank]] = defaultdict(list)
        for one in self._ranks:
            seen = SeenRank(process=one, looks=tuple(self._looks[one.pid]))
            jobs[one.job].append(replace(seen, **self._objects_of(seen)))
        return [*jobs.values()]


def _with_folder(thread: SeenThread, folder: str) -> SeenThread:
    return replace(thread, frames=tuple(replace(frame, file=whole(frame.file, folder)) for frame in thread.frames))


def _gpu(one: RankProcess, ranks: Sequence[RankProcess]) -> GpuStateFacts | None:
    return gpu_state(one.local_rank, own_pids=[other.pid for other in ranks], environment=one.environment)
