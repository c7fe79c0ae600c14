"""The cause rank-zero-only-work: one rank works alone while the others have moved on."""

from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import SUBPROCESS
from lightning_ncclsafe.facts import ELSE, Frame
from lightning_ncclsafe.rules.kit import (
    FETCHES,
    LISTED,
    AbortedModelRun,
    Confidence,
    Evidence,
    Finding,
    Kind,
    Plan,
    Reason,
    Severity,
    Timeline,
    aborted_model_run,
    at_words,
    batch_words,
    below_user,
    blocked_at_one_line,
    call_evidence,
    capitalised,
    clause,
    condition_around,
    condition_evidence,
    copying_words,
    deepest_user_frame,
    delayed_by_machine,
    encloses_words,
    end_evidence,
    finding,
    first_user_frame,
    gathering_alone,
    hang_rule,
    how_we_know,
    is_before_first_batch,
    is_gone,
    is_in,
    is_in_action,
    location_of,
    others_wait,
    place_words,
    polling_remedy,
    ranks_by,
    ranks_words,
    recorder_evidence,
    saving_alone,
    silent_finding,
    silent_processes,
    status_of,
    thread_exception,
    under_words,
    verb,
    wait_words,
    waits_for_thread,
    where_evidence,
    where_words,
    while_others_wait,
)

_OTHER_RULES = (Kind.LOCK, Kind.LOGGER, Kind.CHECKPOINT, Kind.FINISHED)
_STEP_HOOKS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "forward",
    "backward",
    "optimizer_step",
    "configure_gradient_clipping",
    "batch_to_device",
    "transfer_batch_to_device",
    "prepare_data",
)
_REMEDY_PROGRAM = (
    "Start the program without waiting for it (subprocess.Popen), and read its result later, in a later call of this "
    "hook (poll()) or after training; or let the loader or a script of its own do this work. A longer timeout only "
    "makes the others wait longer."
)
# So that nobody ends a run that would go on.
_GO_ON = " The others continue when it is done."
_REMEDY_BEFORE = (
    "Do this work once and ahead of the job, in a separate script that leaves its result on disk, or in prepare_data, "
    "for which Lightning lets the other ranks wait without limit; or share it among all ranks. A longer timeout only "
    "makes the others wait longer."
)
_REMEDY_ALONE = (
    "Share this work among all ranks, or make it short: evaluate with Lightning's validation loop on every rank's "
    "share of the data, do one-off preparation in prepare_data or before the job, and write results from a "
    "background thread. A longer timeout only makes the others wait longer."
)
_REMEDY_SAVING = (
    "Call trainer.save_checkpoint on all ranks, outside of any condition on the rank: it ends in a barrier, and "
    "gathers the state of a sharded model. Only rank 0 writes the file anyway, unless the checkpoint is sharded."
)
_REMEDY_SHARDED = (
    "A model that is spread over the ranks (FSDP, tensor parallelism) cannot be run, saved or read by one rank alone: "
    "each part is gathered from all ranks. Let every rank go through this code, each with its share of the data, or "
    "gather the weights on all ranks first (get_model_state_dict with full_state_dict=True), and leave only what needs "
    "no model, such as plots and files, under the condition."
)


@hang_rule(
    after="compile-skew",
    remedy=_REMEDY_ALONE,
    follows=("worker-died",),
    plan=Plan.STOP,
)
def rank_zero_only_work(view: Timeline) -> Iterator[Finding]:
    """One rank, or a few, do work that the others skip, and the others wait in the next collective.

    Symptom:
        "Watchdog caught collective operation timeout" on all ranks but one, in a collective that is not to blame; the
        missing one, usually rank 0, is busy with evaluation, tokenising, a download or a plot. With FSDP it waits as
        well, for a part of the model.

    Cause:
        Code under a condition on the rank ("if trainer.is_global_zero", @rank_zero_only), or a hook at the end of an
        epoch or of validation that takes long on rank 0 only; or trainer.save_checkpoint, which needs all ranks, on
        one of them after training. For code that all ranks run, see late-at-init before the first batch and rank-behind
        later.

    Remedy:
        Share the work among all ranks, shorten it, or move it out of the job. A model that is spread over the ranks has
        to be run by all of them.

    Cannot see:
        A condition on the rank inside a library, or computed far from the line in question.
    """
    if saving := saving_alone(view):
        yield _saving(view, saving)
        return
    if gathering := gathering_alone(view):
        yield _gathering(view, gathering)
    elif aborted := aborted_model_run(view):
        yield _aborted(view, aborted)
    yield from _copying_alone(view)
    working = tuple(rank for rank in view.working(view.suspects) if view.activities[rank].kind not in _OTHER_RULES)
    if not working or not (view.waiting or view.each_waits_alone):
        return
    shared = blocked_at_one_line(view)
    conditioned = tuple(rank for rank in working if _is_of_few(view, rank) and rank not in shared)
    # Without a condition, a rank is merely late in a hook that Lightning calls on all ranks, except for rank 0, which
    # usually does the work for all.
    in_hook = (rank for rank in working if rank == 0 and view.waiting and _in_hook_of_its_own(view, rank))
    alone = conditioned or tuple(in_hook)
    # Work that most ranks do is not the work of a few: the waiting ranks are merely faster.
    if alone and 2 * len(alone) <= len(view.facts):
        is_certain = conditioned and view.waiting
        # Each condition has led its ranks to other work.
        for ranks in ranks_by({rank: view.activities[rank].rank_condition for rank in alone}).values():
            yield _finding(view, ranks, Confidence.CERTAIN if is_certain else _confidence_without(view, ranks))


def _copying_alone(view: Timeline) -> Iterator[Finding]:
    """A rank that saves alone and waits for its GPU, as it has called a collective there that no other rank calls."""
    for rank, process in silent_processes(view, Reason.DEVICE):
        condition, _ = condition_around(process.stack)
        if condition and view.waiting:
            words = f"{copying_words(process)}, probably a collective that it alone has called {under_words(condition)}"
            yield silent_finding(view, rank, process, words)


def _is_of_few(view: Timeline, rank: int) -> bool:
    """Whether it is under a condition on the rank that holds for a few, and not in the else branch for all others."""
    condition = view.activities[rank].rank_condition
    return bool(condition) and not (condition.startswith(ELSE) and rank != 0)


def _confidence_without(view: Timeline, alone: tuple[int, ...]) -> Confidence:
    """The confidence without a condition: the others may have done the same work in less time if a machine is slow."""
    return Confidence.LIKELY if set(alone).isdisjoint(delayed_by_machine(view)) else Confidence.POSSIBLE


def _in_hook_of_its_own(view: Timeline, rank: int) -> bool:
    """Whether it is in a hook outside of the step that no waiting rank is in, after the first batch has begun.

    A rank that waits for a thread that has ended does no work; an inspection does not see whether the thread has ended.
    """
    doing, facts = view.activities[rank], view.facts[rank]
    if waits_for_thread(facts) and (facts.inspection is not None or thread_exception(facts) is not None):
        return False
    if doing.kind is not Kind.USER or not doing.hook or doing.hook.endswith(_STEP_HOOKS):
        return False
    if doing.hook.startswith(FETCHES):
        return False
    if is_before_first_batch(facts.progress) or "_batch_" in doing.hook:
        return False
    return all(view.activities[other].hook != doing.hook for other in view.waiting)


def _finding(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    doing = view.activities[ranks[0]]
    condition = f" {under_words(doing.rank_condition)}" if doing.rank_condition else ""
    who = f"{clause(ranks, 'is|are working alone')}{condition}"
    # A rank that waits for a file of these is in no collective.
    others = view.besides(ranks)
    text = f"{who} {where_words(view, ranks[0])}{while_others_wait(view, ranks)}."
    if not view.waiting:
        waits = clause(others, "waits|wait by itself|themselves")
        text = f"{text[:-1]}, while {waits} {where_words(view, others[0])}."
    facts = view.facts[ranks[0]]
    is_preparation = is_before_first_batch(facts.progress) and not is_in_action(facts.progress, ".prepare_data")
    return finding(
        view,
        ranks,
        text,
        confidence=confidence,
        evidence=(*condition_evidence(view, ranks), *how_we_know(view, ranks)),
        remedy=_remedy(view, ranks, is_preparation=is_preparation),
    )


def _remedy(view: Timeline, ranks: tuple[int, ...], *, is_preparation: bool) -> str:
    facts = view.facts[ranks[0]]
    if polled := polling_remedy(facts.stack):
        return polled
    awaited = facts.awaited_processes[:1]
    runs = bool(awaited) and awaited[0].state != "zombie"
    alone = _REMEDY_PROGRAM if runs and is_in(SUBPROCESS, below_user(facts.stack)) else _REMEDY_ALONE
    remedy = _REMEDY_BEFORE if is_preparation else alone
    # A rank that waits for something itself may wait forever, and calls that differ never complete.
    goes_on = runs or not (awaited or any(view.activities[rank].waits_alone for rank in ranks))
    return remedy + (_GO_ON if goes_on and view.waiting and view.any_divergence is None else "")


def _gathering(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """The ranks that run a sharded model alone wait as well: its shards are gathered from ranks that are elsewhere."""
    rank = ranks[0]
    condition = under_words(view.activities[rank].rank_condition)
    text = (
        f"{clause(ranks, 'runs|run the model alone')} {condition} {where_words(view, rank)}, "
        f"and {verb(ranks, 'waits', 'wait')} there in {wait_words(view, rank)}, which needs all ranks"
        f"{_others_words(view, ranks)}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if view.activities[rank].on_device else Confidence.CERTAIN,
        location=_called_at(view, rank),
        evidence=(
            *condition_evidence(view, ranks),
            *call_evidence(view.divergence),
            *where_evidence(view, view.facts),
            *recorder_evidence(view),
        ),
        remedy=_REMEDY_SHARDED,
    )


def _saving(view: Timeline, stacks: dict[int, tuple[Frame, ...]]) -> Finding:
    """The others have left the program, or are elsewhere in it."""
    ranks = tuple(sorted(stacks))
    frame, (condition, around) = deepest_user_frame(stacks[ranks[0]]), condition_around(stacks[ranks[0]])
    under = f", {under_words(condition)}" if condition else ""
    waits = f": {words}" if (words := others_wait(view)) else ""
    who = clause(ranks, "has|have called trainer.save_checkpoint alone")
    gone = tuple(rank for rank in view.silent if is_gone(view, rank))
    shown = (Evidence(source="source code", rank=ranks[0], text=encloses_words(condition, around)),)
    return finding(
        view,
        ranks,
        f"{who}{at_words(frame)}{under}, although it needs all ranks{waits}.{_elsewhere(view, ranks, gone)}",
        severity=Severity.ERROR if any(facts.exception is not None for facts in view.facts.values()) else None,
        confidence=Confidence.CERTAIN if view.witnesses.keys() >= {*view.silent} else Confidence.LIKELY,
        location=location_of(frame),
        evidence=(
            *(shown if condition else ()),
            *(end_evidence(view, rank) for rank in gone[:LISTED]),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY_SAVING,
    )


def _elsewhere(view: Timeline, ranks: tuple[int, ...], gone: tuple[int, ...]) -> str:
    """Sentences about silent ranks that do not save."""
    status = ", with status 0" if gone and all(status_of(view, rank) == 0 for rank in gone) else ""
    left = f" {capitalised(clause(gone, 'has|have left the program'))}{status}." if gone else ""
    others = tuple(rank for rank in view.silent if rank not in (*ranks, *gone))
    frame = first_user_frame(view.witnesses[rank].stack for rank in others if rank in view.witnesses)
    at = f": {verb(others, 'it is', 'they are')} {place_words(frame)}" if frame is not None else ""
    return left + (f" {capitalised(clause(others, 'has|have not called it'))}{at}." if others else "")


def _called_at(view: Timeline, rank: int) -> str | None:
    """Where the call was made for which a rank waits; on a device, it may wait only where it reads a result."""
    call = view.activities[rank].collective
    frame = deepest_user_frame(view.with_stack(call).stack) if call is not None else None
    return location_of(frame) or None


def _aborted(view: Timeline, run: AbortedModelRun) -> Finding:
    """Gloo does not wait if sizes differ: it aborts the process that receives more than it has room for."""
    rank, ended, condition = run.rank, run.ended, under_words(run.condition)
    batch = f", {batch_words(view.facts[rank].progress)}" if rank in view.facts else ""
    text = (
        f"Rank {rank} ran the model alone {condition} {place_words(run.frame)}{batch}, which needs all ranks: "
        f"gloo ended the process of {ranks_words(ended)}, which was sent something other than what it waited for"
        f"{while_others_wait(view, (rank,))}."
    )
    text_of_condition = encloses_words(run.condition, run.condition_frame)
    return finding(
        view,
        (rank,),
        text,
        severity=Severity.ERROR,
        location=location_of(run.frame),
        evidence=(
            Evidence(source="source code", rank=rank, text=text_of_condition),
            *(end_evidence(view, one) for one in ended[:LISTED]),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY_SHARDED,
    )


def _others_words(view: Timeline, ranks: tuple[int, ...]) -> str:
    left = f", and {clause(view.finished, 'has|have finished')}" if view.finished else ""
    return left + while_others_wait(view, ranks)
