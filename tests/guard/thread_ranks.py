"""Guards of several ranks in one process: threads, a shared memory, and facts that the tests set by hand."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_ncclsafe.exchange import Exchange, MemoryExchange, SharedMemory
from lightning_ncclsafe.facts import (
    Action,
    Collective,
    ExceptionFacts,
    Frame,
    Group,
    Phase,
    ProcessFacts,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard.guard import Guard
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.probes.rank_info import RankInfo
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.settings import Limits

BROADCAST = Frame(file="/site-packages/torch/distributed/distributed_c10d.py", line=9, function="broadcast")
COMPILE = Frame(file="/site-packages/torch/_dynamo/convert_frame.py", line=9, function="compile_inner")
PREPARED = Frame(file="/site-packages/lightning/fabric/utilities/distributed.py", line=428, function="__exit__")
EVALUATE = Frame(
    file="/home/me/train.py", line=42, function="evaluate", user=True, rank_condition="if is_master(args):  (line 40)"
)


class HandMadePeers:
    """The other ranks of its host: as long as they answer, they run, and those that are silent are stopped."""

    def __init__(self) -> None:
        self.known: tuple[RankInfo, ...] = ()

    def look_at(self, peer: RankInfo) -> ProcessFacts:
        return ProcessFacts(pid=peer.pid, rank=peer.rank, state="running")

    def witness(self, silent: object) -> list[ProcessFacts]:
        return [ProcessFacts(pid=peer.pid, rank=peer.rank, state="stopped") for peer in silent]  # type: ignore[attr-defined]


class HandMadeProbe:
    """A rank whose facts are set by hand."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.info = RankInfo(rank=rank, host="node", pid=1000 + rank)
        self.peers = HandMadePeers()
        self.exception: ExceptionFacts | None = None
        self.finished = False
        self.batch = 0
        self.waits = False
        self.closed = False
        self.broken: Exception | None = None
        self.compiles = False
        self.awaits_preparation = False
        self.stands_in: tuple[Frame, ...] = ()
        self.slept_s: float | None = None
        self.has_own_lock = False

    def position(self) -> object:
        return self.batch, self.waits

    def asleep_s(self) -> float | None:
        return self.slept_s

    def waits_for_own_lock(self) -> bool:
        return self.has_own_lock

    def snapshot(self, idle_s: float) -> RankFacts:
        if self.broken is not None:
            raise self.broken
        outstanding = Collective(group="0", seq=8, op="broadcast", backend="gloo", output_sizes=((1,),))
        group = Group(name="0", ranks=tuple(range(self.world_size)), last_completed=7)
        phase = Phase.FINISHED if self.finished else Phase.TRAIN
        return RankFacts(
            rank=self.rank,
            host="node",
            progress=Progress(
                phase=phase, batch_idx=7 + self.batch, idle_s=idle_s, actions=(Action(name="x", for_s=1),)
            ),
            stack=self._stack(),
            groups=(replace(group, last_enqueued=8 if self.waits else 7),),
            collectives=(outstanding,) if self.waits else (),
            exception=self.exception,
        )

    def _stack(self) -> tuple[Frame, ...]:
        if self.stands_in:
            return self.stands_in
        if self.waits:
            return (PREPARED,) if self.awaits_preparation else (BROADCAST,)
        return (EVALUATE, *([COMPILE] if self.compiles else []))

    look = snapshot

    def note_memory(self) -> None:
        pass

    def note_machine(self) -> None:
        pass

    def note_place(self, idle_s: float) -> None:
        pass

    def forget_place(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@dataclass
class Job:
    """Some ranks with their guards, and everything they said."""

    folder: Path
    world_size: int = 3
    local_ranks: tuple[int, ...] = (0, 1, 2)
    limits: Limits = field(default_factory=lambda: Limits(suspect_after_s=0.1, timeout_s=1000.0, on_timeout="abort"))
    incidents: list[IncidentNumbers] = field(default_factory=lambda: [IncidentNumbers() for _ in range(3)])
    said: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    saved: set[tuple[int, bool]] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        shared = SharedMemory()
        self.exchanges: list[Exchange] = [MemoryExchange(shared) for _ in range(self.world_size)]
        self.probes = [HandMadeProbe(rank, self.world_size) for rank in range(self.world_size)]
        self.guards: list[Guard] = []
        self.moments = [PhaseKind(phase=Phase.TRAIN, per_batch=True)] * self.world_size

    def start(self, *, without: int = -1) -> None:
        for rank in range(self.world_size):
            local_rank = self.local_ranks[rank]
            place = Place(
                rank=rank, local_rank=local_rank, world_size=self.world_size, local_world_size=self.world_size
            )
            guard = Guard(
                place=place,
                limits=self.limits,
                report_dir=self.folder,
                exchange=MemoryExchange(),
                probe=self.probes[rank],  # type: ignore[arg-type]
                incidents=self.incidents[rank],
                save=lambda cause, raised, rank=rank: self._save(rank, raised),  # type: ignore[misc]
                phase_kind=lambda rank=rank: (self.moments[rank], 7),  # type: ignore[misc]
                say=self._say,
            )
            self.guards.append(guard)
            guard.connect(self.exchanges[rank])
        for rank, guard in enumerate(self.guards):
            if rank != without:
                guard.start()

    def _say(self, text: str) -> None:
        with self.changed:
            self.said.append(text)
            self.changed.notify_all()

    def _save(self, rank: int, raised: bool) -> Callable[[], None]:
        with self.changed:
            self.saved.add((rank, raised))
            self.changed.notify_all()
        return lambda: None

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.append(rank)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20), self.said

    def reports(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*/report.json"))]

    def stop(self) -> None:
        for guard in self.guards:
            guard.close()


def wait_on_all_but(job: Job, *free: int) -> None:
    for rank, probe in enumerate(job.probes):
        probe.waits = rank not in free
