"""Reads what this rank's Flight Recorder recorded since the last reading, with the phases of its steps, as a window."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from math import prod
from time import time_ns
from typing import Any, NamedTuple

import numpy as np

from lightning_ncclsafe._torch import process_groups, recorders
from lightning_ncclsafe.code.own_work import take_own_work
from lightning_ncclsafe.facts import VOTE_AHEAD_GROUP, element_bytes
from lightning_ncclsafe.facts.phase_kinds import stage_fetched
from lightning_ncclsafe.recorder.model import Recorder, WorkKind, recorded_once
from lightning_ncclsafe.timing.summary import STEP_PHASES, StepPhase, step_phase
from lightning_ncclsafe.timing.windows import CALL, OWN, SPAN, UNKNOWN_NS, Clock, GroupMembers, OpTotal, Window

# Some minutes' worth; older ones are dropped if they are never read.
_MOST_MARKS = 1 << 16
# User code may name every step differently.
_MOST_NAMES = 1000
# Most hooks do nothing. A shorter phase counts as part of the one before.
_SHORT_NS = 50_000
_OTHER = STEP_PHASES.index(StepPhase.OTHER)

Entry = dict[str, Any]

# How long to wait for a duration on the device; a collective that takes longer is a hang.
_PATIENCE_NS = 30_000_000_000
_KEPT_STARTS = 4096
# A program may create groups for as long as it runs.
_MOST_GROUPS = 10_000


class _Meaning(NamedTuple):
    phase: int
    starts_step: bool


class PhaseHistory:
    """Listens to a :class:`~lightning_ncclsafe.probes.trainer.actions.ActionTracker`.

    The training's main thread calls it some 50 times a step; each call looks up one name.

    Attributes:
        marks: Wall-clock nanoseconds and number of the phase that began then, oldest first, up to the last but one.
        starts: Wall-clock nanoseconds at which the rank began to fetch a batch, oldest first.
        current: The mark of the current phase.
    """

    def __init__(self) -> None:
        self.marks: deque[tuple[int, int]] = deque(maxlen=_MOST_MARKS)
        self.starts: deque[int] = deque(maxlen=_MOST_MARKS)
        self.current = (time_ns(), _OTHER)
        self._meanings: dict[str, _Meaning] = {}
        self._fetches = False

    def __call__(self, action: str) -> None:
        """Called when the innermost action changes."""
        try:
            phase, starts_step = self._meanings[action]
        except (KeyError, TypeError):  # a user's profiler may use names that are not strings
            phase, starts_step = self._learn(action)
        # Time between two hooks belongs to the first.
        if phase not in (_OTHER, self.current[1]):
            now_ns = time_ns()
            if now_ns - self.current[0] >= _SHORT_NS:
                self.marks.append(self.current)
            self.current = (now_ns, phase)
        # After an action within a fetch, the fetch is the innermost action again.
        if starts_step and not self._fetches:
            self.starts.append(time_ns())
        self._fetches = starts_step or (self._fetches and phase != _OTHER)

    def _learn(self, action: object) -> _Meaning:
        name = str(action)
        meaning = _Meaning(STEP_PHASES.index(step_phase(name)), bool(stage_fetched(name)))
        if isinstance(action, str) and len(self._meanings) < _MOST_NAMES:
            self._meanings[action] = meaning
        return meaning


class Recording:
    """Reads the recorders of this process, each entry once.

    Args:
        since_ns: Entries recorded before this wall-clock time are skipped: the recorder belongs to the process, and
            also has those of earlier calls of the Trainer.
        entries: Returns the entries of each recorder; for tests.

    Attributes:
        new: Number of entries in the last window.
        steps: Number of batches whose fetch has begun.
    """

    def __init__(
        self,
        rank: int,
        phase_history: PhaseHistory,
        *,
        since_ns: int = 0,
        entries: Callable[[], Iterable[list[Entry]]] = recorders.entries,
    ) -> None:
        self._rank = rank
        self._phase_history = phase_history
        self._since_ns = since_ns
        self._entries = entries
        self._read_to: dict[int, int] = {}
        self._unfinished: dict[int, dict[int, Entry]] = defaultdict(dict)
        self._groups: dict[str, GroupMembers] = {}
        self._starts: list[int] = []
        self._missing: list[str] = []
        self._last_span = (0, 0)
        self._device_times_fail = False
        self.new = 0
        self.steps = 0

    def read(self, clock: Clock, *, last: bool = False) -> Window:
        """Reads everything new.

        Args:
            last: Whether nothing more will be read.
        """
        found, lost = self._new_entries(last)
        self._know_groups(found)
        # No rank waits for a vote that is under way while it trains; they do wait for all others.
        collectives = [entry for entry in found if entry["process_group"][1] != VOTE_AHEAD_GROUP]
        for entry in collectives:
            entry["size_bytes"] = size_bytes(entry)
        self._read_starts()
        ops: dict[str, int] = {}
        used = dict.fromkeys(entry["process_group"][0] for entry in collectives)
        groups = {name: number for number, name in enumerate(used)}
        rows = [self._row(entry, groups, ops) for entry in collectives if not entry["is_p2p"]]
        calls = np.array(rows, dtype=CALL)
        missing, self._missing = tuple(self._missing), []
        spans = self._spans()
        # Only now: whatever delayed a call that was found ended before the call did.
        own = [(self._rank, *interval) for interval in take_own_work() if interval[0] >= self._since_ns]
        return Window(
            calls=calls,
            spans=spans,
            own=np.array(own, dtype=OWN),
            groups=tuple(self._groups[name] for name in used),
            ops=tuple(ops),
            clocks={self._rank: clock},
            totals={self._rank: _totals(collectives)},
            lost={self._rank: lost} if lost else {},
            left_out={},
            last=frozenset((self._rank,) if last else ()),
            missing=missing,
        )

    def say(self, sentence: str) -> None:
        """Notes, for the next window, that something is missing."""
        self._missing.append(f"Rank {self._rank}: {sentence}")

    def _new_entries(self, last: bool) -> tuple[list[Entry], int]:
        """New entries, and earlier ones that have a duration now; and how many were overwritten unread."""
        found: list[Entry] = []
        lost = self.new = 0
        for number, dumped in enumerate(self._entries()):
            entries = [entry for entry in dumped if entry["time_created_ns"] >= self._since_ns]
            if not entries:
                continue
            read_to, unfinished = self._read_to.get(number, -1), self._unfinished[number]
            lost += max(entries[0]["record_id"] - read_to - 1, 0) if read_to >= 0 else 0
            self._read_to[number] = entries[-1]["record_id"]
            self.new += sum(entry["record_id"] > read_to for entry in entries)
            whole = _as_they_count(recorded_once(entries))
            wanted = [entry for entry in whole if entry["record_id"] > read_to or entry["record_id"] in unfinished]
            forgotten = unfinished.keys() - {entry["record_id"] for entry in wanted}
            found += [unfinished.pop(record) for record in sorted(forgotten)]
            for entry in wanted:
                if last or not _may_get_a_duration(entry, entries[-1]["time_created_ns"]):
                    unfinished.pop(entry["record_id"], None)
                    found.append(entry)
                else:
                    unfinished[entry["record_id"]] = entry
        return found, lost

    def _know_groups(self, entries: list[Entry]) -> None:
        names = {entry["process_group"][0]: entry for entry in entries if entry["process_group"][1] != VOTE_AHEAD_GROUP}
        if names.keys() <= self._groups.keys():
            return
        members = {group.name: group.ranks for group in process_groups.own_groups()}
        for name, entry in names.items():
            if name not in self._groups:
                backend, mark, _ = entry["profiling_name"].partition(":")
                self._groups[name] = GroupMembers(
                    name=name,
                    description=entry["process_group"][1],
                    ranks=members.get(name, ()),
                    backend=backend if mark else "",
                )
                if name not in members:
                    self.say(f"the members of the process group {name!r} are unknown: it no longer exists.")
        for name in [name for name in self._groups if name not in names][: max(len(self._groups) - _MOST_GROUPS, 0)]:
            del self._groups[name]
        self._time_on_device()

    def _time_on_device(self) -> None:
        """Turns on timing on the device whenever a new group appears, as groups may be created at any time."""
        if self._device_times_fail:
            return
        try:
            process_groups.time_collectives_on_device()
        except Exception as error:
            self._device_times_fail = True
            self.say(f"this torch does not time collectives on the device ({type(error).__name__}: {error}).")

    def _row(self, entry: Entry, groups: dict[str, int], ops: dict[str, int]) -> tuple[int, ...]:
        name = entry["profiling_name"]
        created_ns, duration_ms = entry["time_created_ns"], entry.get("duration_ms")
        return (
            self._rank,
            groups[entry["process_group"][0]],
            ops.setdefault(_op(name), len(ops)),
            entry["collective_seq_id"],
            self.steps - len(self._starts) + bisect_left(self._starts, created_ns),
            entry["size_bytes"],
            created_ns,
            UNKNOWN_NS if duration_ms is None else int(duration_ms * 1e6),
        )

    def _read_starts(self) -> None:
        starts = self._phase_history.starts
        while starts:
            self._starts.append(starts.popleft())
            self.steps += 1
        if (too_many := len(self._starts) - _KEPT_STARTS) > 0:
            del self._starts[:too_many]

    def _spans(self) -> Any:
        marks, current = self._phase_history.marks, self._phase_history.current
        found = []
        while marks:
            found.append(marks.popleft())
        # It continues, unless it has just ended and is among the marks already; so it is not recorded twice.
        if current not in found:
            found.append(current)
        new = [(self._rank, phase, began_ns) for began_ns, phase in found if (began_ns, phase) != self._last_span]
        self._last_span = found[-1]
        return np.array(new, dtype=SPAN)


def _op(profiling_name: str) -> str:
    return profiling_name.partition(":")[2] or profiling_name


def _as_they_count(entries: list[Entry]) -> list[Entry]:
    """A coalesced call as a whole; one of sends and receives is no collective, whatever its entry says."""
    if not any(entry["profiling_name"].endswith("coalesced") for entry in entries):
        return entries
    works = Recorder(entries, {}).works
    return [{**work.entry, "is_p2p": True} if work.kind is WorkKind.BATCH else work.entry for work in works]


def _may_get_a_duration(entry: Entry, now_ns: int) -> bool:
    """Whether an entry belongs to a back end that times collectives on the device, and is not finished there yet."""
    is_timed = entry["profiling_name"].startswith("nccl") and entry.get("duration_ms") is None
    # A dump calls it completed some 0.1 s before NCCL's watchdog retires it, which is when it gets its duration.
    is_over = entry["retired"] or now_ns - entry["time_created_ns"] > _PATIENCE_NS
    return is_timed and not is_over


def _totals(entries: list[Entry]) -> tuple[OpTotal, ...]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0])
    for entry in entries:
        total = sums[entry["process_group"][0], _op(entry["profiling_name"])]
        total[0] += 1
        total[1] += entry["size_bytes"]
        if entry.get("duration_ms") is not None:
            total[2] += entry["duration_ms"] * 1e6
            total[3] += 1
    return tuple(
        OpTotal(
            group=group, op=op, count=int(count), size_bytes=int(bytes_), duration_ns=int(duration_ns), timed=int(timed)
        )
        for (group, op), (count, bytes_, duration_ns, timed) in sums.items()
    )


def size_bytes(entry: dict[str, Any]) -> int:
    """Bytes that this rank puts into a collective or, if it only receives, gets out of it."""
    return _bytes(entry.get("input_sizes"), entry.get("input_dtypes")) or _bytes(
        entry.get("output_sizes"), entry.get("output_dtypes")
    )


def _bytes(shapes: Sequence[Sequence[int]] | None, dtypes: Sequence[str] | None) -> int:
    if not shapes or not dtypes:
        return 0
    # The recorder keeps one type if all tensors have the same.
    of_each = dtypes if len(dtypes) == len(shapes) else [dtypes[0]] * len(shapes)
    return sum(prod(shape) * element_bytes(dtype) for shape, dtype in zip(shapes, of_each, strict=True))
