"""The cause rank-zero-only-work: one rank works alone while the others have moved on."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import ELSE
from lightning_ncclsafe.rules.kit import (
    BrokenOff,
    Confidence,
    Evidence,
    Finding,
    Kind,
    Plan,
    Severity,
    Timeline,
    batch_words,
    begins,
    broken_off_alone,
    call_evidence,
    clause,
    condition_evidence,
    condition_words,
    finding,
    gathering_alone,
    hang_rule,
    held_at_one_line,
    held_up_by_machine,
    how_we_know,
    location_of,
    missed_thread,
    place_words,
    ranks_words,
    recorder_evidence,
    signal_of,
    standing,
    verb,
    wait_words,
    waits_for_thread,
    where_evidence,
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
    "_dataloader_next",
    "prepare_data",
)
_REMEDY_SHARDED = (
    "A model that is spread over the ranks (FSDP, tensor parallelism) cannot be run, saved or read by one rank alone: "
    "each part is gathered from all ranks. Let every rank go through this code, each with its share of the data, or "
    "gather the weights on all ranks first (get_model_state_dict with full_state_dict=True), and leave only what needs "
    "no model, such as plots and files, under the condition."
)


@hang_rule(
    after="compile-skew",
    remedy=(
        "Share this work among all ranks, or make it short: evaluate with Lightning's validation loop on every rank's "
        "share of the data, do one-off preparation in prepare_data or before the job, and write results from a "
        "background thread. A longer timeout only makes the others wait longer."
    ),
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
        epoch or of validation that takes long on rank 0 only. For code that all ranks run, see late-at-init before the
        first batch and rank-behind later.

    Remedy:
        Share the work among all ranks, shorten it, or move it out of the job. A model that is spread over the ranks has
        to be run by all of them.

    Cannot see:
        A condition on the rank inside a library, or computed far from the line in question.
    """
    if gathering := gathering_alone(view):
        yield _gathering(view, gathering)
    elif broken := broken_off_alone(view):
        yield _broken_off(view, broken)
    working = tuple(rank for rank in view.working(view.suspects) if _works(view, rank))
    if not working or not (view.waiting or view.each_waits_alone):
        return
    shared = held_at_one_line(view)
    conditioned = tuple(rank for rank in working if _is_of_few(view, rank) and rank not in shared)
    # Without a condition, what Lightning calls on all ranks has kept this one: it is merely late, unless it is the one
    # that mostly works for all.
    merely = (rank for rank in working if rank == 0 and view.waiting and _in_hook_of_its_own(view, rank))
    alone = conditioned or tuple(merely)
    # Work that most ranks do is not the work of a few: those that wait are then merely faster.
    if alone and 2 * len(alone) <= len(view.facts):
        is_seen = conditioned and view.waiting
        yield _finding(view, alone, Confidence.CERTAIN if is_seen else _confidence_without(view, alone))


def _works(view: Timeline, rank: int) -> bool:
    """Whether it does anything by itself."""
    return view.activities[rank].kind not in _OTHER_RULES


def _is_of_few(view: Timeline, rank: int) -> bool:
    """Under a condition on the rank, and not in what is left to all ranks for which it does not hold."""
    condition = view.activities[rank].rank_condition
    return bool(condition) and not (condition.startswith(ELSE) and rank != 0)


def _confidence_without(view: Timeline, alone: tuple[int, ...]) -> Confidence:
    """Without a condition the others may have done the same work, in less time where nothing held them up."""
    return Confidence.LIKELY if set(alone).isdisjoint(held_up_by_machine(view)) else Confidence.POSSIBLE


def _in_hook_of_its_own(view: Timeline, rank: int) -> bool:
    """In a hook outside the step that none of the waiting ranks is in; before the first batch it is merely late.

    Who waits for a thread that has ended does no work; from outside nobody sees whether it has.
    """
    doing, facts = view.activities[rank], view.facts[rank]
    if waits_for_thread(facts) and (facts.inspection is not None or missed_thread(facts) is not None):
        return False
    if doing.kind is not Kind.USER or not doing.hook or doing.hook.endswith(_STEP_HOOKS):
        return False
    if begins(facts.progress) or "_batch_" in doing.hook:
        return False
    return all(view.activities[other].hook != doing.hook for other in view.waiting)


def _finding(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    doing = view.activities[ranks[0]]
    condition = f" under {condition_words(doing.rank_condition)}" if doing.rank_condition else ""
    who = f"{clause(ranks, 'is|are working alone')}{condition}"
    # Who looks for what these make is in no collective.
    others = tuple(rank for rank in sorted(view.facts) if rank not in ranks)
    text = f"{who} {standing(view, ranks[0])}{while_others_wait(view, ranks)}."
    if not view.waiting:
        text = f"{text[:-1]}, while {clause(others, 'waits|wait')} by themselves {standing(view, others[0])}."
    return finding(
        view, ranks, text, confidence=confidence, evidence=(*condition_evidence(view, ranks), *how_we_know(view, ranks))
    )


def _gathering(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """It waits itself: what it runs alone is gathered from all ranks, and these are elsewhere."""
    rank = ranks[0]
    condition = condition_words(view.activities[rank].rank_condition)
    text = (
        f"{clause(ranks, 'runs|run the model alone under')} {condition} {standing(view, rank)}, "
        f"and {verb(ranks, 'waits', 'wait')} there in {wait_words(view, rank)}, which needs all ranks"
        f"{_others_words(view, ranks)}."
    )
    split = view.divergence
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if view.activities[rank].on_device else Confidence.CERTAIN,
        evidence=(
            *condition_evidence(view, ranks),
            *(call_evidence(split) if split is not None else ()),
            *where_evidence(view, view.facts),
            *recorder_evidence(view),
        ),
        remedy=_REMEDY_SHARDED,
    )


def _broken_off(view: Timeline, told: BrokenOff) -> Finding:
    """Gloo does not wait where sizes differ: it ends the process to which more is sent than it has room for."""
    rank, ended, condition = told.rank, told.ended, condition_words(told.condition)
    batch = f", {batch_words(view.facts[rank].progress)}" if rank in view.facts else ""
    text = (
        f"Rank {rank} ran the model alone under {condition} {place_words(told.frame)}{batch}, which needs all ranks: "
        f"gloo ended the process of {ranks_words(ended)}, which was sent something other than what it waited for"
        f"{while_others_wait(view, (rank,))}."
    )
    text_of_condition = f"{condition} encloses {location_of(told.condition_frame)}."
    return finding(
        view,
        (rank,),
        text,
        severity=Severity.ERROR,
        location=location_of(told.frame),
        evidence=(
            Evidence(source="source code", rank=rank, text=text_of_condition),
            *(Evidence(source="process", rank=one, text=_end_words(view, one)) for one in ended[:8]),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY_SHARDED,
    )


def _end_words(view: Timeline, rank: int) -> str:
    process, signal = view.witnesses[rank], signal_of(view, rank)
    return f"Process {process.pid} is {process.state}{f', by {signal}' if signal else ''}."


def _others_words(view: Timeline, ranks: tuple[int, ...]) -> str:
    finished = tuple(rank for rank, doing in sorted(view.activities.items()) if doing.kind is Kind.FINISHED)
    left = f", and {clause(finished, 'has|have finished')}" if finished else ""
    return left + while_others_wait(view, ranks)
