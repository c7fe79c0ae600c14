"""The cause mismatched-collective: ranks called the same collective with different sizes, types or roots."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import UNEVEN
from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.kit import (
    Confidence,
    DifferentRoots,
    Divergence,
    Finding,
    Plan,
    Severity,
    Timeline,
    aborted_by_gloo,
    aborted_elsewhere,
    aborted_model_run,
    aborted_words,
    alone_in_trainer,
    apart_words,
    at_words,
    beyond_try,
    call_by_size,
    call_evidence,
    call_location,
    call_words,
    called_at,
    called_by_threads,
    calls_words,
    capitalised,
    clause,
    collective_words,
    condition_evidence,
    continued_before_abort,
    deepest_user_frame,
    different_roots,
    ended_process_evidence,
    finding,
    first_user_frame,
    gathering_alone,
    gloo_abort_words,
    group_words,
    grouped,
    hang_rule,
    is_in,
    is_of_fsdp,
    joined,
    last_gloo_call,
    left_out_unit,
    location_of,
    numel,
    odd_sizes,
    others_wait,
    out_of_data_first,
    overrun_bytes,
    overrun_ranks,
    ranks_words,
    same_purpose,
    send_different_units,
    signal_of,
    signature,
    skipped_words,
    under_rank_condition,
    unusual_calls,
    verb,
    where_evidence,
)

_LOOP = re.compile(r"(?:async )?for (.+?) in ")
_REMEDY = (
    "Give this collective tensors of one shape on all ranks: pad them or exchange their sizes first, as torchmetrics' "
    "gather_all_tensors does. Look for a last batch that is shorter on one rank or of which nothing is left, for "
    "several such calls in an order that depends on a rank's data, and for a model that is built differently there."
)
_REMEDY_TYPE = (
    "Give this collective tensors of one dtype on all ranks: name it where the tensor is made (dtype=torch.float32), "
    "or convert it before the call. Look for a value that becomes float64 or an integer by a rank's own data, as what "
    "comes from NumPy may, and for another precision on one rank."
)
_REMEDY_SHARDED = (
    "Let every rank run the same parts of the model in the same order, on a dummy input where its data does not need "
    "one (see unused-parameters): FSDP gathers them as they are used."
)
_REMEDY_ROOTS = (
    "Name the same source or destination on all ranks, as a global rank (src=0) or within the group (group_src=0): not "
    "the rank itself, and not what each rank works out from its own state."
)
_CONFIRMS = 'The end of its output decides: "op.preamble.length <= op.nbytes" confirms this.'
_DECIDES = (
    " If the stacks show different functions on the ranks, the size is not the problem: one rank skipped "
    "a collective or called an extra one."
)

_SKIPPED = "This line makes calls of other sizes, too, so ranks may also have made different numbers of calls there."


@hang_rule(
    after="failed-rank",
    follows=("different-trainer-settings", "stopped-early"),
    unless=(alone_in_trainer, called_by_threads, out_of_data_first, gathering_alone),
    plan=Plan.STOP,
    is_mutual=True,
)
def mismatched_collective(view: Timeline) -> Iterator[Finding]:
    """Ranks called the same collective, but the number of elements, the data type or the root differs between them.

    Symptom:
        NCCL: a timeout in which ranks report different NumelIn for the same SeqNum, or garbage in the result. Gloo:
        "op.preamble.length <= op.nbytes" from a rank that receives more than it has room for, whose process ends, and
        "Connection closed by peer" on the others.

    Cause:
        A tensor whose shape or type depends on a rank's data is reduced or gathered as it is; or each rank names itself
        as the source of a broadcast or scatter, or as the destination of a gather or reduce.

    Remedy:
        Make the tensors identical in shape and type on all ranks, and name the same source or destination.

    Cannot see:
        Sizes that may differ by design (all_to_all, scatter); what a rank called before its process ended.
    """
    split = view.any_divergence
    if view.raised:
        return
    if roots := different_roots(view):
        yield _roots_finding(view, roots)
    elif split is None:
        ended = aborted_by_gloo(view)
        explain = (aborted_model_run, aborted_elsewhere, continued_before_abort, left_out_unit)
        is_explained = any(one(view) for one in explain)
        if ended and not is_explained and call_by_size(view) is None:
            yield _abort(view, ended)
    elif len({call.op for call in split.calls.values()}) == 1:
        alike = same_purpose(view, split)
        if alike is not False and not send_different_units(view, split):
            yield _finding(view, split, is_alike=bool(alike))


def _roots_finding(view: Timeline, different: DifferentRoots) -> Finding:
    by_root = grouped(different.roots)
    call = different.calls[min(different.calls)]
    named = apart_words(f"{ranks_words([root])} on {ranks_words(ranks)}" for root, ranks in sorted(by_root.parts))
    ranks = by_root.deviating
    text = (
        f"{ranks_words(sorted(different.calls))} have called {collective_words(call)} of "
        f"{group_words(different.group)} with different roots: {named}. It can never complete: {others_wait(view)}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if _may_be_different_calls(view, different) else Confidence.CERTAIN,
        location=call_location(view, ranks),
        evidence=(*condition_evidence(view, ranks), *where_evidence(view, different.calls)),
        remedy=_REMEDY_ROOTS,
    )


def _may_be_different_calls(view: Timeline, different: DifferentRoots) -> bool:
    """Whether ranks may be in different calls, each with the right root: at two lines, or in two passes of a loop."""
    frames = [frame for rank in different.roots if (frame := called_at(view, rank)) is not None]
    return len({(frame.file, frame.line) for frame in frames}) > 1 or any(map(_is_of_loop, frames))


def _is_of_loop(frame: Frame) -> bool:
    """Whether a loop's variable is in a line: ``for src in range(size): broadcast(x, src=src)``."""
    loops = (_LOOP.match(branch.test) for branch in frame.branches if not branch.jump)
    names = (name for loop in loops if loop for name in re.findall(r"\w+", loop[1]))
    return any(re.search(rf"\b{name}\b", frame.code) for name in names)


def _abort(view: Timeline, ended: tuple[int, ...]) -> Finding:
    sent = {rank: call for rank, facts in sorted(view.facts.items()) if (call := last_gloo_call(facts))}
    # Nobody may have answered.
    left = tuple(sorted(sent or view.facts))
    other = left[:1]
    was = f"was in {collective_words(sent[left[0]])}" if sent else "had already moved on"
    own, others = (called_at(view, some[0]) if some else None for some in (ended, other))
    decided = under_rank_condition(view, sorted((*ended, *left)))
    # If both sides are equally large, nothing shows which is wrong; otherwise the majority is right.
    few = min(ended, left, key=len)
    # In these, each rank sends as much as it likes: the one that received too much did nothing wrong.
    is_theirs = any(is_in(UNEVEN, view.witnesses[rank].stack) for rank in ended)
    has_majority = 0 < len(left) != len(ended) and not is_theirs
    unusual = {} if is_theirs else unusual_calls(view)
    ranks = tuple(decided) or tuple(unusual) or (few if has_majority else tuple(sorted((*ended, *left))))
    is_known = _is_gloo_abort(view, ended) and bool(left) and not is_theirs
    remedy = _REMEDY_SHARDED if any(is_of_fsdp(view.facts[rank]) for rank in other) else _REMEDY
    meanwhile = f", while {ranks_words(other)} {was}{at_words(others)}" if other else ""
    text = f"{aborted_words(view, ended)}{at_words(own)}, {gloo_abort_words(view, ended)}{meanwhile}."
    why = f"{capitalised(clause(ranks, 'was|were'))} {decided[ranks[0]]}." if decided else ""
    why = why or ("Who sent that is not recorded." if is_theirs else "")
    if unusual and not decided:
        call, before = next(iter(unusual.values()))
        at = at_words(deepest_user_frame(view.with_stack(call).stack))
        called = capitalised(clause(ranks, "has|have called"))
        why = f"{called} {call_words(call)}{at}, and {call_words(before)} before."
    beyond, skipped = beyond_try(view, sorted({*view.facts, *ended}))
    if skipped is not None and not {*beyond}.isdisjoint(other):
        text = joined((text, skipped_words(skipped, f"{ranks_words(ended)} was")))
    return finding(
        view,
        ranks,
        joined((text, why)),
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY if is_known else Confidence.POSSIBLE,
        location=call_location(view, ranks) if decided else location_of(own or others),
        evidence=(
            *ended_process_evidence(view, ended),
            *condition_evidence(view, ranks),
            *where_evidence(view, other),
        ),
        remedy=remedy if any(overrun_bytes(view, rank) for rank in ended) else f"{remedy} {_CONFIRMS}",
    )


def _is_gloo_abort(view: Timeline, ended: tuple[int, ...]) -> bool:
    """Whether these processes are known to have aborted themselves, or gloo's message about it is known."""
    have_aborted = bool(ended) and all(signal_of(view, rank) == "SIGABRT" for rank in ended)
    return have_aborted or any(overrun_bytes(view, rank) for rank in ended)


def _finding(view: Timeline, split: Divergence, *, is_alike: bool) -> Finding:
    overrun = overrun_ranks(view, split)
    ranks = odd_sizes(view, split)
    confidence = Confidence.LIKELY if is_alike or _is_gloo_abort(view, overrun) else Confidence.POSSIBLE
    may_have_skipped = _has_many_sizes(view, split)
    # Ranks that do not answer may have called what the named ones did.
    unknown = len({*view.silent} - {*overrun})
    if is_alike and not may_have_skipped and (not unknown or len(ranks) + unknown < len(split.calls) - len(ranks)):
        confidence = Confidence.CERTAIN
    gone = (
        f"Gloo ended the process of {ranks_words(overrun)}, which {verb(overrun, 'was', 'were')} sent more than "
        f"{verb(overrun, 'it', 'they')} had room for."
        if overrun
        else ""
    )
    text = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    remedy = _REMEDY_TYPE if len({numel(call) for call in split.calls.values()}) == 1 else _REMEDY
    return finding(
        view,
        ranks,
        joined((f"{text}: {_difference(view, split)}.", gone, _SKIPPED if is_alike and may_have_skipped else "")),
        severity=Severity.ERROR if overrun else None,
        confidence=confidence,
        # The deviating rank may have moved on; the others have not.
        location=_recorded_at(view, split, ranks) or call_location(view, [*ranks, *overrun, *split.calls]),
        evidence=(*call_evidence(split), *ended_process_evidence(view, overrun), *where_evidence(view, split.calls)),
        remedy=remedy if is_alike else remedy + _DECIDES,
    )


def _has_many_sizes(view: Timeline, split: Divergence) -> bool:
    """Whether a line calls it with several sizes by design: in a loop over tensors, or as it has called each before.

    Then a rank may be in another pass of that loop than the others, each with the right size.
    """
    here = {(call.site, signature(call)) for call in split.calls.values()}
    frames = [deepest_user_frame(call.stack) for call in split.calls.values()]
    if any(frame is not None and _is_of_loop(frame) for frame in frames):
        return True
    calls = (call for made in view.sequences(split.group).values() for call in made)
    before = {(call.site, signature(call)) for call in calls if call.seq < split.seq}
    return all(site for site, _ in here) and here <= before


def _recorded_at(view: Timeline, split: Divergence, ranks: tuple[int, ...]) -> str:
    """The user's line from which one of these ranks made its call, by the recorder; empty if it is not there."""
    calls = (view.with_stack(split.calls[rank]) for rank in ranks if rank in split.calls)
    return location_of(first_user_frame(call.stack for call in calls))


def _difference(view: Timeline, split: Divergence) -> str:
    sizes = {numel(call) for call in split.calls.values()}
    types = {call.dtypes for call in split.calls.values()}
    what = " and ".join([*(["size"] if len(sizes) > 1 else []), *(["type"] if len(types) > 1 else [])])
    if all(call.completed for call in split.calls.values()) and not _has_broken(view, split):
        return f"the operation differs in {what} between ranks; it has completed all the same, with wrong results"
    return f"the operation differs in {what} between ranks and can never complete"


def _has_broken(view: Timeline, split: Divergence) -> bool:
    """Whether a rank has raised in this very call: a call that fails is over, too, and is recorded as completed."""
    calls = ((view.facts[rank], call.seq) for rank, call in split.calls.items())
    return any(
        facts.exception is not None
        and max((one.seq for one in facts.collectives if one.group == split.group), default=-1) == seq
        for facts, seq in calls
    )
