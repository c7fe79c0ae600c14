"""All that one rank knows about itself and the other ranks of its host, within a deadline."""

import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from lightning_ncclsafe._torch import build
from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.code.this_host import host_name
from lightning_ncclsafe.facts import (
    ENDED,
    ExceptionFacts,
    Frame,
    HostFacts,
    LoggerFacts,
    MachineFacts,
    ProcessFacts,
    RankFacts,
    Straggler,
)
from lightning_ncclsafe.probes.gpu import GpuWatch, gpu_state
from lightning_ncclsafe.probes.host.resources import HostProbe, child_processes, look_at, own_memory
from lightning_ncclsafe.probes.machine_state import MachineProbe
from lightning_ncclsafe.probes.network import taken_interface
from lightning_ncclsafe.probes.peers import Peers
from lightning_ncclsafe.probes.process import (
    breakpoints,
    child_crashes,
    flight_recorder,
    lock_waits,
    outside_waits,
    polled_path,
    stacks,
    thread_waits,
    traceback_signal,
)
from lightning_ncclsafe.probes.process.asleep import SleepWatch
from lightning_ncclsafe.probes.process.caught import CaughtExceptions
from lightning_ncclsafe.probes.process.flight_recorder import FlightRecorder
from lightning_ncclsafe.probes.process.growth import MemoryGrowth
from lightning_ncclsafe.probes.process.last_seen import LastSeenFile
from lightning_ncclsafe.probes.process.main_thread import (
    thread_ran_s,
)
from lightning_ncclsafe.probes.process.stack_samples import StackSamples, is_in_loop, outside_common_loop
from lightning_ncclsafe.probes.rank_info import RankInfo
from lightning_ncclsafe.probes.source.exit_calls import exit_calls
from lightning_ncclsafe.probes.trainer import model_units
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.probes.trainer.steps import StepRecord

# Asking a worker for its stack takes some milliseconds, one after another; a few are enough to see what they do.
_WORKERS_ASKED = 4
# How often one that runs in a loop is asked again.
_ASKED_AGAIN = 2
# After how many seconds without progress its stack is sampled: one sample takes half a millisecond.
_SAMPLED_AFTER_S = 1.0
# How often this process's memory is noted: reading it takes 0.1 ms.
_NOTE_S = 2.0
# What hangs in a call of the system does not run at all; on a host that is starved, everything runs a little.
_RUNS_S = 0.01
# Lines that are searched for in the user's source, and the facts that have them: a search that fails, or takes long,
# loses nothing else.
_SEARCHED = {
    "ended_at": "trainer",
    "validates_at": "trainer",
    "set_at": "trainer",
    "timeouts_at": "steps",
    "new_groups_at": "steps",
    "unordered_groups_at": "steps",
    "left_open_at": "file_lock",
}
# What is read one after the other belongs together only if the rank has not continued meanwhile: otherwise its stack
# shows a call that its recorder does not have. A rank that is at work continues again and again.
_MOST_READS = 3
# The longest look, on a host that is starved: less than the patience of the rank that gathers the facts.
_LONGEST_LOOK_S = 2.0


class RankProbe:
    """Collects the facts of this rank.

    Args:
        rank: Global rank.
        local_rank: Rank on this host.
        local_world_size: Number of ranks planned for this host; 0 if unknown.
        tracker: The actions of Lightning.
        trainer: The state of the Trainer.
        loggers: Gives the facts of the loggers of this process that are off the training thread.
        stragglers: Gives the ranks that have kept others waiting, as known on this rank.
        steps: What the training steps of this rank skip; None if that is not recorded.
        caught: The exceptions that the user's code has caught; None if that is not recorded.
        launched: The exit codes of ranks that this process has launched and waited for, by process id; negative for
            a signal.

    Attributes:
        info: What this rank publishes about itself.
        peers: The other ranks of this host, as this one sees them.
        exception: The exception that this rank raised, if any.
    """

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        local_world_size: int = 0,
        tracker: ActionTracker,
        trainer: TrainerProbe,
        loggers: Callable[[], tuple[LoggerFacts, ...]] = tuple,
        stragglers: Callable[[], tuple[Straggler, ...]] = tuple,
        steps: StepRecord | None = None,
        caught: CaughtExceptions | None = None,
        launched: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._rank = rank
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._tracker = tracker
        self._trainer = trainer
        self._loggers = loggers
        self._stragglers = stragglers
        self._steps = steps
        self._caught = caught
        self._host = HostProbe()
        self._recorder = FlightRecorder()
        self._growth = MemoryGrowth()
        self._sleep = SleepWatch()
        self._machine = MachineProbe(interface=lambda: taken_interface(is_cuda=trainer.is_on_gpu()))
        self._gpu = GpuWatch(lambda: gpu_state(local_rank, own_pids=[peer.pid for peer in self.peers.known]))
        self._noted_s = -math.inf
        self._signal = traceback_signal.take_early()
        self._armed = self._signal.arm()
        self._slow_look = SideThread("ncclsafe-look")
        self._last_seen = LastSeenFile()
        self._samples = StackSamples()
        self.peers = Peers(growth=self._growth, launched=launched)
        self.exception: ExceptionFacts | None = None
        self.info = RankInfo(
            rank=rank,
            host=host_name(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
        )

    @property
    def finished(self) -> bool:
        """Whether the Trainer's function has returned on this rank."""
        return self._trainer.finished

    @finished.setter
    def finished(self, value: bool) -> None:
        self._trainer.finished = value

    def position(self) -> Hashable:
        """A value that changes whenever a hook begins or ends, or a collective makes progress."""
        return self._tracker.transitions, flight_recorder.position()

    def close(self) -> None:
        """Restores the signal, and closes what is open of other processes."""
        traceback_signal.leave(self._signal)
        self.peers.close()
        self._last_seen.close()
        self._machine.close()

    def snapshot(self, idle_s: float) -> RankFacts:
        """The facts that are in memory: stack, actions, groups and collectives. Takes some milliseconds."""
        for _ in range(_MOST_READS):
            missing: list[str] = []
            before = _try(self.position, None, "", [])
            groups, collectives = _try(self._recorder.read, ((), ()), "flight recorder", missing)
            stack = self._samples.usual(stacks.main_thread_stack(), before)
            progress = self._trainer.progress(self._tracker.actions(), self._tracker.last_action, idle_s)
            if _try(self.position, None, "", []) == before:
                break
        unrecorded = self._recorder.unrecorded
        return RankFacts(
            rank=self._rank,
            local_rank=self._local_rank,
            local_world_size=self._local_world_size,
            host=self.info.host,
            pid=self.info.pid,
            taken_ns=time.time_ns(),
            progress=progress,
            stack=stack,
            thread_stack=stacks.calling_thread_stack(),
            groups=groups,
            unrecorded=unrecorded,
            collectives=collectives,
            # In these cases, whether the main thread computes or waits is the only explanation of missing progress.
            machine=self._machine.read(idle_s) if unrecorded or (stack and stack[-1].user) else MachineFacts(),
            stragglers=self._stragglers(),
            exception=self.exception,
            missing=tuple(missing),
        )

    def look(self, idle_s: float, *, deadline_s: float = 0.5) -> RankFacts:
        """All facts. Those that need storage or other processes have a deadline, and are left out if they miss it.

        On a starved host, all are slow although nothing hangs: as long as some arrive, or are being worked on, it waits
        for the others, up to 2 s in all.

        Args:
            idle_s: Seconds since this rank last made progress.
            deadline_s: Seconds within which the next of the slow facts has to arrive.
        """
        facts = self.snapshot(idle_s)
        if self._trainer.is_on_gpu():
            self._gpu.begin()
        parts: dict[str, Any] = {}
        missing = list(facts.missing)
        located = _try(
            lambda: flight_recorder.with_call_sites(facts.collectives), facts.collectives, "call sites", missing
        )
        error = facts.exception.message if facts.exception is not None else ""
        # Not among the slow probes: a starved rank would miss the deadline, and this shows that it is starved.
        machine = _try(lambda: self._machine.read(idle_s), facts.machine, "machine", missing)
        asleep_s = _try(self._own_asleep_s, None, "sleep", missing)
        # First the facts that decide between causes; last those that take longest.
        slow: dict[str, Callable[[], Any]] = {
            "trainer": self._trainer.facts,
            "steps": lambda: self._steps.facts(error=error) if self._steps else None,
            "caught": lambda: self._caught.facts(idle_s, besides=facts.exception) if self._caught else None,
            "failed_save": lambda: _sourced(self._steps.failed_save if self._steps else None),
            **({"exception": lambda: _sourced(facts.exception)} if facts.exception is not None else {}),
            "stack": lambda: stacks.with_source(
                _try(lambda: self._samples.outside_loop(facts.stack, self.position), facts.stack, "loop", missing)
            ),
            "breakpoint_at": lambda: breakpoints.breakpoint_before(facts.stack),
            "thread_stack": lambda: stacks.with_source(facts.thread_stack),
            "collectives": lambda: flight_recorder.with_source(located),
            "units": lambda: model_units.read_units(self._trainer.model(), facts.collectives),
            "loaders": self._trainer.loaders,
            "loggers": self._loggers,
            "thread_lock": thread_waits.awaited_thread_lock,
            "awaited_thread": thread_waits.awaited_thread,
            "peers": self.peers.look,
            "host_facts": self._host_facts,
            "file_lock": lock_waits.waited_for,
            "held_locks": lock_waits.held,
            "awaited_file": outside_waits.awaited_file,
            "reads_alone": outside_waits.reads_alone,
            "awaited_processes": outside_waits.waited_for,
            "workers": self._workers,
            "storage": self._trainer.storage,
            "versions": build.versions,
            # On a starved host, reading the user's files takes longer than all the others.
            "ended_at": lambda: self._trainer.ended_at(parts.get("trainer")),
            "validates_at": self._trainer.validates_at,
            "set_at": self._trainer.set_at,
            "timeouts_at": lambda: self._steps.timeouts_at() if self._steps else None,
            "new_groups_at": lambda: self._steps.new_groups_at() if self._steps else None,
            "data_ends_at": self._trainer.data_ends_at,
            "exit_calls": lambda: exit_calls() if _has_ended(machine, parts.get("peers"), error) else None,
            "own_path_at": polled_path.own_path_at,
            "left_open_at": lock_waits.transaction_left_open,
            "unordered_groups_at": lambda: self._steps.unordered_groups_at() if self._steps else None,
        }
        ends_s = time.monotonic() + deadline_s
        self._run(slow, parts, missing, deadline_s)
        # A copy first: a late probe may still answer while this is read.
        done = dict(parts)
        late = [f"{name}: no answer in time" for name in slow if name not in done]
        found = {"collectives": located} | {name: value for name, value in done.items() if value is not None}
        for lines, owner in _SEARCHED.items():
            given = found.pop(lines, None)
            if given and owner in found:
                found[owner] = replace(found[owner], **{lines: given})
        gpu = self._gpu.read(ends_s - time.monotonic())
        found["machine"] = replace(machine, asleep_s=asleep_s, gpu=gpu)
        return replace(facts, **found, missing=(*missing, *late))

    def waits_for_own_lock(self) -> bool:
        """Whether the main thread waits for a file lock that this process itself holds; takes about a millisecond."""
        lock = lock_waits.waited_for()
        return lock is not None and any(holder.pid == self.info.pid for holder in lock.holders)

    def asleep_s(self) -> float | None:
        """For how many seconds all threads of this process and of its children have been asleep; see `SleepWatch`."""
        slept_s = self._own_asleep_s()
        for pid in self._children() if slept_s is not None else ():
            child_s = self._sleep.asleep_s(pid)
            slept_s = min(slept_s, child_s) if slept_s is not None and child_s is not None else None
        return slept_s

    def _own_asleep_s(self) -> float | None:
        return self._sleep.asleep_s(self.info.pid)

    def _children(self) -> list[int]:
        return child_processes(besides=[peer.pid for peer in self.peers.known])

    def note_machine(self) -> None:
        """Records what delays this process and its host, at most once a second; cheap."""
        self._machine.note()

    def note_place(self, idle_s: float) -> None:
        """Records where this rank is, for peers that find its process gone, and for its next look; cheap.

        Args:
            idle_s: Seconds since this rank last made progress.
        """
        with suppress(Exception):  # the Trainer may be changing at this moment
            progress = self._trainer.progress(self._tracker.actions(), self._tracker.last_action, idle_s)
            self._last_seen.note(progress)
            if idle_s >= _SAMPLED_AFTER_S:
                self._samples.note(self.position())

    def forget_place(self) -> None:
        """Called when the place is no longer recorded: an old one would mislead."""
        self._last_seen.close()

    def note_memory(self) -> None:
        """Records this process's memory, at most every 2 s, so that its growth is known; cheap."""
        if time.monotonic() - self._noted_s >= _NOTE_S:
            self._noted_s = time.monotonic()
            self._growth.measure(self.info.pid, *own_memory())

    def _host_facts(self) -> HostFacts:
        found = self._host.read()
        grows, swaps = self._growth.measure(self.info.pid, found.rss_bytes, found.process_swap_bytes)
        return replace(found, memory_growth_bytes_per_s=grows, swap_growth_bytes_per_s=swaps)

    def _workers(self) -> tuple[ProcessFacts, ...]:
        workers = [replace(look_at(pid), asleep_s=self._sleep.asleep_s(pid)) for pid in self._children()]
        for index, seen in enumerate(workers[:_WORKERS_ASKED]):
            if self._armed is not None:
                stack = self._stack_of_worker(seen, self._armed)
                self._sleep.note_disturbed(seen.pid)
                raised = child_crashes.raised_in(seen.pid)
                workers[index] = replace(seen, stack=stacks.with_source(stack), raised=raised)
        return tuple(workers)

    def _stack_of_worker(self, seen: ProcessFacts, armed: traceback_signal.Armed) -> tuple[Frame, ...]:
        """Its stack; where a loop runs, it is asked again, as the line at which it was says little."""
        asked = [traceback_signal.ask(seen.pid, armed, owner=self.info.pid)]
        if seen.state == "running" and is_in_loop(asked[0]):
            while len(asked) <= _ASKED_AGAIN and asked[-1]:
                asked.append(traceback_signal.ask(seen.pid, armed, owner=self.info.pid))
        return outside_common_loop([stack for stack in asked if stack])

    def _run(
        self, probes: dict[str, Callable[[], Any]], parts: dict[str, Any], missing: list[str], deadline_s: float
    ) -> None:
        at_work: list[int] = []

        def run() -> None:
            at_work.append(threading.get_native_id())
            for name, probe in probes.items():
                parts[name] = _try(probe, None, name, missing)

        if self._slow_look.is_busy:
            return  # a probe hangs, on a dead mount for instance
        self._slow_look.begin(run)
        ends_s, answered, ran_s, goes_on = time.monotonic() + _LONGEST_LOOK_S, 0, 0.0, True
        while goes_on and time.monotonic() < ends_s:
            with suppress(UnansweredError):
                self._slow_look.answer(deadline_s)
                return
            before, ran_before_s = answered, ran_s
            answered, ran_s = len(parts), thread_ran_s(at_work[0]) if at_work else 0.0
            # A thread that has not begun yet waits for a core.
            goes_on = not at_work or answered > before or ran_s >= ran_before_s + _RUNS_S


def _has_ended(machine: MachineFacts, peers: Iterable[ProcessFacts] | None, error: str) -> bool:
    """Whether a child or a peer has ended; a loader reports also a worker that has exited with status 0."""
    return bool(machine.ended) or any(peer.state in ENDED for peer in peers or ()) or "exited unexpectedly" in error


def _sourced(error: ExceptionFacts | None) -> ExceptionFacts | None:
    return replace(error, stack=stacks.with_source(error.stack)) if error is not None else None


def _try(probe: Callable[[], Any], default: Any, name: str, missing: list[str]) -> Any:
    try:
        return probe()
    except Exception as error:  # a fact that cannot be had is reported as missing, and nothing more
        missing.append(f"{name}: {type(error).__name__}: {error}")
        return default
