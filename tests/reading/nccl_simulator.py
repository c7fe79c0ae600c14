"""What NCCL's recorders would hold: hosts that call, devices that work through streams, watchdogs that look, dumps.

Written from what PyTorch and NCCL do, not from what the rules look for. A host calls the works of its program one after
the other and waits for its device only where the program says so. On the device, a group's collectives run on a stream
of their own, sends and receives on one for each pair, a batch on its group's; each waits for what the compute stream
had to wait for when it was called, and unless it was called with async_op the compute stream waits for it in turn.
A collective ends on all members once the devices of all have come to it. The recorder of a rank sees an end when its
watchdog looks, and writes what it holds at the moment of its dump.
"""

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MS = 1_000_000
BEGAN_NS = 1_790_000_000_000_000_000
NEVER = float("inf")
GPU_DIES = "gpu dies"
"""Stands for a moment at which a driver stops to answer, and so many ms before its device stops to work."""
Dump = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Group:
    """A process group."""

    name: str
    about: str
    ranks: tuple[int, ...]


@dataclass
class Call:
    """What a program calls.

    Attributes:
        group: The group; None for a kernel of the program's own.
        op: The operation.
        size: Elements.
        waits: Whether the compute stream waits for it.
        ends: Of sends and receives, which, and the peer of each; more than one is a batch.
        blocks: Whether the host waits for the device here.
        ms: How long a kernel takes, or the host; ``NEVER`` for good.
        on_host: Whether it is the host that takes this long.
    """

    group: Group | None = None
    op: str = ""
    size: int = 0
    waits: bool = True
    ends: tuple[tuple[str, int], ...] = ()
    blocks: bool = False
    ms: float = 0.0
    on_host: bool = False
    batched: bool = False


@dataclass(eq=False)
class Task:
    """A call on a device."""

    call: Call
    rank: int
    called: float
    after: list["Task"]
    seq: int = 0
    p2p_seq: int = 0
    op_id: int = 0
    record: int = 0
    arrives: float | None = None
    ends: float | None = None
    then: list["Task"] = field(default_factory=list)
    missing: int = 0
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    """Of a send or receive with each peer, which one it is between the two."""


@dataclass
class Rank:
    """A rank: its program, and how far it has come."""

    program: list[Call]
    place: int = 0
    clock: float = 0.0
    tasks: list[Task] = field(default_factory=list)
    compute: list[Task] = field(default_factory=list)
    streams: dict[Any, Task] = field(default_factory=dict)
    seqs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    p2p_seqs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    op_ids: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    records: int = 0
    blind_from: float = NEVER
    """From when on its watchdog sees no end any more: its driver does not answer."""
    broken_from: float = NEVER
    """From when on its device comes to nothing any more."""


class Job:
    """Runs programs to where nothing moves any more."""

    def __init__(self, programs: Sequence[list[Call]], groups: Sequence[Group], *, call_ms: float = 0.05) -> None:
        self.ranks = [Rank(program) for program in programs]
        self.groups = groups
        self.call_ms = call_ms
        self._ready: deque[Task] = deque()
        self._collectives: dict[tuple[str, int], dict[int, Task]] = defaultdict(dict)
        self._sends: dict[tuple[str, str, int, int], list[Task]] = defaultdict(list)

    def run(self) -> "Job":
        while any([self._host(number) for number in range(len(self.ranks))]):
            while self._ready:
                self._arrive(self._ready.popleft())
        return self

    def _host(self, number: int) -> bool:
        rank, began = self.ranks[number], self.ranks[number].place
        while rank.place < len(rank.program):
            call = rank.program[rank.place]
            if call.op == GPU_DIES:
                rank.blind_from = rank.clock
                rank.broken_from = rank.clock + call.ms
            elif call.on_host:
                if call.ms == NEVER:
                    break
                rank.clock += call.ms
            elif call.blocks:
                ends = [task.ends for task in rank.compute]
                if any(end is None for end in ends):
                    break
                rank.clock = max([rank.clock, *(end for end in ends if end is not None)])
            else:
                self._call(number, call)
            rank.place += 1
        return rank.place > began

    def _call(self, number: int, call: Call) -> None:
        rank = self.ranks[number]
        rank.clock += self.call_ms
        task = Task(call, number, rank.clock, list(rank.compute))
        stream: Any = "compute"
        if call.group is not None:
            name = call.group.name
            stream = name
            if call.ends and not call.batched:
                stream = (name, *sorted((number, call.ends[0][1])))
            self._number(rank, task, name)
            self._meet(task, name)
        if stream in rank.streams:
            task.after.append(rank.streams[stream])
        rank.streams[stream] = task
        rank.tasks.append(task)
        before = [one for one in task.after if one.ends is None]
        task.missing = len(before)
        for one in before:
            one.then.append(task)
        if not before:
            self._ready.append(task)
        if call.group is None or call.waits:
            rank.compute = [task]

    def _meet(self, task: Task, name: str) -> None:
        """Where its peers look for it."""
        if not task.call.ends:
            self._collectives[(name, task.seq)][task.rank] = task
        for kind, peer in task.call.ends:
            pair = (task.rank, peer) if kind == "send" else (peer, task.rank)
            # Of a batch the group's communicator, of a single one that of the pair.
            line = self._sends[(name if task.call.batched else f"{name}/{sorted(pair)}", kind, *pair)]
            task.places[(kind, peer)] = len(line)
            line.append(task)

    def _number(self, rank: Rank, task: Task, name: str) -> None:
        call = task.call
        if call.ends:
            rank.p2p_seqs[name] += 1
        else:
            rank.seqs[name] += 1
        rank.op_ids[name] += len(call.ends) or 1
        task.seq, task.p2p_seq, task.op_id = rank.seqs[name], rank.p2p_seqs[name], rank.op_ids[name]
        task.record = rank.records
        rank.records += len(call.ends) + 1 if call.batched else 1

    def _arrive(self, task: Task) -> None:
        """The device has come to it."""
        at = max([task.called, *(one.ends for one in task.after if one.ends is not None)])
        task.arrives = NEVER if at >= self.ranks[task.rank].broken_from else at
        for one in [task, *self._others(task)]:
            if one.ends is None:
                one.ends = self._end(one)
                if one.ends is not None:
                    self._finish(one)

    def _finish(self, task: Task) -> None:
        for one in task.then:
            one.missing -= 1
            if not one.missing:
                self._ready.append(one)

    def _others(self, task: Task) -> list[Task]:
        call = task.call
        if call.group is None:
            return []
        if not call.ends:
            return list(self._collectives[(call.group.name, task.seq)].values())
        return [other for kind, peer in call.ends if (other := self._other_side(task, kind, peer)) is not None]

    def _end(self, task: Task) -> float | None:
        call = task.call
        if task.arrives is None or task.arrives == NEVER:
            return None
        if call.group is None:
            return task.arrives + call.ms if call.ms != NEVER else None
        if not call.ends:
            members = self._collectives[(call.group.name, task.seq)]
            here = [members.get(rank) for rank in call.group.ranks]
            if len({(one.call.op, 0 if one.call.op == "all_to_all" else one.call.size) for one in here if one}) > 1:
                return None
        else:
            here = [self._other_side(task, kind, peer) for kind, peer in call.ends] + [task]
        arrivals = [one.arrives if one is not None else None for one in here]
        if any(at is None or at == NEVER for at in arrivals):
            return None
        return max(at for at in arrivals if at is not None) + 0.2

    def _other_side(self, task: Task, kind: str, peer: int) -> Task | None:
        assert task.call.group is not None
        pair = (task.rank, peer) if kind == "send" else (peer, task.rank)
        name = task.call.group.name
        where = name if task.call.batched else f"{name}/{sorted(pair)}"
        place = task.places[(kind, peer)]
        others = self._sends[(where, "recv" if kind == "send" else "send", *pair)]
        return others[place] if place < len(others) else None

    # What is left behind.

    def dumps(
        self,
        *,
        at: dict[int, float] | None = None,
        missing: Sequence[int] = (),
        only_open: bool = True,
        ring: int = 2000,
        timing: bool = False,
        version: str = "2.9",
    ) -> dict[int, Dump]:
        """The dumps of all ranks.

        Args:
            at: When each rank dumps, ms; without it when all has come to rest.
            missing: Ranks without a dump.
            only_open: Whether only entries that have not ended are written.
            ring: How many entries a recorder keeps.
            timing: Whether starts on the device are recorded.
            version: The format.
        """
        return {
            number: _Recorder(self, number, at[number] if at else NEVER, timing).dump(only_open, ring, version)
            for number in range(len(self.ranks))
            if number not in missing
        }


class _Recorder:
    def __init__(self, job: Job, number: int, at: float, timing: bool) -> None:
        self.job, self.number, self.at, self.timing = job, number, at, timing
        self.rank = job.ranks[number]
        own = [group for group in job.groups if number in group.ranks]
        # A process numbers its groups by itself, and leaves gaps for those that are gloo's.
        self.ids = {group.name: place + (place > 2) for place, group in enumerate(own)}
        self.own = own

    def has_ended(self, task: Task) -> bool:
        return task.ends is not None and task.ends <= min(self.at, self.rank.blind_from)

    def has_started(self, task: Task) -> bool:
        return self.timing and task.arrives is not None and task.arrives <= min(self.at, self.rank.blind_from)

    def dump(self, only_open: bool, ring: int, version: str) -> Dump:
        tasks = [task for task in self.rank.tasks if task.call.group is not None and task.called <= self.at]
        entries = [entry for task in tasks for entry in self.entries(task, version)]
        newest = entries[-1]["record_id"] if entries else 0
        entries = [entry for entry in entries if entry["record_id"] > newest - ring]
        if only_open:
            entries = [entry for entry in entries if entry["state"] != "completed"]
        made = {
            "version": version,
            "nccl_version": "2.27.3",
            "pg_config": {g.name: {"name": g.name, "desc": g.about, "ranks": str(list(g.ranks))} for g in self.own},
            "pg_status": self.status(tasks),
            "entries": entries,
        }
        return made

    def status(self, tasks: list[Task]) -> dict[str, dict[str, int]]:
        status: dict[str, dict[str, int]] = {}
        for task in tasks:
            assert task.call.group is not None
            number = task.p2p_seq if task.call.ends else task.seq
            one = status.setdefault(
                str(self.ids[task.call.group.name]),
                {"last_enqueued_collective": 0, "last_started_collective": -1, "last_completed_collective": -1},
            )
            one["last_enqueued_collective"] = number
            if self.has_started(task):
                one["last_started_collective"] = number
            if self.has_ended(task):
                one["last_completed_collective"] = number
        return status

    def entries(self, task: Task, version: str) -> Iterator[Dump]:
        call, group = task.call, task.call.group
        assert group is not None
        place = group.ranks.index
        names = [
            f"{kind} {place(self.number)}{'->' if kind == 'send' else '<-'}{place(peer)}" for kind, peer in call.ends
        ]
        if call.batched:
            first = task.op_id - len(names) + 1
            for offset, name in enumerate(names):
                part = self.entry(task, name, version, True, record=task.record + offset, op_id=first + offset)
                yield part | {"state": "scheduled", "retired": False}
            yield self.entry(task, "coalesced", version, False, record=task.record + len(names), op_id=task.op_id) | {
                "input_sizes": [],
                "output_sizes": [],
            }
        else:
            yield self.entry(task, names[0] if names else call.op, version, bool(names))

    def entry(
        self, task: Task, op: str, version: str, is_p2p: bool, record: int | None = None, op_id: int | None = None
    ) -> Dump:
        group = task.call.group
        assert group is not None
        ended = self.has_ended(task)
        started = self.has_started(task)
        made = {
            "record_id": task.record if record is None else record,
            "pg_id": self.ids[group.name],
            "process_group": (group.name, group.about),
            "thread_name": "python3",
            "thread_id": "1",
            "collective_seq_id": task.seq,
            "p2p_seq_id": task.p2p_seq if task.call.ends else 0,
            "op_id": task.op_id if op_id is None else op_id,
            "profiling_name": f"nccl:{op}",
            "time_created_ns": BEGAN_NS + int(task.called * MS) + self.number * 1_000,
            "input_sizes": [[task.call.size]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[task.call.size]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if ended else "started" if started else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": ended,
            "timeout_ms": 600_000,
            "is_p2p": is_p2p,
        }
        return made if version != "2.1" else _of_torch_2_4(made)


def _of_torch_2_4(made: Dump) -> Dump:
    """One number for all, and a group's name with nothing else."""
    left_out = ("collective_seq_id", "p2p_seq_id", "is_p2p", "timeout_ms", "output_dtypes", "thread_id", "thread_name")
    kept = {key: value for key, value in made.items() if key not in left_out}
    return kept | {"seq_id": made["collective_seq_id"], "process_group": made["process_group"][0]}


# Programs.


@dataclass
class Mesh:
    """Groups of a job with tensor, pipeline and data parallel ranks; tensor ranks are neighbours."""

    tensor: int
    pipeline: int
    data: int
    experts: bool = False
    groups: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.size
        self.groups = [Group("0", "default_pg", tuple(range(world)))]
        self._add(
            "DATA_PARALLEL_GROUP", lambda rank: (rank % self.tensor, rank // (self.tensor * self.data)), self.data
        )
        self._add("TENSOR_MODEL_PARALLEL_GROUP", lambda rank: rank // self.tensor, self.tensor)
        self._add("PIPELINE_MODEL_PARALLEL_GROUP", lambda rank: rank % (self.tensor * self.data), self.pipeline)
        if self.experts:
            stage = self.tensor * self.data
            self._add("EXPERT_MODEL_PARALLEL_GROUP", lambda rank: rank // stage, stage)

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def _add(self, about: str, key: Any, size: int) -> None:
        if size == 1:
            return
        alike: dict[Any, list[int]] = defaultdict(list)
        for rank in range(self.size):
            alike[key(rank)].append(rank)
        for ranks in alike.values():
            self.groups.append(Group(str(len(self.groups)), about, tuple(ranks)))

    def group(self, about: str, rank: int) -> Group | None:
        return next((group for group in self.groups if group.about.startswith(about) and rank in group.ranks), None)

    def peers(self, rank: int) -> tuple[int | None, int | None]:
        """The ranks of the stage before and of the one after."""
        group = self.group("PIPELINE", rank)
        if group is None:
            return None, None
        place = group.ranks.index(rank)
        before = group.ranks[place - 1] if place else None
        return before, group.ranks[place + 1] if place + 1 < len(group.ranks) else None


def program(mesh: Mesh, rank: int, chance: random.Random, *, steps: int, batched: bool, blocking: bool) -> list[Call]:
    """What one rank calls. The generator is that of the job, so that all ranks draw alike."""
    layers, microbatches, buckets = chance.randint(1, 3), chance.randint(2, 4), chance.randint(1, 4)
    every = chance.randint(1, 3)
    calls: list[Call] = []
    for step in range(steps):
        calls.append(Call(on_host=True, ms=0.5))
        for _ in range(microbatches):
            calls += _forward(mesh, rank, layers, batched)
        for _ in range(microbatches if mesh.pipeline > 1 else 1):
            calls += _backward(mesh, rank, layers, batched)
        data = mesh.group("DATA", rank)
        if data is not None:
            calls += [Call(data, "all_reduce", 1000 + bucket, waits=False) for bucket in range(buckets)]
            calls.append(Call(data, "_all_gather_base", 4096))
        if step % every == 0:
            calls.append(Call(mesh.groups[0], "all_reduce", 1))
        if blocking:
            calls.append(Call(blocks=True))
    return calls


def _forward(mesh: Mesh, rank: int, layers: int, batched: bool) -> Iterator[Call]:
    before, after = mesh.peers(rank)
    pipeline = mesh.group("PIPELINE", rank)
    if before is not None:
        yield Call(pipeline, size=4096, ends=(("recv", before),), batched=batched)
    yield from _layers(mesh, rank, layers)
    if after is not None:
        yield Call(pipeline, size=4096, ends=(("send", after),), batched=batched, waits=batched)


def _backward(mesh: Mesh, rank: int, layers: int, batched: bool) -> Iterator[Call]:
    before, after = mesh.peers(rank)
    pipeline = mesh.group("PIPELINE", rank)
    if after is not None:
        yield Call(pipeline, size=4096, ends=(("recv", after),), batched=batched)
    yield from _layers(mesh, rank, layers)
    if before is not None:
        yield Call(pipeline, size=4096, ends=(("send", before),), batched=batched, waits=batched)


def _layers(mesh: Mesh, rank: int, layers: int) -> Iterator[Call]:
    tensor, experts = mesh.group("TENSOR", rank), mesh.group("EXPERT", rank)
    for _ in range(layers):
        yield Call(op="kernel", ms=0.5)
        if tensor is not None:
            yield Call(tensor, "_all_gather_base", 131_072)
        if experts is not None:
            yield Call(experts, "all_to_all", 4000 + rank)
        if tensor is not None:
            yield Call(tensor, "_reduce_scatter_base", 131_072)
