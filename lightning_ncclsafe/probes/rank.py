"""All that one rank knows of itself and its neighbours, within a deadline."""

import math
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from lightning_ncclsafe._torch import build
from lightning_ncclsafe.code.side_thread import SideThread, UnansweredError
from lightning_ncclsafe.facts import (
    ExceptionFacts,
    HostFacts,
    LoggerFacts,
    MachineFacts,
    ProcessFacts,
    RankFacts,
    Straggler,
)
from lightning_ncclsafe.probes.gpu import gpu_state
from lightning_ncclsafe.probes.host.resources import GONE, HostProbe, child_processes, look_at, own_memory, signal_name
from lightning_ncclsafe.probes.machine_state import GpuWatch, MachineProbe
from lightning_ncclsafe.probes.network.links import taken_interface
from lightning_ncclsafe.probes.process import flight_recorder, lock_waits, stacks, traceback_signal
from lightning_ncclsafe.probes.process.caught import CaughtExceptions
from lightning_ncclsafe.probes.process.flight_recorder import FlightRecorder
from lightning_ncclsafe.probes.process.growth import ANSWERING, LEAST_S, Growth, guard_rests, needs_time, with_shares
from lightning_ncclsafe.probes.process.main_thread import look_at_main_thread
from lightning_ncclsafe.probes.process.traceback_signal import ENDED, Armed, LastWords
from lightning_ncclsafe.probes.trainer import model_units
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.probes.trainer.steps import StepRecord

# Asking a worker for its stack takes some milliseconds, one after the other; a few are enough to see what they do.
_WORKERS_ASKED = 4
# How often this process's memory is noted: reading it takes 0.1 ms.
_NOTE_S = 2.0
# The clocks of two looks are not read where the looks are.
_SLACK_S = 0.01
_NOT_ARMED = Armed(signum=0, fd=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a rank leaves with its peers, for the time when it cannot speak for itself.

    Attributes:
        rank: Global rank.
        host: Host name.
        pid: Process id.
        started: When the process was started, seconds since the epoch.
        signum: Signal that makes it write its traceback; 0 where it has none.
        fd: File descriptor, in that process, that it writes its traceback to.
        has_guard: Whether it has come to its Trainer, so that a guard would answer; one without has no card itself.
    """

    rank: int
    host: str
    pid: int
    started: float = 0.0
    signum: int = 0
    fd: int = -1
    has_guard: bool = True


def card_key(rank: int) -> str:
    """Where a rank leaves its card when it begins to watch."""
    return f"card/{rank}"


class RankProbe:
    """Sees this rank.

    Args:
        rank: Global rank.
        local_rank: Rank on this host.
        local_world_size: Number of ranks that were to be started on this host; 0 where unknown.
        tracker: What Lightning is doing.
        trainer: Where the Trainer stands.
        loggers: Asks the loggers of this process that are off the training thread.
        stragglers: Which ranks have kept others waiting before, as far as this rank knows.
        steps: What its training steps leave out; None where nobody notes that.
        caught: What its code has caught; None likewise.
        launched: The exit codes of ranks that this process has launched and waited for, by process id; negative for
            a signal.

    Attributes:
        card: What this rank leaves with its peers.
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
        self._launched = launched
        self._host = HostProbe()
        self._recorder = FlightRecorder()
        self._growth = Growth()
        self._machine = MachineProbe(interface=lambda: taken_interface(is_cuda=trainer.is_on_gpu()))
        self._gpu = GpuWatch(lambda: gpu_state(local_rank, own_pids=[card.pid for card in self.peers]))
        self._noted_s = -math.inf
        self._signal = traceback_signal.take_early()
        self._armed = self._signal.arm() or _NOT_ARMED
        self._slow_look = SideThread("ncclsafe-look")
        self._last_words = LastWords()
        self._peers: tuple[Card, ...] = ()
        self.exception: ExceptionFacts | None = None
        self.card = Card(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            signum=self._armed.signum,
            fd=self._armed.fd,
        )

    @property
    def finished(self) -> bool:
        """Whether the Trainer's function has returned on this rank."""
        return self._trainer.finished

    @finished.setter
    def finished(self, value: bool) -> None:
        self._trainer.finished = value

    @property
    def peers(self) -> tuple[Card, ...]:
        """The cards of the other ranks of this host, as far as they are known."""
        return self._peers

    @peers.setter
    def peers(self, cards: tuple[Card, ...]) -> None:
        self._peers = cards
        self._last_words.hold((card.pid, card.fd) for card in cards)

    def position(self) -> Hashable:
        """Where the training stands: it changes when a hook begins or ends, or a collective moves."""
        return self._tracker.transitions, flight_recorder.position()

    def close(self) -> None:
        """Gives back the signal, and what is held of others."""
        traceback_signal.leave(self._signal)
        self._last_words.close()
        self._machine.close()

    def glance(self, idle_s: float) -> RankFacts:
        """What can be had at once from memory: stack, actions, groups and collectives. Takes some milliseconds."""
        missing: list[str] = []
        groups, collectives = _try(self._recorder.read, ((), ()), "flight recorder", missing)
        unrecorded = self._recorder.unrecorded
        stack = stacks.main_thread_stack()
        return RankFacts(
            rank=self._rank,
            local_rank=self._local_rank,
            local_world_size=self._local_world_size,
            host=self.card.host,
            pid=self.card.pid,
            taken_ns=time.time_ns(),
            progress=self._trainer.progress(self._tracker.actions(), self._tracker.last_action, idle_s),
            stack=stack,
            thread_stack=stacks.calling_thread_stack(),
            groups=groups,
            unrecorded=unrecorded,
            collectives=collectives,
            # There, only whether the main thread computes or waits distinguishes the two.
            machine=self._machine.read(idle_s) if unrecorded or (stack and stack[-1].user) else MachineFacts(),
            stragglers=self._stragglers(),
            exception=self.exception,
            missing=tuple(missing),
        )

    def look(self, idle_s: float, *, deadline_s: float = 0.5) -> RankFacts:
        """All facts. What touches storage or other processes is given a deadline and left out where it misses it.

        Args:
            idle_s: Seconds since this rank last made progress.
            deadline_s: Seconds that the slow part may take.
        """
        facts = self.glance(idle_s)
        if self._trainer.is_on_gpu():
            self._gpu.begin()
        parts: dict[str, Any] = {}
        missing = list(facts.missing)
        located = _try(
            lambda: flight_recorder.with_call_sites(facts.collectives), facts.collectives, "call sites", missing
        )
        slow: dict[str, Callable[[], Any]] = {
            "stack": lambda: stacks.with_source(facts.stack),
            "thread_stack": lambda: stacks.with_source(facts.thread_stack),
            "collectives": lambda: flight_recorder.with_source(located),
            "units": lambda: model_units.read_units(self._trainer.model(), facts.collectives),
            "host_facts": self._host_facts,
            "peers": lambda: tuple(self.look_at_peer(card) for card in self.peers),
            "workers": self._workers,
            "loaders": self._trainer.loaders,
            "trainer": self._trainer.facts,
            "loggers": self._loggers,
            "steps": lambda: self._steps.facts(error=_text_of(facts.exception)) if self._steps else None,
            "failed_save": lambda: _sourced(self._steps.failed_save if self._steps else None),
            "caught": lambda: self._caught.facts(idle_s, besides=facts.exception) if self._caught else None,
            "file_lock": lock_waits.waited_for,
            "held_locks": lock_waits.held,
            "storage": self._trainer.storage,
            "versions": build.versions,
        }
        if facts.exception is not None:
            slow["exception"] = lambda: _sourced(facts.exception)
        # Not with the slow ones: a starved rank would miss the deadline just where this shows why.
        machine = _try(lambda: self._machine.read(idle_s), facts.machine, "machine", missing)
        ends_s = time.monotonic() + deadline_s
        self._run(slow, parts, missing, deadline_s)
        # A copy first: a probe that is late may yet answer, while this is read.
        done = dict(parts)
        late = [f"{name}: no answer within {deadline_s:g} s" for name in slow if name not in done]
        found = {"collectives": located} | {name: value for name, value in done.items() if value is not None}
        gpu = self._gpu.read(ends_s - time.monotonic())
        found["machine"] = replace(machine, gpu=gpu)
        return replace(facts, **found, missing=(*missing, *late))

    def note_machine(self) -> None:
        """Notes what this process and its host have been held up by, at most once a second; cheap."""
        self._machine.note()

    def note_memory(self) -> None:
        """Notes this process's memory, at most every 2 s, so that its growth is known; cheap."""
        if time.monotonic() - self._noted_s >= _NOTE_S:
            self._noted_s = time.monotonic()
            self._growth.measure(self.card.pid, *own_memory())

    def look_at_peer(self, card: Card) -> ProcessFacts:
        """A rank of this host as it is seen from outside, with its growth since it was looked at before.

        Of one whose process has ended, what it has written last.
        """
        seen = look_at(card.pid, rank=card.rank, started=card.started or None)
        if (raised := self._last_words.raised(card.pid)) is not None:
            seen = replace(seen, raised=replace(raised, stack=stacks.with_source(raised.stack)))
        if seen.state in ENDED:
            return self._ended(seen)
        grows, swaps = self._growth.measure(card.pid, seen.rss_bytes, seen.swap_bytes)
        return replace(seen, memory_growth_bytes_per_s=grows, swap_growth_bytes_per_s=swaps)

    def _ended(self, seen: ProcessFacts) -> ProcessFacts:
        """With how it has ended: by the kernel, by whoever has launched it and waited for it, or by its own word."""
        ended_by, stack, said, thread_stack = self._last_words.of(seen.pid)
        code = self._launched().get(seen.pid) if seen.state == GONE else None
        if code is not None:
            seen = replace(seen, ended_by=signal_name(-code) if code < 0 else "", exit_code=code if code >= 0 else None)
        ended_by = seen.ended_by or (ended_by if seen.exit_code is None else "")
        said = said if ended_by in ("", "SIGABRT") and seen.exit_code is None else ""
        own, others = stacks.with_source_in_time(stack), stacks.with_source_in_time(thread_stack)
        return replace(seen, ended_by=ended_by, stack=own, thread_stack=others, said=said)

    def witness(self, silent: Iterable[Card]) -> list[ProcessFacts]:
        """What can be seen from outside of ranks of this host that do not answer, with their stacks where they run.

        Takes 0.5 s where their growth is not known yet, or they run, and 0.15 s for each that does not give its stack.
        """
        cards, began_s = list(silent), time.monotonic()
        turns = [look_at_main_thread(card.pid) for card in cards]
        seen = [self._witness(card) for card in cards]
        unknown = [facts for facts in seen if facts.rss_bytes is not None and needs_time(facts)]
        if unknown:
            time.sleep(LEAST_S + _SLACK_S)  # since the last of them was seen: on a busy host that takes its time
        again = [
            self.look_at_peer(card) if facts in unknown else facts for card, facts in zip(cards, seen, strict=True)
        ]
        span_s = time.monotonic() - began_s
        return [
            with_shares(replace(now, stack=then.stack or now.stack, gil_held=then.gil_held), turn, span_s)
            for now, then, turn in zip(again, seen, turns, strict=True)
        ]

    def _witness(self, card: Card) -> ProcessFacts:
        seen = self.look_at_peer(card)
        armed = Armed(signum=card.signum, fd=card.fd)
        if not card.has_guard:
            armed = traceback_signal.armed_in(card.pid) or _NOT_ARMED
        if seen.state not in ANSWERING or armed.signum == 0:
            return seen
        threads = traceback_signal.ask_threads(card.pid, armed)
        # It wrote from C and is busy, yet its Python threads did not answer: what it is busy with keeps the GIL. So
        # does what sleeps, if the guard's thread is not in something of its own.
        again = self.look_at_peer(card)
        is_busy = again.state == "running" or (again.cpu_s or 0) > (seen.cpu_s or 0)
        stack = threads[0] if threads else ()
        gil_held = bool(stack) and (is_busy or guard_rests(threads)) and card.has_guard
        return replace(again, stack=stacks.with_source_in_time(stack), gil_held=gil_held)

    def _host_facts(self) -> HostFacts:
        found = self._host.read()
        grows, swaps = self._growth.measure(self.card.pid, found.rss_bytes, found.process_swap_bytes)
        return replace(found, memory_growth_bytes_per_s=grows, swap_growth_bytes_per_s=swaps)

    def _workers(self) -> tuple[ProcessFacts, ...]:
        pids = child_processes(besides=[card.pid for card in self.peers])
        return tuple(self._worker(pid, index < _WORKERS_ASKED) for index, pid in enumerate(pids))

    def _worker(self, pid: int, ask: bool) -> ProcessFacts:
        seen = look_at(pid)
        if not ask or not self._armed.signum:
            return seen
        stack = traceback_signal.ask(pid, self._armed, owner=self.card.pid)
        return replace(seen, stack=stacks.with_source(stack))

    def _run(
        self, probes: dict[str, Callable[[], Any]], parts: dict[str, Any], missing: list[str], deadline_s: float
    ) -> None:
        def run() -> None:
            for name, probe in probes.items():
                parts[name] = _try(probe, None, name, missing)

        # A probe may hang, say on a dead mount.
        with suppress(UnansweredError):
            self._slow_look.call(run, deadline_s)


def _text_of(error: ExceptionFacts | None) -> str:
    return error.message if error is not None else ""


def _sourced(error: ExceptionFacts | None) -> ExceptionFacts | None:
    return replace(error, stack=stacks.with_source(error.stack)) if error is not None else None


def _try(probe: Callable[[], Any], default: Any, name: str, missing: list[str]) -> Any:
    try:
        return probe()
    except Exception as error:  # a fact that cannot be had is reported as missing, and nothing more
        missing.append(f"{name}: {type(error).__name__}: {error}")
        return default
