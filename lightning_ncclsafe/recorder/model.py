"""The model of PyTorch's Flight Recorder: what raw entries and counters of one rank mean, here or in a dump.

An entry's state cannot be taken literally. A collective also looks ``completed`` while the host still blocks inside its
call. NCCL's watchdog also marks a work that it has given up as ``retired``. A batch of sends and receives leaves parts
that never end, and a whole that is not a collective. A group's counters are those of the last work of either kind. All
readers of a recorder use this module.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

Entry = Mapping[Any, Any]
_Entry = TypeVar("_Entry", bound=Entry)

MOST_ENTRIES = 20_000
"""How many entries are read of a larger recorder or dump: the newest."""
HOOK = "c10d"
"""Recorded as back end by a ``FlightRecorderHook`` (torch 2.14), which sees calls, but not when they end."""
# NCCL's watchdog retires what has ended within some 0.1 s.
_RETIRED_WITHIN_NS = 2_000_000_000
_LARGEST = 2**63
# Back ends whose recorder is known; "retired" means something else for each.
_KNOWN = ("nccl", "gloo", "fake", HOOK)


class State(str, Enum):
    """How far a work has got."""

    LAUNCHING = "launching"
    """The host is inside the call, before the device gets it. The first call of a communicator may block there."""
    WAITING = "waiting"
    """Called; nothing shows that the device has started it."""
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """It has ended or is being launched; nothing shows which."""


class WorkKind(str, Enum):
    """What a work is."""

    COLLECTIVE = "collective"
    P2P = "point-to-point"
    BATCH = "batch"
    """Sends and receives that start and end together."""


@dataclass(slots=True)
class Work(Generic[_Entry]):
    """One work of a rank; coalesced calls are one work.

    Attributes:
        entry: Its entry; the last part for a batch whose whole is missing.
        number: The process's own number of its group (``pg_id``), which may mean another group on another rank.
        group: Name of its group.
        kind: What it is.
        seq: Its number in its sequence, of collectives or of sends and receives.
        state: How far it has got.
        gave_up: Whether the watchdog has given it up; the counters then include it as completed, although it is not.
        parts: The sends and receives of a batch, oldest first.
    """

    entry: _Entry
    number: str
    group: str
    kind: WorkKind
    seq: int
    state: State = State.UNKNOWN
    gave_up: bool = False
    parts: tuple[_Entry, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it is not known to have ended."""
        return self.state is not State.ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """A rank's position in the collectives of a group.

    Attributes:
        called: The last number that the rank has called.
        started: The last number that has started on the device; -1 if not recorded.
        completed: The last number that has ended.
        is_mixed: Whether the group has sends and receives, which its counters include.
    """

    called: int
    started: int = -1
    completed: int
    is_mixed: bool = False


def whole(value: object, default: int = 0) -> int:
    """A whole number of 64 bits, which may be written as text; otherwise the default."""
    if isinstance(value, str) and len(value) < 20:
        try:
            value = int(value)
        except ValueError:
            return default
    if type(value) is not int or not -_LARGEST <= value < _LARGEST:
        return default
    return value


def seq_of(entry: Entry) -> int:
    """An entry's number in its sequence; before torch 2.5, there was one sequence for all."""
    key = "p2p_seq_id" if entry.get("is_p2p") is True else "collective_seq_id"
    return max(whole(entry.get(key, entry.get("seq_id"))), 0)


def group_of(entry: Entry) -> tuple[str, str]:
    """Name and description of an entry's group; before torch 2.4, entries have only the name."""
    group = entry.get("process_group")
    if isinstance(group, str):
        return group, ""
    if isinstance(group, (list, tuple)):
        name, about = (*group[:2], "", "")[:2]
        return name if isinstance(name, str) else "", about if isinstance(about, str) else ""
    return "", ""


def number_of(entry: Entry) -> str:
    """The process's own number of an entry's group, or the group's name if it has no number."""
    number = whole(entry.get("pg_id"), -1)
    return str(number) if number >= 0 else group_of(entry)[0] or "-1"


def backend_of(entry: Entry) -> tuple[str, str]:
    """Back end, empty if not recorded, and operation: ``("nccl", "all_reduce")``."""
    name = entry.get("profiling_name")
    backend, mark, op = name.partition(":") if isinstance(name, str) else ("", "", "")
    return (backend, op) if mark else ("", backend)


def is_known(backend: str) -> bool:
    """Whether it is known how this back end records the end of a work."""
    return not backend or backend.startswith(_KNOWN)


def recorded_once(entries: list[_Entry]) -> list[_Entry]:
    """The entries, without those of a hook on a group whose back end records the calls itself."""
    hooked = {entry.get("pg_id") for entry in entries if backend_of(entry)[0] == HOOK}
    if not hooked:
        return entries
    native = {entry.get("pg_id") for entry in entries if backend_of(entry)[0] != HOOK}
    return [entry for entry in entries if entry.get("pg_id") not in native or backend_of(entry)[0] != HOOK]


class Recorder(Generic[_Entry]):
    """The recorder of one rank.

    Attributes:
        works: All works, oldest first.
        positions: The rank's position in each group, by the process's own number of the group.
        names: Name and description of groups by that number, if an entry has them.
        is_idle: Whether nothing is outstanding, by entries and counters; False if nothing was recorded.
        only_open: Whether this dump seems to leave out entries that have ended.
        is_moving: Whether something has just ended: NCCL's watchdog, which retires works at once, has not retired it.
        has_lost: Whether, by the counters, works that have not ended are missing: the ring has overwritten them.
    """

    def __init__(self, entries: list[_Entry], status: Mapping[str, Entry], now_ns: int = 0) -> None:
        """Takes the entries, oldest first, counters (``pg_status``), and the time at which both were read; 0: unknown.

        A full dump contains works that have ended, unless there are none; a dump of open entries contains none.
        """
        entries = recorded_once(entries)
        self.only_open = not any(_says_ended(entry) for entry in entries)
        self.names: dict[str, tuple[str, str]] = {}
        self._now_ns = now_ns
        self._mixed: set[str] = set()
        self._newest: dict[str, int] = {}
        self._status = status
        self.works = self._wholes(entries)
        by_group: dict[str, list[Work[_Entry]]] = defaultdict(list)
        for work in self.works:
            by_group[work.number].append(work)
        for works in by_group.values():
            self._judge(works)
        self.positions = {number: self._position(number, by_group.get(number, [])) for number in {**status, **by_group}}
        uneven = any(one.called > one.completed for one in self.positions.values())
        self.is_idle = bool(self.positions) and not uneven and not any(work.is_open for work in self.works)
        self.is_moving = any(map(_has_just_ended, by_group.values()))
        self.has_lost = any(self._has_lost(number, works) for number, works in by_group.items())

    def _wholes(self, entries: Sequence[_Entry]) -> list[Work[_Entry]]:
        """The works of entries; the parts of a coalesced call become one work."""
        works: list[Work[_Entry]] = []
        # For each group, the indices of sends and receives that may be parts of a batch.
        loose: dict[str, list[int]] = defaultdict(list)
        wholes: set[tuple[WorkKind, str, int]] = set()
        left_out: set[int] = set()
        for entry in entries:
            number = number_of(entry)
            names = self.names.get(number)
            is_first = names is None
            if names is None:
                names = self.names[number] = group_of(entry)
            seq = seq_of(entry)
            is_p2p = entry.get("is_p2p") is True
            thread = entry.get("thread_id")
            self._newest[thread if isinstance(thread, str) else ""] = len(works)
            if _is_whole(entry):
                parts = _parts_of(entry, works, loose.pop(number, []))
                # Where a group's entries begin with a batch, the ring has overwritten its parts.
                lacks_parts = is_first and whole(entry.get("p2p_seq_id")) > 0
                if parts or is_p2p or lacks_parts:
                    left_out.update(parts)
                    self._mixed.add(number)
                    own = tuple(works[index].entry for index in parts)
                    seq = max(whole(entry.get("p2p_seq_id", entry.get("seq_id"))), 0)
                    works.append(Work(entry, number, names[0], WorkKind.BATCH, seq, parts=own))
                    continue
                wholes.add((WorkKind.COLLECTIVE, number, seq))
            if is_p2p:
                self._mixed.add(number)
                loose[number].append(len(works))
            else:
                loose.pop(number, None)
            works.append(Work(entry, number, names[0], WorkKind.P2P if is_p2p else WorkKind.COLLECTIVE, seq))
        left_out.update(
            index
            for index, work in enumerate(works if wholes else ())
            if (work.kind, work.number, work.seq) in wholes and not _is_whole(work.entry)
        )
        self._bundle(works, left_out)
        if not left_out:
            return works
        places = {index: place for place, index in enumerate(i for i in range(len(works)) if i not in left_out)}
        self._newest = {thread: places.get(index, -1) for thread, index in self._newest.items()}
        return [work for index, work in enumerate(works) if index not in left_out]

    def _bundle(self, works: list[Work[_Entry]], left_out: set[int]) -> None:
        """Joins the parts of a batch without a whole: sends and receives of one number."""
        before: dict[tuple[str, int], int] = {}
        for index, work in enumerate(works):
            if work.kind is not WorkKind.P2P or index in left_out:
                continue
            first = before.get((work.number, work.seq))
            if first is not None:
                left_out.add(first)
                earlier = works[first].parts or (works[first].entry,)
                works[index] = Work(
                    work.entry, work.number, work.group, WorkKind.BATCH, work.seq, parts=(*earlier, work.entry)
                )
            before[(work.number, work.seq)] = index

    def _counted(self, number: str) -> tuple[int, int]:
        """Last called and last completed, by a group's counters, which are uninitialised in some versions."""
        status = self._status.get(number, {})
        enqueued = max(whole(status.get("last_enqueued_collective")), 0)
        completed = whole(status.get("last_completed_collective"))
        return enqueued, completed if 0 < completed <= enqueued else 0

    def _sent(self, works: list[Work[_Entry]], completed: int) -> int:
        """The number up to which sends and receives have ended; 0 if unknown.

        The part of a batch of one always looks like an open send. Dumps of open entries leave out single sends that
        have ended: if such a dump contains the last that has ended, and all before it, these are parts. Parts have no
        events, so none is ever started or completed.
        """
        loose = [work for work in works if _is_loose(work) and 0 < work.seq <= completed]
        sent = {work.seq for work in loose}
        is_whole = completed in sent and len(sent) == completed - min(sent) + 1
        are_parts = all(work.entry.get("state") == "scheduled" for work in loose)
        return completed if is_whole and are_parts else 0

    def _judge(self, works: list[Work[_Entry]]) -> None:
        """Sets the states of the works of one group."""
        last = self.works[-1]
        _, completed = self._counted(works[0].number)
        sent = self._sent(works, completed)
        if works[0].number in self._mixed:
            # The counters include sends and receives, so they do not show which collective has ended.
            completed = 0
        for work in works:
            backend = backend_of(work.entry)[0]
            if backend == HOOK:
                work.state = _hooked(work, is_last=work is works[-1])
            elif not backend.startswith("nccl"):
                work.state = _elsewhere(work.entry)
            elif work.kind is WorkKind.BATCH and not _is_whole(work.entry):
                work.state = self._of_parts(work, work is last)
            else:
                self._on_nccl(work, completed)
            if _is_loose(work) and work.seq <= sent and not work.gave_up:
                work.state = State.ENDED
        _end_in_order(works)

    def _on_nccl(self, work: Work[_Entry], completed: int) -> None:
        entry = work.entry
        state = entry.get("state")
        is_counted = work.kind is WorkKind.COLLECTIVE and 0 < work.seq <= completed
        if state == "completed":
            # Events that were never recorded look completed. A thread inside the call has called nothing since.
            is_sure = entry.get("retired", True) is not False or is_counted
            is_last = not is_sure and any(self.works[index] is work for index in self._newest.values() if index >= 0)
            work.state = self._launched(entry) if is_last else State.ENDED
            return
        work.gave_up = entry.get("retired") is True
        if is_counted and not work.gave_up:
            work.state = State.ENDED
        else:
            work.state = State.RUNNING if state == "started" else State.WAITING

    def _launched(self, entry: Entry) -> State:
        """The state of a work that looks completed, is not retired, and is the last call of its thread."""
        if not self._now_ns:
            return State.UNKNOWN
        is_old = self._now_ns - whole(entry.get("time_created_ns")) > _RETIRED_WITHIN_NS
        return State.LAUNCHING if is_old else State.ENDED

    def _of_parts(self, work: Work[_Entry], is_last: bool) -> State:
        """The state of a batch without a whole, which is recorded after the launch, and left out once it has ended."""
        if not is_last:
            return State.ENDED
        return State.UNKNOWN if self.only_open or not self._now_ns else self._launched(work.entry)

    def _has_lost(self, number: str, works: list[Work[_Entry]]) -> bool:
        """Whether there is a gap between the last work of a group that has ended and the first open one."""
        enqueued, completed = self._counted(number)
        is_mixed = number in self._mixed
        if any(work.is_open and work.kind is WorkKind.BATCH and not work.parts for work in works):
            return True
        waiting = [work for work in works if work.is_open and (work.kind is WorkKind.COLLECTIVE) is not is_mixed]
        if not waiting or not enqueued:
            return False
        last = whole(self._status[number].get("last_completed_collective"))
        if is_mixed and (last > enqueued or last == whole(waiting[0].entry.get("collective_seq_id"), -1)):
            # The last to end may have been a collective, so that the counter is its number.
            return False
        return min(work.seq for work in waiting) > completed + 1

    def _position(self, number: str, works: list[Work[_Entry]]) -> GroupPosition:
        """The position by the counters, or by entries if the counters include sends and receives."""
        calls = [work for work in works if work.kind is WorkKind.COLLECTIVE]
        outstanding = min((work.seq for work in calls if work.is_open), default=0)
        called = max((work.seq for work in calls), default=0)
        if number in self._mixed:
            # Sends and receives carry the number of the collective before them.
            called = max([called, *(whole(work.entry.get("collective_seq_id")) for work in works)])
            return GroupPosition(called=called, completed=outstanding - 1 if outstanding else called, is_mixed=True)
        enqueued, completed = self._counted(number)
        called = max(enqueued, called)
        if outstanding:
            completed = min(completed, outstanding - 1)
        elif any(work.state is State.ENDED for work in calls):
            completed = max(completed, max(work.seq for work in calls))
        started = min(whole(self._status.get(number, {}).get("last_started_collective"), -1), called)
        return GroupPosition(called=called, started=started, completed=completed)


def _end_in_order(works: Sequence[Work[Any]]) -> None:
    """Collectives of a group end in order: once a later one has ended, all before it have."""
    later_has_ended = False
    for work in reversed(works):
        if work.kind is not WorkKind.COLLECTIVE:
            continue
        if later_has_ended:
            work.state, work.gave_up = State.ENDED, False
        elif work.state is State.ENDED and work.entry.get("state") == "completed":
            later_has_ended = True


def _has_just_ended(works: Sequence[Work[Any]]) -> bool:
    """Whether the last work of a group that has ended is not retired yet."""
    for work in reversed(works):
        if not work.is_open and work.entry.get("state") == "completed":
            return work.entry.get("retired") is False and backend_of(work.entry)[0].startswith("nccl")
    return False


def _says_ended(entry: Entry) -> bool:
    return entry.get("state") == "completed" or entry.get("retired") is True


def _elsewhere(entry: Entry) -> State:
    """The state of a work of gloo or another back end, which has ended once it is retired."""
    if _says_ended(entry):
        return State.ENDED
    return State.RUNNING if entry.get("state") == "started" else State.WAITING


def _hooked(work: Work[Any], *, is_last: bool) -> State:
    """The state of a hook's work, which is retired when its call returns: the rank may still wait for the last one."""
    if not _says_ended(work.entry):
        return State.WAITING
    return State.UNKNOWN if is_last else State.ENDED


def _is_whole(entry: Entry) -> bool:
    name = entry.get("profiling_name")
    return isinstance(name, str) and name.endswith("coalesced")


def _is_loose(work: Work[Any]) -> bool:
    """Whether it is a send or receive without a whole."""
    return work.kind is not WorkKind.COLLECTIVE and not _is_whole(work.entry)


def _parts_of(entry: Entry, works: Sequence[Work[_Entry]], loose: Sequence[int]) -> list[int]:
    """The parts of a whole: the sends and receives directly before it that have its number, or count up to it."""
    number = whole(entry.get("p2p_seq_id", entry.get("seq_id")), -1)
    same = [index for index in loose if works[index].seq == number]
    if len(same) != 1:
        return same
    parts = same
    for index in reversed(loose[: loose.index(same[0])]):
        one, next_one = works[index], works[parts[0]]
        if _says_ended(one.entry) or one.seq != next_one.seq - 1 or not _follows(one.entry, next_one.entry):
            break
        parts = [index, *parts]
    return parts


def _follows(one: Entry, other: Entry) -> bool:
    """Whether nothing was recorded between two entries."""
    return whole(other.get("record_id"), -2) - whole(one.get("record_id"), -2) in (0, 1)
