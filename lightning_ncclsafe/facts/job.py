"""What one rank saw, and what a job is: the only data that rules may look at.

Everything here is frozen, serialisable (see :mod:`lightning_ncclsafe.facts.codec`) and free of torch and Lightning, so
that a report can be judged again on a login node, years later, from its ``report.json`` alone.
"""

from dataclasses import dataclass, field
from enum import Enum

from lightning_ncclsafe.facts.data import DataFacts, LoaderFacts
from lightning_ncclsafe.facts.machine import MachineFacts, TriedAddress
from lightning_ncclsafe.facts.preflight import PreflightFacts
from lightning_ncclsafe.facts.recorded import LogFacts, RecordFacts
from lightning_ncclsafe.facts.trainer import LoggerFacts, StepFacts, TrainerFacts

ELSE = "else of "
"""What a rank condition begins with where the line is in the branch for ranks for which it does not hold."""

VOTE_GROUP = "ncclsafe votes"
"""Description of our own process group, on which ranks vote on whether all of them have a next batch, and wait."""
VOTE_AHEAD_GROUP = "ncclsafe votes ahead"
"""Of the one on which they do so one batch ahead: such a vote is on its way while a rank trains."""
VOTE_GROUPS = (VOTE_GROUP, VOTE_AHEAD_GROUP)


class Phase(str, Enum):
    """Where in its life a rank's Trainer stands."""

    INIT = "init"
    """Before the first batch or sanity check: process group, setup hooks, model construction, restoring."""
    SANITY_CHECK = "sanity_check"
    TRAIN = "train"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"
    CHECKPOINT = "checkpoint"
    """A checkpoint is being written, in whatever stage."""
    FINISHED = "finished"
    """The Trainer's function returned on this rank; the process waits for its peers before it leaves."""
    UNKNOWN = "unknown"
    """Nothing of the Trainer is known: the facts were read from a Flight Recorder's dump or a log."""


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
class Frame:
    """One Python frame of a stack.

    Attributes:
        file: Path of the source file as Python names it.
        line: Line number, from 1.
        function: Name of the function.
        code: The source line, stripped; empty where the source cannot be read.
        user: Whether the file is the user's own code: neither the standard library, nor an installed package.
        rank_condition: The condition on the rank that encloses this line in the source, with its line number, e.g.
            ``"if trainer.is_global_zero:  (line 41)"``, ``"else of if rank == 0:  (line 12)"``; empty if there is none.
        mark: What code of this package says of itself, see :class:`~lightning_ncclsafe.code.marks.Mark`; empty for that
            of others, and where the frame was not taken by a probe.
        handler: What goes on after an exception that is raised within the ``try`` that encloses this line, with its
            line number, e.g. ``"except RuntimeError:  (line 47)"``; empty if there is none, or if the line also stands
            under a condition.
    """

    file: str
    line: int
    function: str
    code: str = ""
    user: bool = False
    rank_condition: str = ""
    mark: str = ""
    handler: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as one rank's Flight Recorder recorded it.

    Attributes:
        group: Name of the process group, unique in the job (``"0"`` is the default group).
        seq: Sequence number within the group, from 1; equal numbers on different ranks should be the same collective.
        op: Operation without the back end's prefix: ``"all_reduce"``, ``"broadcast"``, ``"barrier"``, …
        backend: ``"nccl"``, ``"nccl2"``, ``"gloo"``, …
        completed: Whether the recorder saw it end on this rank.
        started: Whether the recorder saw it start on the device (NCCL only; always false on gloo).
        launching: Whether the host may still be inside the call, so that the device has not been given it.
        gave_up: Whether NCCL's watchdog has given it up; it has not ended then.
        input_sizes: Shapes of the inputs.
        output_sizes: Shapes of the outputs.
        dtypes: Data types of the inputs.
        created_ns: Wall-clock time of the call, nanoseconds since the epoch.
        duration_ms: Duration on the device in milliseconds where the back end gives it, else None.
        timeout_ms: Timeout that applies to this collective, in milliseconds; 0 where unknown.
        is_p2p: Whether it is a point-to-point operation, which has its own numbering; those that were started together
            have one number, and end together.
        stack: Where it was called, outermost frame first. Of a live rank the user's line below the Trainer, that under
            a condition on the rank, and what has called ``torch.distributed``, with the newest call of each ``site``;
            of dumps and logs what they say.
        site: What its whole stack below the Trainer comes to, in 12 hexadecimal digits: calls of several ranks that
            have the same were made at the same place. Empty where that is unknown.
    """

    group: str
    seq: int
    op: str
    backend: str = ""
    completed: bool = False
    started: bool = False
    launching: bool = False
    gave_up: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    created_ns: int = 0
    duration_ms: float | None = None
    timeout_ms: int = 0
    is_p2p: bool = False
    stack: tuple[Frame, ...] = ()
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as one rank sees it.

    Attributes:
        name: Name of the group, unique in the job.
        description: The group's description (``"default_pg"`` for the default group).
        ranks: Global ranks of the members; empty where unknown.
        last_enqueued: Highest sequence number this rank has called; 0 if none.
        last_started: Highest sequence number that started on the device; -1 where the back end does not say.
        last_completed: Highest sequence number that completed on this rank; 0 if none.
        is_mixed: Whether sends and receives were seen in it, which PyTorch's own counters count along.
    """

    name: str
    description: str = ""
    ranks: tuple[int, ...] = field(default=(), metadata={"ranges": True})
    last_enqueued: int = 0
    last_started: int = -1
    last_completed: int = 0
    is_mixed: bool = False


class NotRecorded(str, Enum):
    """Why nothing is known of the collectives of a group."""

    NO_ENTRY = "no-entry"
    """The recorder of its back end can be read, and has no entry of the group although collectives were called."""
    NO_DUMP = "no-dump"
    """This build of PyTorch has no function that dumps the recorder of its back end."""
    UNKNOWN_BACKEND = "unknown-back-end"
    """It is not known where its back end records, if it does."""
    LOST = "lost"
    """The recorder has entries, and those of the group have been overwritten."""
    DRIVER_SILENT = "driver-silent"
    """CUDA's driver did not answer, and to read the recorder would have stopped all Python of the rank."""
    OUTSIDE = "outside"
    """The rank was looked at from outside, where its recorder cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedGroup:
    """A process group of a rank of whose collectives nothing is known; it is not among the rank's groups.

    Attributes:
        name: Name of the group.
        why: Why nothing is known.
        description: The group's description.
        backend: Names of its back ends, ``"gloo"``, ``"gloo,xccl"``.
        calls: How many collectives the rank has called in it, by the group's own count; -1 where it has none.
    """

    name: str
    why: NotRecorded
    description: str = ""
    backend: str = ""
    calls: int = -1


class UnitKind(str, Enum):
    """What of a model is sent in one collective."""

    DDP_BUCKET = "ddp-bucket"
    """Gradients that DistributedDataParallel reduces together."""
    FSDP_UNIT = "fsdp-unit"
    """Parameters that FSDP (a FlatParameter) or FSDP2 (``fully_shard``) gathers, and whose gradients it reduces."""
    PARAMETER = "parameter"
    """One parameter that is spread over ranks (a DTensor)."""
    METRIC = "metric"
    """A torchmetrics metric that is being synchronised at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """What of the model an outstanding collective sends; several of the same size are one.

    Attributes:
        kind: What it is.
        name: Module or parameter as the model names it (empty for the model itself); of a bucket ``"1 of 3"``.
        parameters: Names of its parameters in the order in which they are sent: the first four and the last four.
        parameter_count: How many it has.
        elements: Elements of all ranks together, padding included.
        shard_elements: Elements of one rank, padding included; 0 where every rank has all of them.
        size_bytes: Bytes of all ranks together, in the data type of the parameters.
        groups: Names of the process groups it is sent in; empty where unknown.
        is_root: Whether it is the outermost FSDP unit, which a forward pass gathers first.
        type: Class of a metric; empty for all else.
        alike: How many units of this kind have these very sizes.
        last: Name of the last one of those; empty where there is only one.
    """

    kind: UnitKind
    name: str = ""
    parameters: tuple[str, ...] = ()
    parameter_count: int = 0
    elements: int = 0
    shard_elements: int = 0
    size_bytes: int = 0
    groups: tuple[str, ...] = ()
    is_root: bool = False
    type: str = ""
    alike: int = 1
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something Lightning is doing, by its profiler's name or a barrier's: hooks, data fetches, checkpoint saves.

    Attributes:
        name: E.g. ``"[LightningModule]Net.training_step"``, ``"[Callback]ModelCheckpoint.on_validation_end"``,
            ``"[_TrainingEpochLoop].train_dataloader_next"``, ``"save_checkpoint"``, ``"barrier:post_setup"``,
            ``"init_process_group"``.
        for_s: Seconds since it began.
    """

    name: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank's Trainer has come.

    Attributes:
        phase: Where in its life the Trainer stands.
        actions: What is going on, outermost first; empty between hooks.
        last_action: The last action that ended, for the moments between two hooks.
        epoch: Current epoch, from 0; -1 where it is not known.
        batch_idx: Index of the batch being worked on in the current loop, from 0; -1 before the first.
        is_last_batch: Whether the current loop's data ended with this batch.
        global_step: Optimizer steps taken.
        idle_s: Seconds since this rank last made progress: entered or left an action, or moved in a collective.
    """

    phase: Phase
    actions: tuple[Action, ...] = ()
    last_action: str = ""
    epoch: int = 0
    batch_idx: int = -1
    is_last_batch: bool = False
    global_step: int = 0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Memory, swap and cores of a rank's process and host. None means that this host does not report it.

    Attributes:
        rss_bytes: Resident memory of the rank's process.
        process_swap_bytes: How much of the process is swapped out.
        memory_growth_bytes_per_s: How fast its resident memory grew, over the last seconds of its start.
        swap_growth_bytes_per_s: How fast what is swapped out of it grew, over the same time.
        memory_total_bytes: Memory of the host.
        memory_available_bytes: Memory of the host that can be had without swapping.
        swap_total_bytes: Swap space of the host.
        swap_used_bytes: Swap space in use on the host.
        swapped_in_bytes: Bytes that the host has read back from swap since the guard started.
        memory_limit_bytes: Memory limit of the process's own control group (cgroup v1 or v2).
        oom_kills: Processes that the kernel's out-of-memory killer has ended since the guard started.
        cores: Cores that this process may run on.
        load_1min: Load average of the last minute.
    """

    rss_bytes: int | None = None
    process_swap_bytes: int | None = None
    memory_growth_bytes_per_s: int | None = None
    swap_growth_bytes_per_s: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swapped_in_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_kills: int | None = None
    cores: int | None = None
    load_1min: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionFacts:
    """An exception that ended, or is ending, the Trainer on a rank.

    Attributes:
        type: Class name.
        message: Its text, cut to 2,000 characters.
        stack: Where it was raised, outermost frame first.
        is_consequence: Whether it only says that a peer is gone or a collective failed (a transport error), so that
            the cause must be looked for elsewhere.
    """

    type: str
    message: str
    stack: tuple[Frame, ...] = ()
    is_consequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process as another process on the same host sees it: a peer rank that may be silent, or a loader worker.

    Attributes:
        pid: Process id.
        rank: Global rank; -1 for a process that is no rank.
        state: ``"running"``, ``"sleeping"``, ``"stopped"``, ``"tracing-stop"``, ``"disk-sleep"``, ``"zombie"`` or
            ``"gone"`` (psutil's words, and ``"gone"`` for a process that no longer exists).
        wait_channel: Kernel function it sleeps in (``/proc/PID/wchan``); empty where unreadable.
        cpu_s: Processor time it has used, seconds.
        rss_bytes: Resident memory.
        swap_bytes: How much of it is swapped out.
        memory_growth_bytes_per_s: How fast its resident memory grew between two looks; None after a single one.
        swap_growth_bytes_per_s: How fast what is swapped out of it grew between them.
        stack: Its main thread's Python stack, outermost first, where it could be had from outside.
        gil_held: Whether its Python could not answer although the process runs: something holds the GIL.
        ended_by: The signal that has ended it, ``"SIGKILL"``, ``"SIGSEGV"``; empty where it lives, or nothing tells.
            Of one that it has met in itself ``stack`` is where its main thread was.
        thread_stack: That of another thread of its that was in a collective when it ended, called by the user's code.
        said: Why it has aborted itself, in the words of what has, as they stand last on its stderr; other ranks may
            write to the same file.
        exit_code: The status with which it has ended itself; None where it lives, or nothing tells.
        raised: What has left its program, outside of the Trainer; None where it goes on, or nothing tells.
        ran_share: Share of a core that its main thread got between two looks, 0 to 1.
        queued_share: Share of the time between them in which it could have run and had to wait for a core.
    """

    pid: int
    rank: int = -1
    state: str = ""
    wait_channel: str = ""
    cpu_s: float | None = None
    rss_bytes: int | None = None
    swap_bytes: int | None = None
    memory_growth_bytes_per_s: int | None = None
    swap_growth_bytes_per_s: int | None = None
    stack: tuple[Frame, ...] = ()
    thread_stack: tuple[Frame, ...] = ()
    gil_held: bool = False
    ended_by: str = ""
    said: str = ""
    exit_code: int | None = None
    raised: ExceptionFacts | None = None
    ran_share: float | None = None
    queued_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """A directory that the rank writes to.

    Attributes:
        owner: Class name of what writes there: a logger or a checkpoint callback.
        path: The directory.
        filesystem: Type of the file system below it (``"ext4"``, ``"nfs4"``, …); empty where unknown.
    """

    owner: str
    path: str
    filesystem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtException:
    """An exception that has not ended a rank's Trainer: its code has caught it, or it has ended another thread.

    Attributes:
        type: Class name.
        message: The first line of its text, cut to 200 characters.
        stack: Where it was raised, outermost frame first: the last lines of the user's own, and the very last line.
        caught_at: The user's line that handles it; None where that is not known.
        passed: What it has left: a function of ``torch.distributed``, ``"all_reduce"``, or an action of Lightning's;
            empty where it was seen in the user's code.
        thread: Name of the thread that it has ended; empty where it was caught.
        ago_s: Seconds since then; since the last one of several.
        count: How many like this there have been.
        is_held: Whether the main thread still is in the ``except`` block that has caught it.
        is_consequence: Whether it only says that a collective failed, see :class:`ExceptionFacts`.
    """

    type: str
    message: str = ""
    stack: tuple[Frame, ...] = ()
    caught_at: Frame | None = None
    passed: str = ""
    thread: str = ""
    ago_s: float = 0.0
    count: int = 1
    is_held: bool = False
    is_consequence: bool = False


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
class Whereabouts:
    """What the main thread of a rank was in at some of the looks at it.

    Attributes:
        doing: In words: ``"user code"``, ``"a collective"``, ``"the dataloader"``.
        place: ``"file:line in function"`` of the deepest line in the user's own code; empty where there is none.
        looks: At how many looks.
    """

    doing: str
    place: str = ""
    looks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionFacts:
    """How a rank's process was looked at from outside.

    Attributes:
        looks: How often its stack was read.
        over_s: The time between the first look and the last, seconds.
        moved: Whether its main thread did something else between looks; None where that could not be seen.
        slept_s: Seconds for which its main thread had not run at the last look, as the kernel counts; None where
            unknown.
        whereabouts: What it was in, most often first.
        native: Functions of native code that its last Python frame was in, outermost first; empty where none was read.
        group: The process group whose collective it waited in, by name and members; None where that is not known.
    """

    looks: int = 0
    over_s: float = 0.0
    moved: bool | None = None
    slept_s: float | None = None
    whereabouts: tuple[Whereabouts, ...] = ()
    native: tuple[str, ...] = ()
    group: Group | None = None

    @property
    def stood_s(self) -> float:
        """Seconds for which it is known to stand still; 0 if it moves, or nothing is known."""
        return 0.0 if self.moved else max(self.over_s if self.moved is False else 0.0, self.slept_s or 0.0)


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
