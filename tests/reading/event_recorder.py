"""What NCCL's Flight Recorder holds of jobs that run: hosts are generators, devices queues, time one heap of events.

Apart from ``nccl_simulator`` and ``written_recorder``, and after PyTorch's ``ProcessGroupNCCL.cpp`` alone: each rank
runs the same training program, in which a fault replaces what happens at a place; dumps are taken while it runs.
"""

import heapq
import json
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

BEGAN_NS = 1_762_300_000_000_000_000
POLL_S = 0.1
LAUNCH_S = 0.0002
QUEUE = 1024
"""Kernels that a device's queue takes before a launch blocks the host."""
NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}

Program = Generator[Any, Any, None]
Dumps = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Group:
    name: str
    about: str
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Kernel:
    """Something on a stream of a device."""

    rank: int
    seconds: float = 0.0
    after: int = 0
    following: list["Kernel"] = field(default_factory=list)
    meets: Callable[["Kernel"], None] | None = None
    launched_s: float | None = None
    began_s: float | None = None
    done_s: float | None = None
    parts: int = 0


@dataclass(eq=False)
class Entry:
    """What the recorder has of one call."""

    fields: dict[str, Any]
    group: Group
    created_s: float
    kernel: Kernel
    is_part: bool = False
    number: int = 0
    timeout_s: float = 600.0

    @property
    def is_outstanding(self) -> bool:
        return not self.is_part and self.kernel.launched_s is not None and self.kernel.done_s is None


@dataclass
class Rank:
    number: int
    job: "Job"
    program: Program | None = None
    streams: dict[Any, Kernel] = field(default_factory=dict)
    current: Kernel | None = None
    queued: int = 0
    entries: deque[Entry] = field(default_factory=deque)
    watched: list[Entry] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    p2p: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ops: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    comms: dict[Any, int] = field(default_factory=lambda: defaultdict(int))
    records: int = 0
    enqueued: dict[str, int] = field(default_factory=dict)
    is_dead: bool = False
    has_exited: bool = False
    waiting: Any = None
    nccl_done: int = 0

    # What a program yields

    def sleep(self, seconds: float) -> tuple[Any, ...]:
        return ("sleep", seconds)

    def stuck(self) -> tuple[Any, ...]:
        return ("stuck",)

    def compute(self, seconds: float) -> tuple[Any, ...]:
        return ("kernel", seconds)

    def sync(self, kernel: Kernel | None = None) -> tuple[Any, ...]:
        """The host waits for what it has launched so far, or for one of it."""
        return ("sync", kernel)

    def call(self, group: str, op: str = "all_reduce", *sizes: int, dtype: str = "BFloat16", lazy: bool = False,
             root: int | None = None, pieces: tuple[int, ...] = ()) -> tuple[Any, ...]:  # fmt: skip
        """A collective; with ``lazy`` nothing waits for it until it is waited for."""
        return ("call", group, op, sizes or (1024,), dtype, lazy, root, pieces)

    def wait(self, kernel: Kernel) -> tuple[Any, ...]:
        return ("wait", kernel)

    def send(self, group: str, peer: int, size: int = 4096, lazy: bool = True) -> tuple[Any, ...]:
        return ("p2p", group, (("send", peer, size),), lazy, False)

    def recv(self, group: str, peer: int, size: int = 4096, lazy: bool = False) -> tuple[Any, ...]:
        return ("p2p", group, (("recv", peer, size),), lazy, False)

    def batch(self, group: str, *parts: tuple[str, int, int], lazy: bool = False) -> tuple[Any, ...]:
        return ("p2p", group, parts, lazy, True)

    def fault(self, place: str, step: Any = None) -> Generator[Any, Any, Any]:
        """What a fault does at a place of this rank's program; ``True`` where it takes the place of what follows."""
        made = self.job.faults.get((self.number, place, step))
        if made is not None:
            return (yield from made(self))
        return None


Fault = Callable[[Rank], Generator[Any, Any, Any]]


def stuck(rank: Rank) -> Program:
    yield rank.stuck()


class Job:
    """A job that runs until nothing happens any more, or until its last dump.

    Args:
        groups: All process groups, in the order in which they are made.
        main: The program of a rank.
        faults: What happens on a rank at a place of a step.
        frozen: By rank, the how-many-eth NCCL kernel of its own its device dies in, when its peers' have ended.
        connects: Whether the first call of a group blocks the host until all members have made it.
        timing: Whether start events are recorded.
        eager: Sends and broadcasts of at most so many elements end without the peer.
        timeouts_s: By the description of a group.
    """

    def __init__(self, groups: Iterable[Group], main: Callable[[Rank], Program], *,
                 faults: dict[tuple[int, str, Any], Fault] | None = None, frozen: dict[int, int] | None = None,
                 connects: bool = False, timing: bool = False, eager: int = 0, seed: int = 1,
                 timeouts_s: dict[str, float] | None = None, ring: int = 2000) -> None:  # fmt: skip
        self.groups = {one.name: one for one in groups}
        self.faults = faults or {}
        self.frozen = frozen or {}
        self.connects, self.timing, self.eager, self.ring = connects, timing, eager, ring
        self.timeouts_s = timeouts_s or {}
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.turn = 0
        self.met: dict[Any, list[tuple[Kernel, tuple[Any, ...], float]]] = defaultdict(list)
        self.channels: dict[Any, tuple[deque[Any], deque[Any]]] = defaultdict(lambda: (deque(), deque()))
        self.connected: dict[Any, set[int]] = defaultdict(set)
        self.blocked: dict[Any, list[Callable[[], None]]] = defaultdict(list)
        members = sorted({rank for one in self.groups.values() for rank in one.ranks})
        self.ranks = {number: Rank(number, self) for number in members}
        self.phase = {number: self.random.random() * POLL_S for number in members}
        self.taken: Dumps = {}
        for rank in self.ranks.values():
            rank.program = main(rank)
            self.at(self.random.random() * 0.01, lambda rank=rank: self.resume(rank, None))

    # Time

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        self.turn += 1
        heapq.heappush(self.heap, (when_s, self.turn, what))

    def later(self, in_s: float, what: Callable[[], None]) -> None:
        self.at(self.now_s + in_s, what)

    def run(self, until_s: float = 1e9) -> "Job":
        while self.heap and self.heap[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self.heap)
            what()
        return self

    # Hosts

    def resume(self, rank: Rank, value: Any) -> None:
        if rank.program is None:
            return
        try:
            asked = rank.program.send(value)
        except StopIteration:
            rank.program = None
            return
        getattr(self, "_" + asked[0])(rank, *asked[1:])

    def _sleep(self, rank: Rank, seconds: float) -> None:
        self.later(seconds, lambda: self.resume(rank, None))

    def _stuck(self, rank: Rank) -> None:
        rank.program = None

    def _exit(self, rank: Rank) -> None:
        rank.program, rank.has_exited = None, True

    def _sync(self, rank: Rank, kernel: Kernel | None) -> None:
        kernel = kernel or rank.current
        if kernel is None or (kernel.done_s is not None and not rank.is_dead):
            self.later(1e-6, lambda: self.resume(rank, None))
        else:
            kernel.following.append(Kernel(rank.number, after=1, meets=lambda _: self.resume(rank, None)))

    def _wait(self, rank: Rank, kernel: Kernel) -> None:
        """The computation's stream waits for a kernel of another one."""
        joined = Kernel(rank.number)
        self.launch(rank, joined, "compute", [kernel])
        self.later(LAUNCH_S, lambda: self.resume(rank, None))

    def _kernel(self, rank: Rank, seconds: float) -> None:
        self.launch(rank, Kernel(rank.number, seconds), "compute", [])
        self._go_on(rank, None)

    def _go_on(self, rank: Rank, value: Any) -> None:
        if rank.queued >= QUEUE:
            rank.waiting = value
        else:
            self.later(LAUNCH_S * (0.5 + self.random.random()), lambda: self.resume(rank, value))

    # Calls

    def _call(self, rank: Rank, name: str, op: str, sizes: tuple[int, ...], dtype: str, lazy: bool,
              root: int | None, pieces: tuple[int, ...]) -> None:  # fmt: skip
        group = self.groups[name]
        rank.calls[name] += 1
        rank.ops[name] += 1
        count = len(group.ranks)
        ins = [[size] for size in sizes]
        outs = [[self.given(op, size, count)] for size in sizes]
        kernel = Kernel(rank.number)
        entry = self.record(rank, group, f"nccl:{NAMES.get(op, op)}", ins, outs, dtype, kernel, is_p2p=False)
        place = rank.comms[name] = rank.comms[name] + 1
        told = (op, () if op == "all_to_all" else sizes, dtype, pieces)
        kernel.meets = lambda one: self.meet(group, place, one, told, root)

        def launched() -> None:
            self.enqueue(rank, entry)
            self.launch(rank, kernel, name, [rank.current] if rank.current else [])
            if not lazy:
                self.launch(rank, Kernel(rank.number), "compute", [kernel])
            self._go_on(rank, kernel)

        self.connect(rank, name, group.ranks, launched)

    def given(self, op: str, size: int, count: int) -> int:
        """How much a rank gets for so much of its own; of an exchange, whatever the others have for it."""
        if op == "all_to_all":
            return max(self.random.randrange(size // 2, size * 2), 1)
        return {"all_gather": size * count, "reduce_scatter": size // count}.get(op, size)

    def connect(self, rank: Rank, key: Any, members: Iterable[int], then: Callable[[], None]) -> None:
        """NCCL's first call of a communicator, which returns when all have come."""
        if not self.connects or (rank.number in self.connected[key] and not self.blocked[key]):
            then()
            return
        self.connected[key].add(rank.number)
        self.blocked[key].append(then)
        if self.connected[key] >= set(members):
            for one in self.blocked.pop(key):
                self.later(0.05, one)

    def _p2p(self, rank: Rank, name: str, parts: tuple[tuple[str, int, int], ...], lazy: bool, batched: bool) -> None:
        group = self.groups[name]
        rank.p2p[name] += 1
        kernel = Kernel(rank.number, parts=len(parts))
        own = group.ranks.index(rank.number)
        made = None
        for kind, peer, size in parts:
            rank.ops[name] += 1
            to = group.ranks.index(peer)
            words = f"nccl:send {own}->{to}" if kind == "send" else f"nccl:recv {own}<-{to}"
            made = self.record(rank, group, words, [[size]], [[size]], "BFloat16", kernel, is_p2p=True)
            made.is_part = batched
        if batched:
            sizes = [[size] for _, _, size in parts]
            made = self.record(rank, group, "nccl:coalesced", sizes[:0], sizes[:0], "BFloat16", kernel, is_p2p=False)
            made.number = rank.p2p[name]
        pair = (name, *sorted((rank.number, parts[0][1])))
        kernel.meets = lambda one: self.exchange(group, one, list(parts), "all" if batched else pair)
        stream = name if batched else pair
        assert made is not None
        self.enqueue(rank, made)
        self.launch(rank, kernel, stream, [rank.current] if rank.current else [])
        if not lazy:
            self.launch(rank, Kernel(rank.number), "compute", [kernel])
        self._go_on(rank, kernel)

    # Devices

    def launch(self, rank: Rank, kernel: Kernel, stream: Any, after: list[Kernel]) -> None:
        kernel.launched_s = self.now_s
        rank.queued += 1
        last = rank.streams.get(stream)
        kernel.after = 1
        for one in after if last is None or last in after else (*after, last):
            if one.done_s is None or one.rank != rank.number or rank.is_dead:
                kernel.after += 1
                one.following.append(kernel)
        rank.streams[stream] = kernel
        if stream == "compute":
            rank.current = kernel
        self.arrive(kernel)

    def arrive(self, kernel: Kernel) -> None:
        """One thing less that a kernel waits for."""
        kernel.after -= 1
        if kernel.after or self.ranks[kernel.rank].is_dead:
            return
        kernel.began_s = self.now_s
        if kernel.meets is not None:
            kernel.meets(kernel)
        elif kernel.seconds != float("inf"):
            self.later(kernel.seconds, lambda: self.end(kernel))

    def end(self, kernel: Kernel, is_nccl: bool = False) -> None:
        rank = self.ranks[kernel.rank]
        if rank.is_dead or kernel.done_s is not None:
            return
        if is_nccl:
            rank.nccl_done += 1
            if rank.nccl_done == self.frozen.get(rank.number):
                rank.is_dead = True
                return
        kernel.done_s = self.now_s
        rank.queued -= 1
        for one in kernel.following:
            self.arrive(one)
        if rank.queued == QUEUE - 1 and rank.waiting is not None:
            value, rank.waiting = rank.waiting, None
            self.later(LAUNCH_S, lambda: self.resume(rank, value))

    def meet(self, group: Group, place: int, kernel: Kernel, told: tuple[Any, ...], root: int | None) -> None:
        """All kernels of one collective run together; such that do not match never end."""
        here = self.met[group.name, place]
        took_s = 0.0005 * (1 + self.random.random())
        here.append((kernel, told, took_s))
        if root == kernel.rank and sum(told[1]) <= self.eager:
            self.later(took_s, lambda: self.end(kernel, is_nccl=True))
        if len(here) == len(group.ranks) and all(one[1] == told for one in here):
            for one, _, _ in here:
                self.later(took_s + self.random.random() * 0.0002, lambda one=one: self.end(one, is_nccl=True))
            del self.met[group.name, place]

    def exchange(self, group: Group, kernel: Kernel, parts: list[tuple[str, int, int]], comm: Any) -> None:
        for kind, peer, size in parts:
            is_send = kind == "send"
            ends = (kernel.rank, peer) if is_send else (peer, kernel.rank)
            channel = self.channels[group.name, comm, ends]
            if is_send and size <= self.eager:
                channel[0].append((None, size))
                self.later(0.0002, lambda: self.part(kernel))
            else:
                channel[0 if is_send else 1].append((kernel, size))
            while channel[0] and channel[1] and channel[0][0][1] == channel[1][0][1]:
                (one, _), (other, _) = channel[0].popleft(), channel[1].popleft()
                for end in (one, other):
                    if end is not None:
                        self.later(0.0004 + self.random.random() * 0.0002, lambda end=end: self.part(end))

    def part(self, kernel: Kernel) -> None:
        kernel.parts -= 1
        if not kernel.parts:
            self.end(kernel, is_nccl=True)

    # The recorder

    def record(self, rank: Rank, group: Group, words: str, ins: Any, outs: Any, dtype: str, kernel: Kernel,
               *, is_p2p: bool) -> Entry:  # fmt: skip
        fields = {
            "record_id": rank.records,
            "collective_seq_id": rank.calls[group.name],
            "p2p_seq_id": rank.p2p[group.name],
            "op_id": rank.ops[group.name],
            "profiling_name": words,
            "input_sizes": ins,
            "input_dtypes": [dtype] * len(ins),
            "output_sizes": outs,
            "output_dtypes": [dtype] * len(outs),
            "is_p2p": is_p2p,
            "thread_name": "python3",
        }
        rank.records += 1
        number = rank.p2p[group.name] if is_p2p else rank.calls[group.name]
        timeout_s = self.timeouts_s.get(group.about, 600.0)
        entry = Entry(fields, group, self.now_s, kernel, number=number, timeout_s=timeout_s)
        rank.entries.append(entry)
        if len(rank.entries) > self.ring:
            rank.entries.popleft()
        return entry

    def enqueue(self, rank: Rank, entry: Entry) -> None:
        rank.enqueued[entry.group.name] = entry.number
        rank.watched.append(entry)

    def retired_s(self, rank: Rank, entry: Entry) -> float | None:
        """When the watchdog has come to see that a work has ended."""
        done_s = entry.kernel.done_s
        if entry.is_part or done_s is None:
            return None
        turns = int((done_s - self.phase[rank.number]) / POLL_S) + 1
        seen_s = self.phase[rank.number] + turns * POLL_S
        return seen_s if seen_s <= self.now_s else None

    def take(self, rank: int, **how: Any) -> None:
        if not self.ranks[rank].has_exited:
            self.taken[rank] = self.dump(rank, **how)

    def dump(self, number: int, *, version: str = "2.10", only_active: bool = False, gives_up: bool = False,
             clock_s: float = 0.0, frames: bool = True, status: bool = True,
             config: bool = True) -> dict[str, Any]:  # fmt: skip
        """What a rank would dump now.

        Args:
            gives_up: Whether the watchdog has retired what is over its timeout.
        """
        rank = self.ranks[number]
        own = [group for group in self.groups.values() if number in group.ranks]
        ids = {group.name: place + (place > 0) for place, group in enumerate(own)}
        made = []
        given_up: dict[str, int] = {}
        for entry in rank.entries:
            kernel = entry.kernel
            state, done_s = self.state(entry)
            retired = self.retired_s(rank, entry) is not None
            is_late = gives_up and self.now_s - entry.created_s > entry.timeout_s
            if is_late and entry.is_outstanding and given_up.setdefault(entry.group.name, entry.number) == entry.number:
                retired = True
            elif only_active and retired:
                continue
            shift = BEGAN_NS + int(clock_s * 1e9)
            fields = {
                **({"frames": _frames(entry.fields["profiling_name"])} if frames else {}),
                **entry.fields,
                "pg_id": ids[entry.group.name],
                "process_group": (entry.group.name, entry.group.about),
                "time_created_ns": shift + int(entry.created_s * 1e9),
                "state": state,
                "time_discovered_started_ns": shift + int(kernel.began_s * 1e9)
                if self.timing and kernel.began_s is not None and not entry.is_part
                else None,
                "time_discovered_completed_ns": None if done_s is None else shift + int((done_s + 0.05) * 1e9),
                "retired": retired,
                "timeout_ms": int(entry.timeout_s * 1000),
            }
            if version in ("2.9", "2.10"):
                fields["thread_id"] = "2345624434" + str(number)
            else:
                fields.pop("thread_name")
            made.append(fields)
        dump: dict[str, Any] = {"version": version, "nccl_version": "2.27.5", "entries": made}
        if config:
            dump["pg_config"] = {
                one.name: {"name": one.name, "desc": one.about, "ranks": str(list(one.ranks))} for one in own
            }
        if status:
            dump["pg_status"] = {
                str(ids[name]): {
                    "last_enqueued_collective": enqueued,
                    "last_started_collective": self.counted(rank, name, started=True) if self.timing else -1,
                    "last_completed_collective": given_up.get(name, self.counted(rank, name)),
                }
                for name, enqueued in rank.enqueued.items()
            }
        return dump

    def state(self, entry: Entry) -> tuple[str, float | None]:
        """What the recorder says of it, and when its device was done."""
        kernel = entry.kernel
        if entry.is_part:
            return "scheduled", None
        if kernel.launched_s is None:
            # An event that was never recorded.
            return "completed", entry.created_s + 0.1
        if kernel.done_s is not None:
            return "completed", kernel.done_s
        return "started" if kernel.began_s is not None and self.timing else "scheduled", None

    def counted(self, rank: Rank, name: str, started: bool = False) -> int:
        if started:
            numbers = [one.number for one in rank.watched if one.group.name == name and one.kernel.began_s is not None]
            return numbers[-1] if numbers else -1
        seen = [(self.retired_s(rank, one), one.number) for one in rank.watched if one.group.name == name]
        done = [(when_s, number) for when_s, number in seen if when_s is not None]
        return max(enumerate(done), key=lambda one: (one[1][0], one[0]))[1][1] if done else -1


@cache
def _frames(words: str) -> list[dict[str, Any]]:
    """Of equal stacks a dump holds the frames once."""
    op = words.split(":")[-1].split(" ")[0]
    return [
        {"name": op, "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 2501},
        {"name": "train_step", "filename": "/workspace/train.py", "line": 120 + len(words)},
        {"name": "main", "filename": "/workspace/train.py", "line": 310},
    ]  # fmt: skip


def write(folder: Path, dumps: Dumps, *, as_json: bool = False) -> None:
    for rank, dump in dumps.items():
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(json.dumps(_as_json(dump)).encode() if as_json else pickle.dumps(dump, protocol=2))


def _as_json(dump: dict[str, Any]) -> dict[str, Any]:
    """As ``dump_json`` writes it: numbers of ``pg_status`` are text, times that are not known 0."""
    told = dict(dump)
    if "pg_status" in told:
        told["pg_status"] = {key: {name: str(n) for name, n in one.items()} for key, one in told["pg_status"].items()}
    entries = [
        {key: 0 if value is None and key.startswith("time_disc") else value for key, value in entry.items()}
        for entry in told.pop("entries")
    ]
    return {**told, **({"entries": entries} if entries else {})}
