"""A rank's Trainer: its progress, settings, steps, loggers, and where it writes to."""

from dataclasses import dataclass, field
from enum import Enum

from lightning_ncclsafe.facts.frames import Branch


class Phase(str, Enum):
    """The phase of a rank's Trainer."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that Lightning is doing, by the name of its profiler or of a barrier: a hook, a data fetch, a save.

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
    """The progress of a rank's Trainer.

    Attributes:
        phase: The phase of the Trainer.
        actions: The current actions, outermost first; empty between hooks.
        last_action: The last action that ended, for moments between two hooks.
        epoch: Current epoch, from 0; -1 if unknown.
        batch_idx: Index of the batch being worked on in the current loop, from 0; -1 before the first.
        is_last_batch: Whether the current loop's data ended with this batch.
        global_step: Optimizer steps taken.
        idle_s: Seconds since this rank last made progress: entered or left an action, or moved in a collective.
        is_between_epochs: Whether a training epoch is over and the next one, whose number ``epoch`` is, has not begun;
            it may never begin. ``batch_idx`` is that of the last batch then.
    """

    phase: Phase
    actions: tuple[Action, ...] = ()
    last_action: str = ""
    epoch: int = 0
    batch_idx: int = -1
    is_last_batch: bool = False
    global_step: int = 0
    idle_s: float = 0.0
    is_between_epochs: bool = False


class LoopEnd(str, Enum):
    """Why a training loop would end, by the state of its Trainer; whether it has ended is another fact."""

    UNKNOWN = ""
    """Nothing would end the loop."""
    DATA = "data"
    """The loader has no more batches, whatever its length says, or ``limit_train_batches`` is reached."""
    SHOULD_STOP = "should-stop"
    """``trainer.should_stop`` is set."""
    MAX_STEPS = "max-steps"
    """The optimizer has made ``max_steps`` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """What decides how many steps and collectives a rank's ``fit`` makes.

    Attributes:
        settings: Settings that have to be equal on all ranks, as text, when training began: arguments of the Trainer by
            name, and ``"first epoch"`` and ``"first step"``, from which it continues. Before that, ``"ckpt_path"`` if
            this rank resumes.
        changed: Those that decide when training ends and have changed since then, with their present values.
        callbacks: Class names of the Trainer's callbacks, in their order.
        validates_by_clock: Whether ``val_check_interval`` is a time, so that each rank's own clock decides.
        end: Why its training loop would end now.
        ended_at: ``"file:line in hook"`` of the lines in the user's module and callbacks that may have ended it: that
            set ``should_stop`` or a changed setting; if nothing else ends it, that a ``StopIteration`` may leave; in a
            validation within an epoch, that set the batch after which it starts; the first 8.
        set_at: For each setting, ``"file:line in function"`` of the lines in the user's files that may have given it a
            value of this rank's own: arguments of the Trainer and assignments that are no constants; for the first
            epoch and step, ``ckpt_path=`` of the call; the first 8.
        validates_at: ``"file:line in hook"`` of the lines there that set after which batches or epochs validation runs;
            the first 8.
        batches_begun: Training batches of this epoch that have begun.
        batches_before: Training batches of all earlier epochs; None if unknown.
        batches: The number of batches of the epoch; None if unknown.
        validated: Completed batches of its present or last validation, of all loaders together.
    """

    settings: dict[str, str]
    changed: dict[str, str] = field(default_factory=dict)
    callbacks: tuple[str, ...] = ()
    validates_by_clock: bool = False
    end: LoopEnd = LoopEnd.UNKNOWN
    ended_at: tuple[str, ...] = ()
    set_at: dict[str, tuple[str, ...]] = field(default_factory=dict)
    validates_at: tuple[str, ...] = ()
    batches_begun: int = 0
    batches_before: int | None = None
    batches: int | None = None
    validated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedKey:
    """A key of ``self.log`` that is reduced between ranks, or that a callback monitors.

    Attributes:
        name: The key.
        hook: The hook that logs it, ``"validation_step"``.
        place: ``"file:line in hook"`` of the call, if the key is a literal there, or no other call of the hook can have
            logged it; else empty.
        rank_condition: The condition on the rank around that line, with its line number; else empty.
        states: Names of a metric's states, each of which is reduced; empty for a value.
    """

    name: str
    hook: str = ""
    place: str = ""
    rank_condition: str = ""
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFacts:
    """A metric of the model, each of whose states is reduced when it is computed.

    Attributes:
        name: Its name in the model, ``"val_accuracy"``.
        type: Its class.
        states: Names of its states.
        by_entry: Those that are lists without a reduction: each entry is gathered by collectives of its own.
    """

    name: str
    type: str = ""
    states: tuple[str, ...] = ()
    by_entry: tuple[str, ...] = ()


class Limited(str, Enum):
    """What a timeout limits."""

    GROUP = "group"
    """The collectives of a process group."""
    STORE = "store"
    """Calls of the store."""
    BARRIER = "barrier"
    """One barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutLine:
    """A line of the user's that gives a process group, the store or a barrier a timeout.

    Attributes:
        place: ``"file:line in function"``.
        call: The function that it calls, ``"new_group"``.
        limits: What the timeout of such a call may limit.
        timeout_ms: The timeout, milliseconds; 0 if it is not written out there.
    """

    place: str
    call: str
    limits: tuple[Limited, ...]
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a rank's training steps have skipped, what it logs on all ranks, and what its main thread calls now.

    Attributes:
        with_backward: Training batches with a backward pass, since the call of the Trainer began.
        skipped: Training batches that are over and had none.
        validated: Validation batches that have begun, since the call of the Trainer began.
        skipped_epoch: Epoch of the last skipped batch, from 0; -1 if there is none.
        skipped_batch: Its index within the epoch, from 0; -1 if there is none.
        passes: One entry per run of equal batches, from the oldest known: epoch and index of the first batch, number of
            backward passes, of those that reduced nothing, and of the steps of each optimizer; without zeros at the
            end. Batches without a backward pass are left out.
        passes_epoch: Epoch of the last batch in ``passes``; -1 if there is none.
        passes_batch: Its index within the epoch; -1 if there is none.
        under_way: The same entry for the batch after it, so far; empty if it has made no backward pass.
        passes_from: For each of ``passes``, and then for ``under_way``, ``"file:line in training_step"`` of the calls
            of ``manual_backward``, or of the optimizer that evaluated the loss again: the first 8; empty for the first
            pass with automatic optimization.
        led_around: The branches that may have led around such a call, by its place: jumps before it, and conditions
            around it.
        conditions_around: Those of ``led_around`` that are conditions: the first 8.
        differs_around: Of those jumps in ``led_around`` in whose place the condition is to be looked at, the line of
            that; see :attr:`~lightning_ncclsafe.facts.frames.Branch.differs_at`.
        handlers_around: The lines that handle what is raised on the way to such calls, where nothing else may have led
            around them: ``except`` clauses, and those of context managers: the first 8.
        skips_steps: ``"file:line in training_step"`` of the branches that may have led around an optimizer's ``step``
            after such a call: the first 8.
        passes_at: ``"file:line in training_step"`` of the calls of ``manual_backward`` under a condition on the rank.
        returns_nothing: ``"file:line in training_step"`` of each line there, and in decorators around it, that returns
            nothing; searched only if a batch was skipped.
        unsaved: ``"checkpoint['older'] (DataLoaderIter)"``: what could not be pickled when its last save raised; empty
            if that is not known to be the reason.
        unsaved_at: ``"file:line in on_save_checkpoint"`` of each line that may have put it there.
        returns_no_loss: ``"file:line in training_step"`` of each line there that may have returned no loss, with other
            values; searched only if Lightning has raised that.
        without_graph: Batches with a backward pass of a loss that depends on no parameter, so that none gets a
            gradient.
        leaves_at: ``"file:line in training_step"`` of each line that creates such a loss; searched only then.
        without_gradient: Names of parameters that require a gradient and have none while others have one, or that DDP
            names when it raises: the first 8.
        without_gradient_count: Their number.
        unused_at: ``"file:line in forward"`` of the line that skipped the part of the model with the first of these, if
            only one line may have; else of the line that uses it, or of the ``with`` around that which switches
            gradients off; empty if the user's modules do not name it.
        unused_under: Of the line that uses it, the only condition or loop around it, None if there are several or none;
            of a jump that skips it, that jump.
        other_size: Name of the parameter that has another size on this rank than on rank 0, if DDP has raised that.
        other_size_at: ``"file:line in __init__"`` of the user's line that makes it; empty if unknown.
        frozen: Names of parameters that required a gradient when training began, and no longer do: the first 8.
        frozen_at: ``"file:line in on_train_epoch_end"`` of each line that may have frozen them; searched only then.
        logged: Keys that were logged with ``sync_dist=True``, or as a metric, in the order of their first use.
        unlogged: Keys that functions of the module and callbacks log with ``sync_dist=True``, but never have on this
            rank: the first 8.
        monitored: Keys that callbacks monitor and that were logged in any way.
        unmonitored: Keys that callbacks monitor and that the source logs, but never has on this rank.
        metrics: Metrics of the model: the first 64.
        reducing: The logged key that is being reduced now; empty if none is.
        peer: Global rank that this one sends to or receives from now; -1 if unknown.
        awaited: ``"send"``, ``"recv"`` or both: what the main thread waits for, by the variable whose ``wait`` it has
            called; both for an item of a list that has both. Empty for any other operation, and if unknown.
        begun_at: ``"file:line in exchange"``: where that operation was begun; empty if unknown.
        root: Source or destination of the broadcast, scatter, gather or reduce that the main thread is in: its number
            within the group; -1 if unknown.
        groups_made: How many process groups this rank has taken part in creating, as a member or not, including the
            one that it is creating; -1 if unknown.
        making: Global ranks of the members of the group that it is creating; empty if it creates none.
        groups_at: ``"file:line in setup"`` of the calls of ``new_group`` under a condition on the rank, in the user's
            functions that the main thread is in, else in those of the module and callbacks; searched only while it
            creates a group.
        new_groups_at: ``"file:line in setup"`` of the calls of ``new_group`` that all ranks have to make, in the user's
            functions that the main thread is in and those of the module and callbacks: the first 8; searched only while
            it has groups besides the default one.
        unordered_groups_at: ``"file:line in setup"`` of the only call of ``new_group`` in the user's modules, if it is
            in a loop over a set, which each process may go through in an order of its own; searched only while it has
            groups besides the default one.
        accumulates_at: ``"file:line in on_train_batch_start"`` of each line that sets ``accumulate_grad_batches``, or
            calls ``no_sync`` or another function that keeps a pass from reducing; searched only if passes have reduced
            nothing.
        timeouts_at: The lines that give a process group, the store or a barrier a timeout, in the user's functions that
            the main thread is in and those of the module, the data, the callbacks and the strategy; if there are none,
            those in the same files that write the timeout out: the first 8.
    """

    with_backward: int = 0
    skipped: int = 0
    validated: int = 0
    skipped_epoch: int = -1
    skipped_batch: int = -1
    passes: tuple[tuple[int, ...], ...] = ()
    passes_epoch: int = -1
    passes_batch: int = -1
    under_way: tuple[int, ...] = ()
    passes_from: tuple[tuple[str, ...], ...] = ()
    led_around: dict[str, tuple[str, ...]] = field(default_factory=dict)
    conditions_around: tuple[str, ...] = ()
    differs_around: dict[str, str] = field(default_factory=dict)
    handlers_around: tuple[str, ...] = ()
    skips_steps: tuple[str, ...] = ()
    passes_at: tuple[str, ...] = ()
    returns_nothing: tuple[str, ...] = ()
    unsaved: str = ""
    unsaved_at: tuple[str, ...] = ()
    returns_no_loss: tuple[str, ...] = ()
    without_graph: int = 0
    leaves_at: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    without_gradient_count: int = 0
    unused_at: str = ""
    unused_under: Branch | None = None
    other_size: str = ""
    other_size_at: str = ""
    frozen: tuple[str, ...] = ()
    frozen_at: tuple[str, ...] = ()
    logged: tuple[LoggedKey, ...] = ()
    unlogged: tuple[LoggedKey, ...] = ()
    monitored: tuple[LoggedKey, ...] = ()
    unmonitored: tuple[LoggedKey, ...] = ()
    metrics: tuple[MetricFacts, ...] = ()
    reducing: str = ""
    peer: int = -1
    awaited: tuple[str, ...] = ()
    begun_at: str = ""
    root: int = -1
    groups_made: int = -1
    making: tuple[int, ...] = ()
    groups_at: tuple[str, ...] = ()
    new_groups_at: tuple[str, ...] = ()
    unordered_groups_at: str = ""
    accumulates_at: tuple[str, ...] = ()
    timeouts_at: tuple[TimeoutLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerFacts:
    """One logger whose writes are off the training thread.

    Attributes:
        logger: Class name of the logger.
        path: Where it writes; empty for a server that has no path.
        points: Scalar points written.
        records: Everything else written: media, texts, hyperparameters.
        thinned: Points left out, represented by others.
        dropped: Points and records dropped over a limit.
        memory_bytes: About how many bytes wait in memory to be staged.
        staged_bytes: How many bytes wait in local staging to be written.
        writing_s: How long the current write has waited for the storage, seconds; 0 if there is none.
        longest_write_s: The longest write that has ended, seconds.
        waited_s: How long training has waited for this logger in total, seconds.
        longest_wait_s: The longest single wait of training, seconds.
        finalize_s: How long the end of the run has waited for it, seconds.
        faults: Writes that failed, whether or not a later try succeeded.
        last_fault: The last such failure; empty if there was none.
        staging: The folder of local staging.
    """

    logger: str
    path: str = ""
    points: int = 0
    records: int = 0
    thinned: int = 0
    dropped: int = 0
    memory_bytes: int = 0
    staged_bytes: int = 0
    writing_s: float = 0.0
    longest_write_s: float = 0.0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    finalize_s: float = 0.0
    faults: int = 0
    last_fault: str = ""
    staging: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """A directory that the rank writes to.

    Attributes:
        owner: Class name of what writes there: a logger or a checkpoint callback.
        path: The directory.
        filesystem: Type of its file system (``"ext4"``, ``"nfs4"``, …); empty if unknown.
    """

    owner: str
    path: str
    filesystem: str = ""
