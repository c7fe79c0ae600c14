"""What one rank saw, and what a job is: the only data that rules read.

Everything here is frozen, serialisable (see :mod:`lightning_ncclsafe.facts.codec`) and free of torch and Lightning, so
that a report can be judged again on a login node, years later, from its ``report.json`` alone.
"""

from dataclasses import dataclass, field
from enum import Enum

from lightning_ncclsafe.facts.collectives import Collective, Group, ModelUnit, UnrecordedGroup
from lightning_ncclsafe.facts.data import DataFacts, LoaderFacts
from lightning_ncclsafe.facts.frames import CaughtException, ExceptionFacts, Frame
from lightning_ncclsafe.facts.machine import HostFacts, MachineFacts, TriedAddress
from lightning_ncclsafe.facts.preflight import PreflightFacts
from lightning_ncclsafe.facts.processes import (
    AwaitedThread,
    ChildProcess,
    ExitCall,
    FileLockFacts,
    InspectionFacts,
    ProcessFacts,
    ThreadLockFacts,
)
from lightning_ncclsafe.facts.recorded import LogFacts, RecordFacts
from lightning_ncclsafe.facts.trainer import LoggerFacts, Progress, StepFacts, StorageFacts, TrainerFacts


class IncidentKind(str, Enum):
    """Why ranks were asked for their facts."""

    SUSPECT = "suspect"
    """A rank made no progress for ``suspect_after``."""
    EXCEPTION = "exception"
    """A rank raised."""
    TIMEOUT = "timeout"
    """A rank made no progress for ``timeout``."""
    DATA = "data"
    """The dataloaders of all ranks were compared."""
    PREFLIGHT = "preflight"
    """The hosts of all ranks were compared before training."""
    RECORDED = "recorded"
    """Nobody was asked: dumps and logs of a run that is over were read."""
    INSPECTED = "inspected"
    """Nobody was asked: the ranks' processes were inspected from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that keeps the others waiting again and again, by the times of its collectives.

    Attributes:
        rank: Global rank.
        phase: Where it falls behind: ``"data loading"``, ``"forward/backward"``, …; empty if unknown.
        share: Share of the last steps in which it was the last and late, from 0 to 1.
        of_steps: Number of those steps.
        mean_s: How late it was then, on average, seconds.
        op: The collective for which the others waited most often.
        since_ns: When this began, wall-clock time, nanoseconds since the epoch.
        until_ns: When it was last seen to be so.
        is_over: Whether it has not been late for a while.
    """

    rank: int
    phase: str = ""
    share: float = 0.0
    of_steps: int = 0
    mean_s: float = 0.0
    op: str = ""
    since_ns: int = 0
    until_ns: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Everything that one rank knows about itself at one moment.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its host.
        local_world_size: Number of ranks that should run on its host; 0 if unknown.
        host: Host name; with the beginning of its boot id if that is ``localhost``.
        pid: Process id.
        taken_ns: Wall-clock time at which the facts were taken, nanoseconds since the epoch.
        progress: The progress of its Trainer.
        stack: Main thread's Python stack, outermost frame first; without the traceback of its exception.
        thread_stack: Stack of another thread that is in a collective called by the user's code; empty if there is none.
        breakpoint_at: The call that has made its main thread pause in a debugger: pdb pauses at the line after it. None
            if it is not paused, or not by a call that is known.
        groups: Process groups of this rank that a recorder covers, or that were not used yet.
        unrecorded: Process groups that this rank has used, but whose collectives are unknown.
        collectives: The recorder's last entries, oldest first, including all that have not completed.
        units: The parts of the model that the outstanding collectives send, as far as their sizes show.
        host_facts: Memory, swap and cores.
        machine: What may delay it besides its code: waits for a core, pressure, its GPU, its network.
        peers: Other ranks of the same host, as seen from this rank.
        workers: Child processes of this rank that run the loader's code.
        awaited_processes: The child process that its main thread waits for, and those that this one has started.
        awaited_file: What its main thread reads from or writes to, according to the kernel: a path, ``"pipe:[4711]"``;
            empty if it does neither, or that is unknown.
        reads_alone: Whether that is a pipe from which it reads, and which no other process has open.
        own_path_at: ``"file:line in function"`` where a value is computed that each process has for itself, and of
            which the path is made for which a loop of its main thread waits; empty if that is not so, or unknown.
        file_lock: The lock on a file that its main thread waits for; None if it waits for none.
        thread_lock: The thread lock that its main thread waits for; None if none is known.
        awaited_thread: The thread of its process that its main thread waits for; None if none is known.
        held_locks: Paths of the files on which its process holds a lock.
        loaders: Dataloaders of the current loop.
        data_ends_at: For each stage whose loaders exist, ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``, the
            line that decides how many batches they have: ``"file:line in function"``; none if several do.
        data: The dataloaders of a stage, for comparison; None if the incident is not about data.
        preflight: What the rank found on its host before training; None if the incident is not about that.
        storage: Directories of loggers and checkpoints.
        loggers: Loggers whose writes are off the training thread.
        stragglers: Ranks that kept others waiting before, as far as this rank knows.
        exception: The exception that this rank raised, if any.
        failed_save: What the last save of a checkpoint on this rank raised, even if it was caught; None if the save
            succeeded, or has not ended.
        caught: Exceptions that its code caught or that ended its other threads, as far as they were seen; oldest first.
        steps: What its training steps skipped, and what it logs on all ranks.
        trainer: The settings of its Trainer, and how its training loop ended; None if it does not ``fit``.
        record: What was read about this rank; None if it answered itself.
        exit_calls: All statements in its loaded source, of the user's functions, that end a process; only if a process
            has ended, and empty if they are not all known.
        inspection: How it was inspected from outside; None if it answered itself.
        versions: Versions of relevant packages: ``{"torch": "2.13.0", …}``.
        missing: What could not be determined, one sentence each.
    """

    rank: int
    progress: Progress
    local_rank: int = 0
    local_world_size: int = 0
    host: str = ""
    pid: int = 0
    taken_ns: int = 0
    stack: tuple[Frame, ...] = ()
    thread_stack: tuple[Frame, ...] = ()
    breakpoint_at: Frame | None = None
    groups: tuple[Group, ...] = ()
    unrecorded: tuple[UnrecordedGroup, ...] = ()
    collectives: tuple[Collective, ...] = ()
    units: tuple[ModelUnit, ...] = ()
    host_facts: HostFacts = field(default_factory=HostFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    peers: tuple[ProcessFacts, ...] = ()
    workers: tuple[ProcessFacts, ...] = ()
    awaited_processes: tuple[ChildProcess, ...] = ()
    awaited_file: str = ""
    reads_alone: bool = False
    own_path_at: str = ""
    file_lock: FileLockFacts | None = None
    thread_lock: ThreadLockFacts | None = None
    awaited_thread: AwaitedThread | None = None
    held_locks: tuple[str, ...] = ()
    loaders: tuple[LoaderFacts, ...] = ()
    data_ends_at: dict[str, str] = field(default_factory=dict)
    data: DataFacts | None = None
    preflight: PreflightFacts | None = None
    storage: tuple[StorageFacts, ...] = ()
    loggers: tuple[LoggerFacts, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    exception: ExceptionFacts | None = None
    failed_save: ExceptionFacts | None = None
    caught: tuple[CaughtException, ...] = ()
    steps: StepFacts = field(default_factory=StepFacts)
    trainer: TrainerFacts | None = None
    record: RecordFacts | None = None
    exit_calls: tuple[ExitCall, ...] = ()
    inspection: InspectionFacts | None = None
    versions: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def raised_stack(self) -> tuple[Frame, ...]:
        """Where the exception was raised that has left the Trainer, outermost frame first; empty if there is none."""
        return self.exception.stack if self.exception is not None else ()

    @property
    def last_stack(self) -> tuple[Frame, ...]:
        """The same if there is one, as only the guard's frames are left on the stack then; else the present stack."""
        return self.raised_stack if self.exception is not None else self.stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One occasion on which all ranks were asked for their facts.

    Attributes:
        number: Counts the incidents of a run, from 1.
        kind: Why ranks were asked.
        opened_by: Rank that asked.
        opened_ns: Wall-clock time, nanoseconds since the epoch.
        idle_s: Seconds without progress of the asking rank.
        suspect_after_s: The threshold that applied, seconds.
        timeout_s: The hard limit that applies, seconds.
        shortest_timeout_s: The shortest hard limit of all phases, seconds; 0 if unknown.
    """

    number: int
    kind: IncidentKind
    opened_by: int
    opened_ns: int = 0
    idle_s: float = 0.0
    suspect_after_s: float = 0.0
    timeout_s: float = 0.0
    shortest_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentHost:
    """A host on which no rank answered, and nobody saw a rank's process.

    Attributes:
        host: Its name, as its ranks gave it when they started.
        ranks: The ranks on it, ascending.
        address: The address that was tried; empty where none is known.
        answers: Whether it answered on the network, to accept a connection or to refuse it; None where that was not
            tried, or is unknown.
        seen_from: Name of the host that tried.
        tried: The outcome, in words.
    """

    host: str
    ranks: tuple[int, ...]
    address: str = ""
    answers: bool | None = None
    seen_from: str = ""
    tried: str = ""


STORE_UNUSABLE = "The job's store cannot be used"
"""How a sentence of :attr:`JobFacts.missing` begins that only follows where the process that had the store is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job at the moment of an incident: the ranks that answered, and by omission those that did not.

    Attributes:
        incident: Why the ranks were asked.
        world_size: Number of ranks in the job.
        ranks: The ranks that answered, in ascending order of rank.
        witnessed: What other processes of the host see of a silent rank, at most one entry per rank; also of a rank
            that held the GIL when it was seen, and has answered since.
        absent: Silent ranks that have not reached this call of the Trainer, ascending: the others have joined the
            process group in it, or before it, and the guard of these has not started.
        missing: What could not be shared or gathered, one sentence each.
        silent_hosts: Hosts on which no rank answered, as far as the placement of ranks is known.
        tried: The other hosts of the ranks that answered, tried at the addresses that their back ends use.
        launch: What started the job, equal for all its starts: ``"SLURM job 4711"``; empty if unknown.
        unnamed: Exceptions in a log that does not say which rank raised them.
        is_sized: Whether ``world_size`` is known; otherwise it is the smallest possible number.
        outdated: Ranks whose dumps are of an earlier moment than the others', and were left out, ascending.
        left_out: Ranks whose dumps were left out because they are of another run, or because other ranks have written
            them than their names say, ascending.
        moved: A rank that made progress again before the facts of all others were taken, so that these are of different
            moments; None if there is none.
        log: What logs contain beyond single ranks.
        elsewhere: Ranks on hosts that were not inspected, ascending.
    """

    incident: Incident
    world_size: int
    ranks: tuple[RankFacts, ...]
    witnessed: tuple[ProcessFacts, ...] = ()
    absent: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    silent_hosts: tuple[SilentHost, ...] = ()
    tried: tuple[TriedAddress, ...] = ()
    launch: str = ""
    unnamed: tuple[ExceptionFacts, ...] = ()
    is_sized: bool = True
    outdated: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    moved: int | None = None
    log: LogFacts = field(default_factory=LogFacts)
    elsewhere: tuple[int, ...] = field(default=(), metadata={"ranges": True})

    @property
    def is_compared(self) -> bool:
        """Whether ranks were only compared, not asked because something is wrong."""
        return self.incident.kind in (IncidentKind.DATA, IncidentKind.PREFLIGHT)

    @property
    def is_recorded(self) -> bool:
        """Whether the facts were read from dumps or logs of a run."""
        return self.incident.kind is IncidentKind.RECORDED

    @property
    def is_inspected(self) -> bool:
        """Whether the facts were taken from outside, of processes that were not prepared for it."""
        return self.incident.kind is IncidentKind.INSPECTED

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that did not answer, ascending. A rank that nobody has asked is not silent."""
        answered = {facts.rank for facts in self.ranks}.union(self.elsewhere)
        return tuple(rank for rank in range(self.world_size) if rank not in answered)
