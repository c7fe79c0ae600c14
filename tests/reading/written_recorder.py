"""What NCCL's Flight Recorder holds of jobs whose hosts and devices are played by hand.

Written after PyTorch's ``FlightRecorderDetail.hpp`` and ``ProcessGroupNCCL.cpp`` alone, apart from ``nccl_simulator``:
each rank has a list of steps, a host that takes them one after the other, and streams on which they run. What has
ended, and when, follows from who has come to what.
"""

import json
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOREVER = math.inf
BEGAN_NS = 1_758_610_000_000_000_000
HOST_S = 0.0005
POLL_S = 0.1
NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}


@dataclass(frozen=True)
class Collective:
    """Called by a member; what comes later on the device waits for it, unless it is asynchronous."""

    group: str
    op: str = "all_reduce"
    sizes: tuple[int, ...] = (1024,)
    dtype: str = "Float"
    is_async: bool = False
    takes_s: float = 0.002
    root: int | None = None
    """Global rank that does not wait for the others: it pushes its data into their buffers."""


@dataclass(frozen=True)
class Send:
    group: str
    peer: int
    """Global rank."""
    size: int = 4096
    is_async: bool = True


@dataclass(frozen=True)
class Receive:
    group: str
    peer: int
    size: int = 4096
    is_async: bool = True


@dataclass(frozen=True)
class Batch:
    """``batch_isend_irecv``: one launch, one work."""

    parts: tuple[Send | Receive, ...]
    is_async: bool = True


@dataclass(frozen=True)
class Host:
    """The host does something else."""

    seconds: float


@dataclass(frozen=True)
class Kernel:
    """The device does something else, before whatever is launched later."""

    seconds: float


@dataclass(frozen=True)
class Synchronize:
    """The host waits for all that it has launched."""


Step = Collective | Send | Receive | Batch | Host | Kernel | Synchronize


@dataclass(eq=False)
class Task:
    """Something on a stream of a rank."""

    rank: int
    step: Collective | Send | Receive | Batch | Kernel
    enqueued_s: float
    after: list["Task"]
    key: Any = None
    ended_s: float | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    is_launched: bool = True
    met: dict[Any, list["Task"]] = field(default_factory=dict)
    """Of a send or receive, by its ends: both sides of it, as far as they were called."""

    @property
    def ready_s(self) -> float | None:
        """When the device has come to it."""
        ready_s = self.enqueued_s
        for task in self.after:
            if task.ended_s is None:
                return None
            ready_s = max(ready_s, task.ended_s)
        return ready_s


@dataclass
class Rank:
    number: int
    program: list[Step]
    place: int = 0
    clock_s: float = 0.0
    is_blocked: bool = False
    tasks: list[Task] = field(default_factory=list)
    open: list[Task] = field(default_factory=list)
    """Of these, what has not ended."""
    streams: dict[Any, Task] = field(default_factory=dict)
    current: Task | None = None
    calls: dict[str, int] = field(default_factory=dict)
    p2p: dict[str, int] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    pairs: dict[Any, int] = field(default_factory=dict)
    connected: set[str] = field(default_factory=set)
    waits_for: Task | None = None
    synchronized: int = 0
    """Of how many tasks it has waited for the end."""


@dataclass
class Played:
    """A job that is played until nothing more happens.

    Attributes:
        groups: Members by the name of a group.
        programs: Steps by rank.
        frozen: When a rank's device freezes; what its peers had of it by then ends on them.
        connects: Whether a group's first call blocks the host until all members have called (NCCL from 2.22 on).
        batches_count: Whether a batch counts as a collective of its rank (torch before 2.6).
        coalesced_is_p2p: What the entry of a whole batch says of itself.
    """

    groups: dict[str, list[int]]
    programs: dict[int, list[Step]]
    frozen: dict[int, float] = field(default_factory=dict)
    connects: bool = False
    batches_count: bool = False
    coalesced_is_p2p: bool = False

    def __post_init__(self) -> None:
        self.ranks = {rank: Rank(rank, steps) for rank, steps in self.programs.items()}
        self.waiting: dict[Any, list[Task]] = {}
        has_moved = True
        while has_moved:
            has_moved = any([self._take(rank) for rank in self.ranks.values()])
            has_moved = self._end() or has_moved

    # Hosts

    def _take(self, rank: Rank) -> bool:
        has_moved = False
        while rank.place < len(rank.program) and self._step(rank, rank.program[rank.place]):
            rank.place += 1
            has_moved = True
        return has_moved

    def _step(self, rank: Rank, step: Step) -> bool:
        if rank.waits_for is not None:
            if not self._has_connected(rank.waits_for):
                return False
            joined = [task.enqueued_s for task in self.waiting[rank.waits_for.key]]
            rank.clock_s = max(rank.clock_s, *joined)
            rank.waits_for.is_launched, rank.waits_for = True, None
        if isinstance(step, Host):
            if step.seconds is FOREVER:
                return False
            rank.clock_s += step.seconds
        elif isinstance(step, Synchronize):
            if rank.open:
                return False
            ended = [self.seen_s(task) for task in rank.tasks[rank.synchronized :]]
            if any(one is None for one in ended):
                return False
            rank.clock_s = max([rank.clock_s, *(one for one in ended if one is not None)])
            rank.synchronized = len(rank.tasks)
        else:
            rank.clock_s += HOST_S
            self._launch(rank, step)
        return True

    def _launch(self, rank: Rank, step: Collective | Send | Receive | Batch | Kernel) -> None:
        after = [rank.current] if rank.current is not None else []
        stream = self._stream(rank, step)
        if stream in rank.streams:
            after.append(rank.streams[stream])
        task = Task(rank.number, step, rank.clock_s, after)
        rank.tasks.append(task)
        rank.open.append(task)
        rank.streams[stream] = task
        if isinstance(step, Kernel) or not step.is_async:
            rank.current = task
        if isinstance(step, Collective):
            self._call(rank, task, step)
        elif isinstance(step, Batch):
            self._batch(rank, task, step)
        elif isinstance(step, Send | Receive):
            rank.p2p[step.group] = task.number = rank.p2p.get(step.group, 0) + 1
            self._pair(rank, task, step)
            task.entries.append(self._p2p_entry(rank, step))

    def _call(self, rank: Rank, task: Task, step: Collective) -> None:
        rank.calls[step.group] = task.number = rank.calls.get(step.group, 0) + 1
        task.key = (step.group, self._nth(rank, step.group))
        self.waiting.setdefault(task.key, []).append(task)
        task.entries.append(self._entry(rank, step.group, f"nccl:{NAMES.get(step.op, step.op)}", step.sizes, step))
        if self.connects and step.group not in rank.connected:
            rank.connected.add(step.group)
            task.is_launched, rank.waits_for = False, task

    def _batch(self, rank: Rank, task: Task, step: Batch) -> None:
        group = step.parts[0].group
        if self.batches_count:
            rank.calls[group] = rank.calls.get(group, 0) + 1
        rank.p2p[group] = rank.p2p.get(group, 0) + 1
        for part in step.parts:
            self._pair(rank, task, part)
            task.entries.append(self._p2p_entry(rank, part))
        whole = self._entry(rank, group, "nccl:coalesced", (), None)
        whole["is_p2p"] = self.coalesced_is_p2p
        task.entries.append(whole)
        task.number = rank.p2p[group] if self.coalesced_is_p2p else rank.calls.get(group, 0)

    def _nth(self, rank: Rank, group: str) -> int:
        rank.pairs[group] = rank.pairs.get(group, 0) + 1
        return rank.pairs[group]

    def _pair(self, rank: Rank, task: Task, part: Send | Receive) -> None:
        ends = (rank.number, part.peer) if isinstance(part, Send) else (part.peer, rank.number)
        which = (part.group, *ends, isinstance(part, Send))
        rank.pairs[which] = rank.pairs.get(which, 0) + 1
        tasks = self.waiting.setdefault((part.group, *ends, rank.pairs[which]), [])
        tasks.append(task)
        task.met.setdefault((part.group, *ends), tasks)

    @staticmethod
    def _stream(rank: Rank, step: Any) -> Any:
        if isinstance(step, Kernel):
            return "compute"
        if isinstance(step, Collective):
            return step.group
        if isinstance(step, Batch):
            return (step.parts[0].group, "batch")
        return (step.group, *sorted((rank.number, step.peer)))

    # Devices

    def _has_connected(self, task: Task) -> bool:
        return len(self.waiting[task.key]) == len(self.groups[task.key[0]])

    def _end(self) -> bool:
        has_ended = False
        for rank in self.ranks.values():
            for task in rank.open:
                if (ends := self._ends(task)) is not None:
                    task.ended_s = ends
                    has_ended = True
            rank.open = [task for task in rank.open if task.ended_s is None]
        return has_ended

    def _ends(self, task: Task) -> float | None:
        ready = task.ready_s
        if ready is None or ready >= self.frozen.get(task.rank, FOREVER) + 0.01:
            return None
        step = task.step
        if isinstance(step, Kernel):
            return None if step.seconds is FOREVER else ready + step.seconds
        if isinstance(step, Collective):
            if step.root == task.rank:
                return ready + step.takes_s
            return self._together(self.waiting[task.key], len(self.groups[step.group]), step.takes_s)
        parts = step.parts if isinstance(step, Batch) else (step,)
        ends = [self._pair_ends(task, part) for part in parts]
        return None if any(one is None for one in ends) else max(one for one in ends if one is not None)

    def _pair_ends(self, task: Task, part: Send | Receive) -> float | None:
        ends = (task.rank, part.peer) if isinstance(part, Send) else (part.peer, task.rank)
        tasks = task.met[(part.group, *ends)]
        if len(tasks) < 2:
            return None
        sizes = {one.size for it in tasks for one in _parts(it) if one.group == part.group and _is_of(it, one, ends)}
        return self._together(tasks, 2, 0.001) if len(sizes) == 1 else None

    def _together(self, tasks: list[Task], count: int, takes_s: float) -> float | None:
        if len(tasks) < count or len({_signature(task.step) for task in tasks}) > 1:
            return None
        ready = [task.ready_s for task in tasks]
        if any(one is None for one in ready):
            return None
        ends = max(one for one in ready if one is not None) + takes_s
        return ends if all(ends < self.frozen.get(task.rank, FOREVER) + 0.01 for task in tasks) else None

    def seen_s(self, task: Task) -> float | None:
        """When its own rank can see that it has ended."""
        if task.ended_s is None or task.ended_s > self.frozen.get(task.rank, FOREVER):
            return None
        return task.ended_s

    # Entries

    def _entry(
        self, rank: Rank, group: str, name: str, sizes: tuple[int, ...], step: Collective | None
    ) -> dict[str, Any]:
        if name != "nccl:coalesced":
            rank.ops[group] = rank.ops.get(group, 0) + 1
        many = len(self.groups[group])
        outs = [size * many if step and step.op == "all_gather" else size for size in sizes]
        outs = [size // many if step and step.op == "reduce_scatter" else size for size in outs]
        dtype = step.dtype if step else "Float"
        return {
            "collective_seq_id": rank.calls.get(group, 0),
            "p2p_seq_id": rank.p2p.get(group, 0),
            "op_id": rank.ops.get(group, 0),
            "group": group,
            "profiling_name": name,
            "input_sizes": [[size] for size in sizes],
            "input_dtypes": [dtype] * len(sizes),
            "output_sizes": [[size] for size in outs],
            "output_dtypes": [dtype] * len(sizes),
            "is_p2p": False,
        }

    def _p2p_entry(self, rank: Rank, part: Send | Receive) -> dict[str, Any]:
        members = self.groups[part.group]
        me, peer = members.index(rank.number), members.index(part.peer)
        name = f"nccl:send {me}->{peer}" if isinstance(part, Send) else f"nccl:recv {me}<-{peer}"
        return {**self._entry(rank, part.group, name, (part.size,), None), "is_p2p": True}

    # Dumps

    def dump(self, rank: int, at_s: float = 1000.0, **how: Any) -> dict[str, Any]:
        """What the recorder of a rank holds at a moment.

        Args:
            rank: Whose.
            at_s: When.
            how: Of ``Form``.
        """
        form = Form(**how)
        names = {group: form.names.get((rank, group), form.names.get(group, key)) for group, key in self._ids(rank)}
        works = [one for one in self.ranks[rank].tasks if one.entries and one.enqueued_s <= at_s]
        seen = [Moment(self, task, at_s, form) for task in works]
        entries = [entry for one in seen for entry in one.entries(names, dict(self._ids(rank)))]
        for number, entry in enumerate(entries):
            entry["record_id"] = number
        kept = entries[-form.ring :]
        if form.only_active:
            kept = [one for one in kept if one["state"] != "completed"]
        dump: dict[str, Any] = {"version": form.version, "entries": kept}
        if form.has_config:
            groups = names.items()
            dump["pg_config"] = {
                name: {"name": name, "desc": group, "ranks": str(self.groups[group])} for group, name in groups
            }
        if form.has_status:
            dump["pg_status"] = self._status(seen, dict(self._ids(rank)))
        dump["comm_lib_version" if form.version == "2.10" else "nccl_version"] = "2.27.3"
        return dump

    @staticmethod
    def _status(seen: list["Moment"], ids: dict[str, str]) -> dict[str, dict[str, int]]:
        status: dict[str, dict[str, int]] = {}
        for one in seen:
            numbers = status.setdefault(
                ids[one.group],
                {f"last_{word}_collective": -1 for word in ("enqueued", "started", "completed")},
            )
            if one.task.is_launched:
                numbers["last_enqueued_collective"] = one.task.number
                if one.has_started:
                    numbers["last_started_collective"] = one.task.number
                if one.is_retired:
                    numbers["last_completed_collective"] = one.task.number
        return status

    def _ids(self, rank: int) -> list[tuple[str, str]]:
        mine = [group for group, members in self.groups.items() if rank in members]
        return [(group, str(number)) for number, group in enumerate(mine)]


@dataclass
class Form:
    """How a dump is written.

    Attributes:
        version: Of its format.
        timing: Whether ``TORCH_NCCL_ENABLE_TIMING`` was set.
        ring: How many entries the recorder keeps.
        only_active: Whether what has ended was left out.
        has_status: Whether ``pg_status`` is there.
        has_config: Whether ``pg_config`` is there.
        threads: Whether entries name their thread.
        clock_s: By how much the host's clock is ahead.
        timed_out_after_s: After how long the watchdog has given a work up.
        names: Names of groups, where they are not numbered; by group, or by rank and group.
    """

    version: str = "2.10"
    timing: bool = False
    ring: int = 2000
    only_active: bool = False
    has_status: bool = True
    has_config: bool = True
    threads: bool = True
    clock_s: float = 0.0
    timed_out_after_s: float = FOREVER
    names: dict[Any, str] = field(default_factory=dict)


class Moment:
    """What a rank's recorder knows of a work at a moment."""

    def __init__(self, played: Played, task: Task, at_s: float, form: Form) -> None:
        self.task, self.form, self.at_s = task, form, at_s
        self.group: str = task.entries[0]["group"]
        self.seen_s = played.seen_s(task)
        self.ready_s = task.ready_s
        self.has_ended = self.seen_s is not None and self.seen_s <= at_s
        is_polled = self.seen_s is not None and self.seen_s + POLL_S <= at_s
        self.is_retired = is_polled or form.timed_out_after_s < at_s - task.enqueued_s
        came = self.ready_s is not None and self.ready_s <= min(at_s, played.frozen.get(task.rank, FOREVER))
        self.has_started = form.timing and came

    def entries(self, names: dict[str, str], ids: dict[str, str]) -> list[dict[str, Any]]:
        whole = [self._entry(raw) for raw in self.task.entries]
        if isinstance(self.task.step, Batch):
            # Parts have no events of their own.
            unknown = {"time_discovered_started_ns": None, "time_discovered_completed_ns": None}
            whole[:-1] = [{**one, "state": "scheduled", "retired": False, **unknown} for one in whole[:-1]]
            for one in whole[:-1]:
                one.pop("duration_ms", None)
        for one in whole:
            one["pg_id"] = int(ids[self.group])
            one["process_group"] = (names[self.group], self.group)
            del one["group"]
        return whole

    def _entry(self, raw: dict[str, Any]) -> dict[str, Any]:
        # Events that were never recorded look as if they had come.
        ended = self.has_ended or not self.task.is_launched
        started = self.has_started or (self.form.timing and not self.task.is_launched)
        found_s = self.at_s if self.seen_s is None else min(self.seen_s + POLL_S, self.at_s)
        one = {
            **raw,
            "state": "completed" if ended else "started" if started else "scheduled",
            "retired": self.is_retired and self.task.is_launched,
            "time_created_ns": self._ns(self.task.enqueued_s),
            "time_discovered_started_ns": self._ns((self.ready_s or self.at_s) + POLL_S) if started else None,
            "time_discovered_completed_ns": self._ns(found_s) if ended else None,
            "timeout_ms": 600_000,
        }
        if self.form.threads:
            one |= {"thread_id": "22437656749760", "thread_name": "pt_main_thread"}
        if one["retired"] and self.form.timing and ended and self.ready_s is not None and self.seen_s is not None:
            one["duration_ms"] = (self.seen_s - self.ready_s) * 1000
        return one

    def _ns(self, seconds: float) -> int:
        return BEGAN_NS + int((seconds + self.form.clock_s) * 1e9)


def _parts(task: Task) -> Iterable[Send | Receive]:
    if isinstance(task.step, Batch):
        return task.step.parts
    return (task.step,) if isinstance(task.step, Send | Receive) else ()


def _is_of(task: Task, part: Send | Receive, ends: tuple[int, int]) -> bool:
    return ((task.rank, part.peer) if isinstance(part, Send) else (part.peer, task.rank)) == ends


def _signature(step: Any) -> Any:
    if not isinstance(step, Collective):
        return None
    return (step.op, step.sizes if step.op != "all_to_all" else None, step.dtype)


def write(folder: Path, dumps: dict[int, dict[str, Any]], *, as_json: bool = False) -> None:
    """As PyTorch writes them; as JSON with texts for numbers in ``pg_status`` and without an empty list."""
    for rank, dump in dumps.items():
        if not as_json:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
            continue
        plain = json.loads(json.dumps(dump))
        for numbers in plain.get("pg_status", {}).values():
            numbers.update({key: str(number) for key, number in numbers.items()})
        for entry in plain["entries"]:
            for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                entry[key] = entry[key] or 0
        if not plain["entries"]:
            del plain["entries"]
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(plain))
