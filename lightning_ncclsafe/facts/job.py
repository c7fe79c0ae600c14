"""What one rank saw, and what a job is: the only data that rules may look at.

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
from lightning_ncclsafe.facts.processes import InspectionFacts, ProcessFacts
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
    """All ranks have presented their dataloaders, and these were compared."""
    PREFLIGHT = "preflight"
    """What ranks have found on their hosts before training was compared."""
    RECORDED = "recorded"
    """Nobody was asked: dumps and logs of a run that is over were read."""
    INSPECTED = "inspected"
    """Nobody was asked: the ranks' processes were looked at from outside, several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that keeps the others waiting again and again, by the times of its collectives.

    Attributes:
        rank: Global rank.
        phase: Where it falls behind: ``"data loading"``, ``"forward/backward"``, …; empty where that cannot be told.
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
    """All that one rank knows of itself at one moment.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its host.
        local_world_size: Number of ranks that were to be started on its host; 0 where unknown.
        host: Host name.
        pid: Process id.
        taken_ns: Wall-clock time at which the facts were taken, nanoseconds since the epoch.
        progress: How far its Trainer has come.
        stack: Main thread's Python stack, outermost frame first; of the exception's traceback nothing is in here.
        thread_stack: That of another thread that is in a collective which the user's code has called; empty if none is.
        groups: Process groups this rank belongs to, as far as a recorder tells of them, or they were not used yet.
        unrecorded: Process groups this rank has used, and of whose collectives nothing is known.
        collectives: The recorder's last entries, oldest first; all that have not completed are among them.
        units: What of the model the outstanding ones of these send, as far as their sizes tell.
        host_facts: Memory, swap and cores.
        machine: What held it up besides its code: turns on a core, pressure, its GPU, its network.
        peers: Ranks of the same host as seen from this rank, itself excluded.
        workers: Child processes of this rank that run the loader's code.
        loaders: Dataloaders of the current loop.
        data: The dataloaders that the rank presents for comparison; None where the incident is not about data.
        preflight: What the rank has found on its host before training; None where the incident is not about that.
        storage: Directories of loggers and checkpoints.
        loggers: Loggers whose writes are off the training thread.
        stragglers: Ranks that kept others waiting before, as far as this rank has been told.
        exception: The exception that this rank raised, if any.
        failed_save: What the last save of a checkpoint on this rank raised, also where that was caught; None where it
            went well, or has not ended.
        caught: What its code has caught, and what has ended its other threads, as far as that was seen; oldest first.
        steps: What its training steps have left out, and what it logs on all ranks.
        trainer: What its Trainer has been told, and how its training loop has ended; None where it does not ``fit``.
        record: What was read of this rank; None where it answered itself.
        inspection: How it was looked at from outside; None likewise.
        versions: Versions of what matters: ``{"torch": "2.13.0", …}``.
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
    groups: tuple[Group, ...] = ()
    unrecorded: tuple[UnrecordedGroup, ...] = ()
    collectives: tuple[Collective, ...] = ()
    units: tuple[ModelUnit, ...] = ()
    host_facts: HostFacts = field(default_factory=HostFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    peers: tuple[ProcessFacts, ...] = ()
    workers: tuple[ProcessFacts, ...] = ()
    loaders: tuple[LoaderFacts, ...] = ()
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
    inspection: InspectionFacts | None = None
    versions: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One occasion on which all ranks were asked for their facts.

    Attributes:
        number: Counts the incidents of a run, from 1.
        kind: Why ranks were asked.
        opened_by: Rank that asked.
        opened_ns: Wall-clock time, nanoseconds since the epoch.
        idle_s: Seconds for which the asking rank had made no progress.
        suspect_after_s: The threshold that applied, seconds.
        timeout_s: The hard limit that applies, seconds.
    """

    number: int
    kind: IncidentKind
    opened_by: int
    opened_ns: int = 0
    idle_s: float = 0.0
    suspect_after_s: float = 0.0
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentHost:
    """A host on which no rank answered, and nobody saw a rank's process.

    Attributes:
        host: Its name, as its ranks gave it when they started.
        ranks: The ranks on it, ascending.
        address: The address that was tried; empty where none is known.
        answers: Whether it answered on the network, to accept a connection or to refuse it; None where that was not
            tried, or could not be told.
        seen_from: Name of the host that tried.
        tried: What came of it, in words.
    """

    host: str
    ranks: tuple[int, ...]
    address: str = ""
    answers: bool | None = None
    seen_from: str = ""
    tried: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A job at the moment of an incident: the ranks that answered, and by omission those that did not.

    Attributes:
        incident: Why the ranks were asked.
        world_size: Number of ranks in the job.
        ranks: The ranks that answered, in ascending order of rank.
        witnessed: What other processes on its host say of a silent rank, at most one entry per rank; also of one that
            kept Python's lock when it was looked at, and has answered since.
        absent: Silent ranks that have not come to this call of the Trainer, ascending: the others have joined the
            process group in it, or before it, and these have not said that they watch.
        missing: What could not be shared or gathered, one sentence each.
        silent_hosts: Hosts on which no rank answered, as far as it is known who runs where.
        tried: The other hosts of the ranks that answered, tried at the addresses that their back ends use.
        launch: What started the job, equal for all its starts: ``"SLURM job 4711"``; empty where nothing says so.
        unnamed: Exceptions in a log that does not say which rank raised them.
        is_sized: Whether ``world_size`` is known, and not only the fewest ranks that there can have been.
        outdated: Ranks whose dumps are of an earlier moment than the others', and were left out, ascending.
        log: What logs say beyond single ranks.
        elsewhere: Ranks that nobody has looked at, as they are on hosts that were not inspected, ascending.
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
    log: LogFacts = field(default_factory=LogFacts)
    elsewhere: tuple[int, ...] = field(default=(), metadata={"ranges": True})

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that did not answer, ascending. Silence is a fact; that nobody has looked is none."""
        answered = {facts.rank for facts in self.ranks}.union(self.elsewhere)
        return tuple(rank for rank in range(self.world_size) if rank not in answered)
