"""The cause mismatched-collective: ranks called the same collective with other sizes or types."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import Collective, JobFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.activity import deepest_user_frame
from lightning_ncclsafe.rules.caught import past_aborted, skipped_words, skips_handled
from lightning_ncclsafe.rules.divergences import (
    call_evidence,
    called_at,
    calls_location,
    calls_words,
    culprits,
    same_purpose,
    units_of,
    variants,
    where_evidence,
)
from lightning_ncclsafe.rules.overruns import aborted, is_gone, is_of_fsdp, last_of_gloo, signal_of
from lightning_ncclsafe.rules.positions import ended_first
from lightning_ncclsafe.rules.sentences import place_words, severity
from lightning_ncclsafe.rules.sharded import broken_off_alone, gathering_alone
from lightning_ncclsafe.rules.timeline import Divergence, Timeline, timeline
from lightning_ncclsafe.rules.wording import (
    capitalised,
    collective_words,
    group_words,
    joined,
    location_of,
    numel,
    ranks_words,
    verb,
)

_REMEDY = (
    "Give this collective tensors of one shape and dtype on all ranks: pad them or exchange their sizes first, as "
    "torchmetrics' gather_all_tensors does; look for a last batch that is shorter on one rank, for a dtype that "
    "depends on its data, and for a model that is built otherwise there."
)
# As torch's recorder names types.
_ITEM_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1} | {
    "Byte": 1,
    "Bool": 1,
}
_REMEDY_SHARDED = (
    "Let every rank run the same parts of the model in the same order, on a dummy input where its data does not need "
    "one (see unused-parameters): FSDP gathers them as they are used."
)
_DECIDES = (
    " Where the stacks show different functions on the ranks, it is not the size that is wrong: one rank has skipped "
    "a collective, or called one more."
)


def mismatched_collective(job: JobFacts) -> Iterable[Finding]:
    """Ranks called the same operation under the same number, with another number of elements or another data type.

    Symptom:
        NCCL: a timeout in which ranks report another NumelIn for one sequence number, or garbage in the result. Gloo
        ends the process of a rank that receives more than it has room for ("op.preamble.length <= op.nbytes"), and
        the others are told that the connection is closed.

    Cause:
        A tensor whose shape or type depends on a rank's data is reduced or gathered as it is.

    Remedy:
        Make the tensors alike on all ranks.

    Cannot see:
        Sizes where a collective may have different ones by design (all_to_all, scatter); what a rank called whose
        process is gone.
    """
    view = timeline(job)
    split = view.divergence or view.lost_divergence
    if view.raised or ended_first(view) or gathering_alone(view):
        return
    if split is None:
        ended = aborted(view)
        if ended and broken_off_alone(view) is None and not past_aborted(view):
            yield _abort(view, ended)
    elif len({call.op for call in split.calls.values()}) == 1:
        alike = same_purpose(view, split)
        if alike is not False and not _other_units(view, split):
            yield _finding(view, split, Confidence.CERTAIN if alike else Confidence.POSSIBLE)


def _abort(view: Timeline, ended: tuple[int, ...]) -> Finding:
    sent = {rank: call for rank, facts in sorted(view.facts.items()) if (call := last_of_gloo(facts))}
    other = min(sent or view.facts)
    # Of two that differ nobody can say which is wrong; several that agree are right.
    ranks = ended if len(sent or view.facts) > len(ended) else tuple(sorted((*ended, *(sent or view.facts))))
    was = f"was in {collective_words(sent[other])}" if sent else "had gone on to what follows"
    own, others = deepest_user_frame(view.witnesses[ended[0]].stack), called_at(view.facts[other])
    frame = own or others
    is_known = all(signal_of(view, rank) for rank in ended)
    remedy = _REMEDY_SHARDED if is_of_fsdp(view.facts[other]) else _REMEDY
    text = (
        f"the process of {ranks_words(ended)} {'has ended itself (SIGABRT)' if is_known else 'is gone'}"
        f"{f' {place_words(own)}' if own else ''}, as gloo ends one to which more is sent than it has room for, while "
        f"{ranks_words([other])} {was}{f' {place_words(others)}' if others else ''}."
    )
    beyond, skipped = skips_handled(view, sorted({*view.facts, *ended}))
    if skipped is not None and other in beyond:
        text = joined((text, skipped_words(skipped, f"{ranks_words(ended)} was")))
    return Finding(
        rule="mismatched-collective",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY if is_known else Confidence.POSSIBLE,
        summary=capitalised(text),
        ranks=ranks,
        location=location_of(frame),
        evidence=(*_gone_evidence(view, ended), *where_evidence(view, [other])),
        remedy=f'{remedy} The end of its output decides: "op.preamble.length <= op.nbytes" is this.',
    )


def _other_units(view: Timeline, split: Divergence) -> bool:
    """Ranks gather different parts of the model: it is not the sizes that differ, but what they compute."""
    units = units_of(view, split)
    return len(units) == len(split.calls) and len({unit.name for unit in units.values()}) > 1


def _finding(view: Timeline, split: Divergence, confidence: Confidence) -> Finding:
    overrun = _overrun(view, split)
    ranks = _odd_ones(view, split, overrun)
    gone = (
        f"Gloo has ended the process of {ranks_words(overrun)}, as to {verb(overrun, 'it', 'them')} more was sent than "
        f"{verb(overrun, 'it', 'they')} had room for."
        if overrun
        else ""
    )
    text = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    return Finding(
        rule="mismatched-collective",
        severity=Severity.ERROR if overrun else severity(view.job),
        confidence=confidence,
        summary=joined((f"{capitalised(text)}: {_difference(split)}.", gone)),
        ranks=ranks,
        location=calls_location(view, ranks),
        evidence=(*call_evidence(split), *_gone_evidence(view, overrun), *where_evidence(view, split.calls)),
        remedy=_REMEDY if confidence is Confidence.CERTAIN else _REMEDY + _DECIDES,
    )


def _difference(split: Divergence) -> str:
    sizes = {numel(call) for call in split.calls.values()}
    types = {call.dtypes for call in split.calls.values()}
    what = " and ".join([*(["size"] if len(sizes) > 1 else []), *(["type"] if len(types) > 1 else [])])
    return f"the same operation with another {what}, which can never complete"


def _overrun(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Members whose process is gone where the back end is gloo, which ends one that receives too much."""
    group = next((group for group in view.groups if group.name == split.group), None)
    if group is None or not all(call.backend == "gloo" for call in split.calls.values()):
        return ()
    return tuple(rank for rank in view.silent if is_gone(view, rank) and rank in group.members)


def _odd_ones(view: Timeline, split: Divergence, overrun: tuple[int, ...]) -> tuple[int, ...]:
    """The minority, in which a rank that received too much counts for the smallest call."""
    different = variants(split.calls)
    if not overrun or len(different) != 2:
        return culprits(view, split)
    smaller, larger = sorted(different, key=lambda variant: _bytes(variant[0]))
    return tuple(larger[1]) if len(larger[1]) < len(smaller[1]) + len(overrun) else tuple(smaller[1])


def _bytes(call: Collective) -> int:
    return numel(call) * max((_ITEM_BYTES.get(kind, 4) for kind in call.dtypes), default=4)


def _gone_evidence(view: Timeline, overrun: tuple[int, ...]) -> Iterator[Evidence]:
    for rank in overrun[:4]:
        process, signal = view.witnesses[rank], signal_of(view, rank)
        text = f"Process {process.pid} is {process.state}{f', by {signal}' if signal else ''}."
        yield Evidence(source="process", rank=rank, text=text)
