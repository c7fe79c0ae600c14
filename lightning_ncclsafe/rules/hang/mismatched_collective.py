"""The cause mismatched-collective: ranks called the same collective with other sizes or types."""

from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import UNEVEN
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Divergence,
    Finding,
    OtherRoots,
    Plan,
    Severity,
    Timeline,
    aborted,
    alone_in_trainer,
    as_gloo_does,
    broken_off,
    broken_off_alone,
    call_by_size,
    call_evidence,
    called_at,
    called_by_threads,
    calls_location,
    calls_words,
    capitalised,
    collective_words,
    condition_evidence,
    conditioned,
    ended_first,
    finding,
    gathering_alone,
    gone_evidence,
    group_words,
    hang_rule,
    is_in,
    is_of_fsdp,
    joined,
    last_of_gloo,
    location_of,
    numel,
    odd_sizes,
    other_roots,
    others_wait,
    overrun_in,
    overrun_of,
    past_aborted,
    place_words,
    ranks_words,
    same_purpose,
    signal_of,
    skipped_words,
    skips_handled,
    units_of,
    verb,
    where_evidence,
)

_REMEDY = (
    "Give this collective tensors of one shape and dtype on all ranks: pad them or exchange their sizes first, as "
    "torchmetrics' gather_all_tensors does; look for a last batch that is shorter on one rank, for a dtype that "
    "depends on its data, and for a model that is built otherwise there."
)
_REMEDY_SHARDED = (
    "Let every rank run the same parts of the model in the same order, on a dummy input where its data does not need "
    "one (see unused-parameters): FSDP gathers them as they are used."
)
_REMEDY_ROOTS = (
    "Name the same source or destination on all ranks, as a global rank (src=0) or within the group (group_src=0): not "
    "the rank itself, and not what each rank works out from its own state."
)
_DECIDES = (
    " If the stacks show different functions on the ranks, the size is not the problem: one rank skipped "
    "a collective or called an extra one."
)


@hang_rule(
    after="failed-rank",
    follows=("different-trainer-settings", "stopped-early"),
    unless=(alone_in_trainer, called_by_threads, ended_first, gathering_alone),
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
        Sizes that may differ by design (all_to_all, scatter); what a rank called whose process is gone.
    """
    split = view.divergence or view.lost_divergence
    if view.raised:
        return
    if found := other_roots(view):
        yield _roots_finding(view, found)
    elif split is None:
        ended = aborted(view)
        is_told = broken_off_alone(view) or broken_off(view) or past_aborted(view) or call_by_size(view)
        if ended and not is_told:
            yield _abort(view, ended)
    elif len({call.op for call in split.calls.values()}) == 1:
        alike = same_purpose(view, split)
        if alike is not False and not _other_units(view, split):
            yield _finding(view, split, is_alike=bool(alike))


def _roots_finding(view: Timeline, found: OtherRoots) -> Finding:
    by_root: dict[int, list[int]] = {}
    for rank, root in found.roots.items():
        by_root.setdefault(root, []).append(rank)
    call = found.calls[min(found.calls)]
    named = ", ".join(f"{ranks_words([root])} on {ranks_words(ranks)}" for root, ranks in sorted(by_root.items()))
    most = max(by_root.values(), key=len)
    has_majority = 2 * len(most) > len(found.roots)
    ranks = tuple(sorted(rank for rank in found.roots if not has_majority or rank not in most))
    text = (
        f"{ranks_words(sorted(found.calls))} have called {collective_words(call)} of {group_words(found.group)} with "
        f"different roots: {named}. It can never complete: {others_wait(view, ())}."
    )
    return finding(
        view,
        ranks,
        capitalised(text),
        confidence=Confidence.CERTAIN,
        location=calls_location(view, ranks),
        evidence=(*condition_evidence(view, ranks), *where_evidence(view, found.calls)),
        remedy=_REMEDY_ROOTS,
    )


def _abort(view: Timeline, ended: tuple[int, ...]) -> Finding:
    sent = {rank: call for rank, facts in sorted(view.facts.items()) if (call := last_of_gloo(facts))}
    other = min(sent or view.facts)
    was = f"was in {collective_words(sent[other])}" if sent else "had already moved on"
    own, others = called_at(view, ended[0]), called_at(view, other)
    left = tuple(sorted(sent or view.facts))
    decided = conditioned(view, sorted((*ended, *left)))
    # Of two that differ nobody can say which is wrong, unless something tells; several that agree are right.
    few = min(ended, left, key=len)
    # Each sends each other as much as it likes: who has been sent too much has done nothing odd.
    is_theirs = any(is_in(UNEVEN, view.witnesses[rank].stack) for rank in ended)
    is_told = len(ended) != len(left) and not is_theirs
    ranks = tuple(decided) or (few if is_told else tuple(sorted((*ended, *left))))
    is_known = _is_gloos(view, ended) and not is_theirs
    remedy = _REMEDY_SHARDED if is_of_fsdp(view.facts[other]) else _REMEDY
    text = (
        f"the process of {ranks_words(ended)} {'aborted itself (SIGABRT)' if _is_gloos(view, ended) else 'is gone'}"
        f"{f' {place_words(own)}' if own else ''}, {as_gloo_does(view, ended)}, while "
        f"{ranks_words([other])} {was}{f' {place_words(others)}' if others else ''}."
    )
    why = f"{capitalised(ranks_words(ranks))} {verb(ranks, 'was', 'were')} {decided[ranks[0]]}." if decided else ""
    why = why or ("Who sent that is not recorded." if is_theirs else "")
    beyond, skipped = skips_handled(view, sorted({*view.facts, *ended}))
    if skipped is not None and other in beyond:
        text = joined((text, skipped_words(skipped, f"{ranks_words(ended)} was")))
    return finding(
        view,
        ranks,
        joined((capitalised(text), why)),
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY if is_known else Confidence.POSSIBLE,
        location=calls_location(view, ranks) if decided else location_of(own or others),
        evidence=(*gone_evidence(view, ended), *condition_evidence(view, ranks), *where_evidence(view, [other])),
        remedy=f'{remedy} The end of its output decides: "op.preamble.length <= op.nbytes" confirms this.',
    )


def _is_gloos(view: Timeline, ended: tuple[int, ...]) -> bool:
    """Whether processes that are gone are known to have ended themselves, or what gloo says then was said."""
    have_aborted = bool(ended) and all(signal_of(view, rank) == "SIGABRT" for rank in ended)
    return have_aborted or any(overrun_of(view, rank) for rank in ended)


def _other_units(view: Timeline, split: Divergence) -> bool:
    """Ranks gather different parts of the model: it is not the sizes that differ, but what they compute."""
    units = units_of(view, split)
    return len(units) == len(split.calls) and len({unit.name for unit in units.values()}) > 1


def _finding(view: Timeline, split: Divergence, *, is_alike: bool) -> Finding:
    overrun = overrun_in(view, split)
    ranks = odd_sizes(view, split)
    confidence = (
        Confidence.CERTAIN if is_alike else Confidence.LIKELY if _is_gloos(view, overrun) else Confidence.POSSIBLE
    )
    gone = (
        f"Gloo ended the process of {ranks_words(overrun)}, which {verb(overrun, 'was', 'were')} sent more than "
        f"{verb(overrun, 'it', 'they')} had room for."
        if overrun
        else ""
    )
    text = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    return finding(
        view,
        ranks,
        joined((f"{capitalised(text)}: {_difference(split)}.", gone)),
        severity=Severity.ERROR if overrun else None,
        confidence=confidence,
        # The odd one may have gone on, and the others have not.
        location=calls_location(view, [*ranks, *overrun, *split.calls]),
        evidence=(*call_evidence(split), *gone_evidence(view, overrun), *where_evidence(view, split.calls)),
        remedy=_REMEDY if confidence is Confidence.CERTAIN else _REMEDY + _DECIDES,
    )


def _difference(split: Divergence) -> str:
    sizes = {numel(call) for call in split.calls.values()}
    types = {call.dtypes for call in split.calls.values()}
    what = " and ".join([*(["size"] if len(sizes) > 1 else []), *(["type"] if len(types) > 1 else [])])
    return f"the operation differs in {what} between ranks and can never complete"
