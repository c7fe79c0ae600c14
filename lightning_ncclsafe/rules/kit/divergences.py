"""Parts of findings about ranks that called different collectives: who deviates, what each called, and from where."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

from lightning_ncclsafe.code.libraries import DISTRIBUTED, FSDP, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Collective, Frame, ModelUnit, Phase, ProcessFacts, RankFacts, UnitKind
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.activity import Kind, condition_around, deepest_user_frame, trainer_start
from lightning_ncclsafe.rules.kit.caught import has_gone_on, skips_handled
from lightning_ncclsafe.rules.kit.landmarks import landmark, starts_trainer
from lightning_ncclsafe.rules.kit.overruns import aborted, few_by_site
from lightning_ncclsafe.rules.kit.sentences import phase_evidence, stack_evidence
from lightning_ncclsafe.rules.kit.shifts import shift
from lightning_ncclsafe.rules.kit.timeline import Divergence, Signature, Timeline, signature
from lightning_ncclsafe.rules.kit.units import unit_of, unit_words
from lightning_ncclsafe.rules.kit.wording import (
    call_words,
    capitalised,
    collective_words,
    condition_words,
    joined,
    location_of,
    ranks_words,
)

# Conditions that hold on one rank, and not ``if rank != -1``, which holds on all.
_OF_RANK_ZERO = re.compile(r"zero|is_main|master|==\s*0\b|not\s+[\w.]*rank", re.IGNORECASE)
_OF_ALL = re.compile(r"!=\s*-1|>=\s*0\b|>\s*-1|is not None")
_WHERE = 4
_VARIANTS = 3
_LISTED = 8
# What a rank has called in as many steps belongs to them.
_FEW_STEPS, _STEPS = 2, 4


def culprits(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Those of whom something says that they are out of step, else the minority; all of them where nothing decides.

    A condition on the rank comes first. Of as many on both sides, those are next that went on after an exception.
    """
    every = called_or_ended(view, split)
    ended = len(every) > len(split.calls)
    ranks = split.deviating
    gone_on = has_gone_on(view, ranks) or skips_handled(view, ranks)[0] if len(ranks) == len(split.calls) else ()
    by_site = few_by_site(view, every) if ended else ()
    return tuple(conditioned(view, every)) or gone_on or tuple(out_of_step(view, every)) or by_site or ranks


def called_or_ended(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks that have called something, and those that gloo has ended in what is known of their last words."""
    ended = (rank for rank in aborted(view) if view.witnesses[rank].stack)
    return tuple(sorted({*split.calls, *ended}))


def stack_of(view: Timeline, rank: int) -> tuple[Frame, ...]:
    """Where a rank is, or was until it was told that a peer is gone, or until its own process ended; may be empty."""
    if rank not in view.facts:
        return view.witnesses[rank].stack if rank in view.witnesses else ()
    facts = view.facts[rank]
    return facts.exception.stack if facts.exception is not None else facts.stack


def line_of_split(view: Timeline, split: Divergence, ranks: Iterable[int]) -> str:
    """The user's line that is to be looked at, as the recorder knows it; empty where that is unknown.

    A rank whose call has been made at this place before, by any rank, has not made one too many: it has left out the
    call of the others.
    """
    own = [call for rank, call in split.calls.items() if rank in {*ranks}]
    others = [call for rank, call in split.calls.items() if rank not in {*ranks}]
    earlier = {c.site for calls in view.sequences(split.group).values() for c in calls if c.seq < split.seq}
    told = sorted([*own, *others], key=lambda call: call.site in earlier)
    frames = (deepest_user_frame(call.stack) for call in told if call.site)
    return next((location_of(frame) for frame in frames if frame is not None), "")


def condition_of(view: Timeline, rank: int) -> str:
    """The condition on the rank under which its present line stands; empty if there is none."""
    return condition_around(stack_of(view, rank))[0]


def out_of_step(view: Timeline, ranks: Iterable[int]) -> dict[int, str]:
    """Those of ranks that wait apart from one another which are where the others do not come, and why, in words.

    A condition decides; between as many, that the others are in what is called on every rank in every run.
    """
    every = tuple(sorted(ranks))
    return conditioned(view, every) or _in_calls_of_their_own(view, every)


def conditioned(view: Timeline, ranks: Iterable[int]) -> dict[int, str]:
    """Those of ranks that stand where only some ranks come, under a condition or in a hook, and why, in words.

    Empty where that is true of all of them.
    """
    every = tuple(ranks)
    apart = {rank: why for rank in every if (why := _why_apart(view, rank))}
    if 2 * len(apart) > len(every):
        apart = {rank: why for rank, why in apart.items() if not _OF_ALL.search(condition_of(view, rank))}
    return apart if len(apart) < len(every) else {}


def _why_apart(view: Timeline, rank: int) -> str:
    if condition := condition_of(view, rank):
        return f"under {condition_words(condition)}"
    actions = view.facts[rank].progress.actions if rank in view.facts else ()
    in_prepare_data = any(action.name.endswith(".prepare_data") for action in actions)
    return "in prepare_data, which Lightning calls on one rank of each host" if in_prepare_data else ""


def _in_calls_of_their_own(view: Timeline, ranks: tuple[int, ...]) -> dict[int, str]:
    """Of as many ranks in calls of their own as in what Lightning calls on every rank, the first.

    What Lightning calls where a rank's own values say so counts as the rank's. Where the others have left out what they
    have called in every step before, it is they.
    """
    inside = {rank: (stack := stack_of(view, rank))[trainer_start(stack) :] for rank in ranks}
    own = {rank: why for rank, stack in inside.items() if (why := _own_call(stack))}
    others = tuple(rank for rank in ranks if rank not in own)
    if not own or len(own) != len(others) or not all(map(inside.__getitem__, others)):
        return {}
    left_out = {rank: found for rank in others if (found := _left_out(view, rank))}
    if not left_out:
        return own
    if left_out.keys() != {*others} or any(steps < _FEW_STEPS for _, steps in left_out.values()):
        return {}
    words = "and has left out {}, called in every step before"
    return {rank: words.format(call_words(call)) for rank, (call, _) in left_out.items()}


def _own_call(stack: tuple[Frame, ...]) -> str:
    if any(MODEL_CHECKPOINT.has(frame.file, frame.function) for frame in stack):
        return "in ModelCheckpoint, which saves where the value that it monitors says so on its rank"
    if deepest_user_frame(stack) is not None:
        return "in a call of the user's own, while the others are in what Lightning calls on all ranks"
    return ""


def _left_out(view: Timeline, rank: int) -> tuple[Collective, int] | None:
    """What a rank has called in each of its last steps, and not in this one; and in how many of them.

    A step goes from one call of what it is in to the next.
    """
    if rank not in view.facts:
        return None
    entries = view.facts[rank].collectives
    present = view.activities[rank].collective or next(reversed(entries), None)
    if present is None:
        return None
    steps: list[dict[Signature, Collective]] = [{}]
    for entry in entries:
        if entry.group == present.group and entry.seq <= present.seq:
            if signature(entry) == signature(present):
                steps.append({})
            else:
                steps[-1][signature(entry)] = entry
    # The first is no whole step, the last one has only begun with the present call.
    *before, last = steps[1:-1] or [{}]
    before = before[-_STEPS:]
    missing = [found for kind, found in (before[-1].items() if before else ()) if kind not in last]
    usual = (call for call in missing if all(signature(call) in step for step in before))
    return next(((call, len(before)) for call in usual), None)


def alone_in_trainer(view: Timeline) -> tuple[tuple[int, ...], str]:
    """Ranks that have called the Trainer under a condition on rank 0, and that condition; empty where others have, too.

    The others are in another call of the Trainer, or in none: then they have no guard that would answer, and look like
    ranks that are frozen, or they have ended in good order.
    """
    conditions = {rank: condition for rank, facts in view.facts.items() if (condition := _around_trainer(facts))}
    calls = {rank: _calls_of_trainer(facts) for rank, facts in view.facts.items()}
    alone = {calls[rank] for rank in conditions}
    others = [calls[rank] for rank in view.facts if rank not in conditions]
    is_told = bool(conditions) and bool(others or view.silent) and all(call and call not in alone for call in others)
    if not is_told or view.raised or not all(map(partial(_may_be_outside, view), view.silent)):
        return (), ""
    return tuple(sorted(conditions)), next(iter(conditions.values()))


def _may_be_outside(view: Timeline, rank: int) -> bool:
    """Whether a silent rank may have left the Trainer, or the program, as far as others see."""
    seen = view.witnesses.get(rank)
    return seen is None or seen.state == "sleeping" or (seen.state in ("gone", "zombie") and left_in_order(seen))


def left_in_order(process: ProcessFacts) -> bool:
    """Whether a process that is gone may have come to its end: no signal is known of it, nor another status than 0."""
    return not process.ended_by and not process.exit_code


def in_trainer_again(view: Timeline) -> dict[int, Frame]:
    """Ranks that have called their Trainer from one of its hooks, and where; empty unless all others have finished.

    A Trainer of its own that a hook has made is another one, of which those others know nothing.
    """
    again = {rank: frame for rank, facts in view.facts.items() if (frame := _calls_trainer_again(facts))}
    others = (doing for rank, doing in view.activities.items() if rank not in again)
    is_alone = len(again) < len(view.facts) and all(doing.kind is Kind.FINISHED for doing in others)
    return again if is_alone else {}


def _calls_trainer_again(facts: RankFacts) -> Frame | None:
    runs = [index for index, frame in enumerate(facts.stack) if starts_trainer(frame)]
    between = facts.stack[runs[0] : runs[-1]] if runs else ()
    hooks = {action.name.rpartition(".")[2] for action in facts.progress.actions}
    # What its Trainer does now is not what that hook belongs to.
    is_asked_again = facts.progress.phase in (Phase.VALIDATE, Phase.TEST, Phase.PREDICT)
    is_in_hook = not hooks.isdisjoint(frame.function for frame in between if frame.user)
    return deepest_user_frame(between) if is_asked_again and is_in_hook else None


def _around_trainer(facts: RankFacts) -> str:
    conditions = (frame.rank_condition for frame in reversed(_outside(facts)) if frame.rank_condition)
    # What stands behind it on its line is not part of it.
    return next((condition for condition in conditions if _OF_RANK_ZERO.search(condition.partition(":")[0])), "")


def _calls_of_trainer(facts: RankFacts) -> tuple[tuple[str, int], ...]:
    return tuple((frame.file, frame.line) for frame in _outside(facts))


def _outside(facts: RankFacts) -> tuple[Frame, ...]:
    """The user's frames around the Trainer's; before and after it runs there are no others."""
    return tuple(frame for frame in facts.stack[: trainer_start(facts.stack) or None] if frame.user)


def variants(calls: dict[int, Collective]) -> list[tuple[Collective, list[int]]]:
    """What was called, and by which ranks, the most frequent first."""
    alike: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        alike[signature(call)].append(rank)
    return [(calls[ranks[0]], ranks) for ranks in sorted(alike.values(), key=lambda who: (-len(who), who))]


def calls_words(view: Timeline, split: Divergence) -> str:
    """``"ranks 0-2 called all_reduce (8 elements) and rank 3 called barrier"``."""
    different = variants(split.calls)
    listed = [f"{ranks_words(who)} called {_call_words(view, call, who[0])}" for call, who in different[:_VARIANTS]]
    more = len(different) - _VARIANTS
    return " and ".join(listed) + (f" and {more} other variants" if more > 0 else "")


def _call_words(view: Timeline, call: Collective, rank: int) -> str:
    return joined((call_words(call), f"for {words}" if (words := unit_words(call, view.facts[rank])) else ""))


def call_evidence(split: Divergence) -> Iterator[Evidence]:
    """One line for each variant: the collective with its number."""
    for call, who in variants(split.calls)[:_LISTED]:
        text = f"{capitalised(ranks_words(who))} called {collective_words(call)}."
        yield Evidence(source="flight recorder", rank=who[0] if len(who) == 1 else None, text=text)


def condition_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """The conditions on the rank under which these ranks stand where they do."""
    for rank in sorted(ranks)[:_LISTED]:
        condition, frame = condition_around(stack_of(view, rank))
        if condition:
            text = f"{condition_words(condition)} encloses {location_of(frame)}."
            yield Evidence(source="source code", rank=rank, text=text)


def where_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """Where the first of these ranks stand."""
    listed = sorted(ranks)[:_WHERE]
    yield from stack_evidence(view, listed)
    yield from phase_evidence(view, listed)


def called_at(view: Timeline, rank: int) -> Frame | None:
    """The deepest line in the user's code from which a rank called what it waits in, or waited in until it ended."""
    return deepest_user_frame(stack_of(view, rank))


def calls_location(view: Timeline, ranks: Iterable[int]) -> str:
    """The same of the first of these ranks that has one; a line within the Trainer tells more than one around it."""
    stacks = [stack_of(view, rank) for rank in ranks]
    frames = (deepest_user_frame(part) for part in (*(stack[trainer_start(stack) :] for stack in stacks), *stacks))
    return next((location_of(frame) for frame in frames if frame is not None), "")


def units_of(view: Timeline, split: Divergence) -> dict[int, ModelUnit]:
    """The FSDP unit that each rank's call sends, as far as its size tells."""
    units = {rank: unit_of(call, view.facts[rank]) for rank, call in split.calls.items()}
    return {rank: unit for rank, unit in units.items() if unit is not None and unit.kind is UnitKind.FSDP_UNIT}


def sent_words(view: Timeline, split: Divergence, rank: int) -> str:
    """What a rank's call sends, ``"the all-gather of FSDP unit layers.3, in forward"``; else the call itself."""
    return unit_words(split.calls[rank], view.facts[rank]) or collective_words(split.calls[rank])


def same_purpose(view: Timeline, split: Divergence) -> bool | None:
    """Whether ranks called all this for one purpose: for parts of the model of one kind, or from one line.

    None where that cannot be told: what a stack says holds for the last call that its rank has made, only, and of two
    calls in one function a rank may have skipped the first. What the user's own code calls, Lightning does not.
    """
    sites = {call.site for call in split.calls.values()}
    if "" not in sites:
        if len(sites) == 1:
            return True
        if shift(view, split.group) is not None:
            return False
    purposes = [_purpose(view, rank, call) for rank, call in split.calls.items()]
    known = [purpose for purpose in purposes if purpose is not None]
    if len(known) < len(purposes):
        stacks = [stack_of(view, rank) for rank, call in split.calls.items() if _is_present(view, rank, call)]
        are_users = {deepest_user_frame(stack[trainer_start(stack) :]) is not None for stack in stacks}
        is_told = len(stacks) == len(split.calls) and all(stacks)
        return False if is_told and len(are_users) > 1 else None
    if len({purpose[:2] for purpose in known}) > 1:
        return False
    return True if len({*known}) == 1 else None


def _purpose(view: Timeline, rank: int, call: Collective) -> tuple[str, str, int] | None:
    """File, function and line that have called this; or "unit" and what of the model it is."""
    facts = view.facts[rank]
    unit = unit_of(call, facts)
    if unit is not None:
        # Buckets are reduced one after the other: another one under one number is another call.
        return "unit", unit.kind.value + (unit.name if unit.kind is UnitKind.DDP_BUCKET else ""), 0
    return _caller(stack_of(view, rank)) if _is_present(view, rank, call) else None


def _is_present(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether a rank's stack says where this was called: it is the last, and the rank waits, or did until it raised."""
    facts = view.facts[rank]
    is_last = not any(later.group == call.group and later.seq > call.seq for later in facts.collectives)
    return is_last and (view.activities[rank].kind is Kind.COLLECTIVE or facts.exception is not None)


def _caller(stack: tuple[Frame, ...]) -> tuple[str, str, int] | None:
    """The deepest line below the Trainer's start that is not part of a collective itself; None where it tells nothing.

    Below FSDP's code one line of forward calls for many parts of the model.
    """
    inside = stack[trainer_start(stack) :]
    for frame in reversed(inside):
        if FSDP.has(frame.file, frame.function) or starts_trainer(frame):
            return None
        if frame.user or (landmark(frame) is None and not DISTRIBUTED.has(frame.file, frame.function)):
            return frame.file, frame.function, frame.line
    return None
