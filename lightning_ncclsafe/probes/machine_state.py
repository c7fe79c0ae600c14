"""What besides its code delayed this rank in the last seconds: recorded at the guard's pace, read at an incident."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.code.side_thread import SideThread
from lightning_ncclsafe.facts import (
    InterfaceFacts,
    MachineFacts,
    MainThreadFacts,
)
from lightning_ncclsafe.probes.absent import grown, or_none
from lightning_ncclsafe.probes.host.capacity import shared_memory
from lightning_ncclsafe.probes.host.cgroups import ControlGroups
from lightning_ncclsafe.probes.host.swap import PressureLook, look_at_pressure, pressure_between
from lightning_ncclsafe.probes.network import name_servers_asked
from lightning_ncclsafe.probes.process.ended_children import ChildWatch
from lightning_ncclsafe.probes.process.environment import settings_seen
from lightning_ncclsafe.probes.process.garbage import GarbageWatch
from lightning_ncclsafe.probes.process.main_thread import ThreadLook, look_at_main_thread
from lightning_ncclsafe.probes.process.stacks import training_thread_number

# How often to look; a look takes some 0.3 ms.
_EVERY_S = 1.0
# The period that is counted: the rank's stall, within these limits.
_LEAST_S, _MOST_S = 1.5, 20.0
_SHORTEST_S = 0.5
_LOOKS = 24


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    thread: ThreadLook
    pressure: PressureLook


class MachineProbe:
    """Watches this process and its host. May be read from any thread.

    Args:
        interface: Finds the interface towards other hosts; called once, on its own thread, as it may take long.
    """

    def __init__(
        self,
        *,
        interface: Callable[[], InterfaceFacts | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._groups = ControlGroups()
        self._find_interface = interface
        self._interface = SideThread("ncclsafe-interface")
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._next_s = -math.inf
        self._garbage = GarbageWatch()
        self._children = ChildWatch()

    def close(self) -> None:
        """Stops watching; only a thread that resolves the host's name may be left."""
        self._garbage.close()
        self._children.close()

    def note(self) -> None:
        """Looks, at most once a second; cheap enough for every tick of the guard."""
        if self._next_s == -math.inf:
            self._garbage.start()
            # Now, as the interface may be down when it is needed. Resolving the host's name takes time.
            self._interface.begin(self._find_interface)
        self._children.note()
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + _EVERY_S
            self._looks.append(self._look())

    def read(self, idle_s: float = _MOST_S) -> MachineFacts:
        """All but the GPU; takes about a millisecond, and waits for nothing.

        Args:
            idle_s: Seconds since this rank last made progress: only this period counts.
        """
        now, looks = self._look(), [*self._looks]
        span_s = min(max(idle_s, _LEAST_S), _MOST_S)
        recent = [look for look in looks if _SHORTEST_S <= now.at_s - look.at_s <= span_s]
        shm_total_bytes, shm_free_bytes = shared_memory()
        return MachineFacts(
            main_thread=main_thread_over([(look.at_s, look.thread) for look in (*recent, now)]) if recent else None,
            pressure=pressure_between(recent[0].pressure, now.pressure, now.at_s - recent[0].at_s) if recent else None,
            garbage=self._garbage.read(),
            ended=self._children.read(idle_s),
            done=self._children.done(),
            shm_total_bytes=shm_total_bytes,
            shm_free_bytes=shm_free_bytes,
            interface=or_none(lambda: self._interface.answer(0.0)),
            name_servers=name_servers_asked(),
            settings=settings_seen(),
        )

    def _look(self) -> _Look:
        now = look_at_main_thread(thread=training_thread_number())
        return _Look(self._clock(), now, look_at_pressure(self._groups))


def main_thread_over(looks: Sequence[tuple[float, ThreadLook]]) -> MainThreadFacts:
    """Summarises one or more looks at a main thread, each with its time in seconds; the oldest first."""
    (began_s, before), (ends_s, now) = looks[0], looks[-1]
    return MainThreadFacts(
        over_s=round(ends_s - began_s, 1),
        state=now.state,
        wait_channel=now.wait_channel,
        looks=len(looks),
        blocked_looks=sum(look.is_blocked for _, look in looks),
        running_looks=sum(look.is_running for _, look in looks),
        ran_s=grown(now.ran_s, before.ran_s),
        queued_s=grown(now.queued_s, before.queued_s),
        preempted=grown(now.preempted, before.preempted),
        major_faults=grown(now.major_faults, before.major_faults),
    )
