"""Ranks that called different collectives: who deviates, what each called, and for what."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.code.libraries import BACKWARD, DISTRIBUTED, FSDP, LOGGED_VALUES, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Collective, Frame, ModelUnit, RankFacts, UnitKind
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.activity import (
    Kind,
    condition_around,
    deepest_user_frame,
    is_in,
    is_telling,
    starts_trainer,
    trainer_start,
)
from lightning_ncclsafe.rules.kit.apart import condition_of, conditioned, out_of_step
from lightning_ncclsafe.rules.kit.caught import caught_by, has_gone_on, raised_at, skipped_words, skips_handled
from lightning_ncclsafe.rules.kit.lines import stack_of
from lightning_ncclsafe.rules.kit.meaning import unit_of, unit_words
from lightning_ncclsafe.rules.kit.overruns import aborted, bytes_at_once, few_by_site, is_gone, overrun_of, size_bytes
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.sentences import phase_evidence, place_words, stack_evidence, standing
from lightning_ncclsafe.rules.kit.shifts import shift
from lightning_ncclsafe.rules.kit.timeline import Divergence, Timeline, signature
from lightning_ncclsafe.rules.kit.wording import (
    call_words,
    capitalised,
    clause,
    collective_words,
    condition_words,
    joined,
    location_of,
    ranks_words,
    verb,
)

_CALLERS = (
    (LOGGED_VALUES, "in the reduction of a logged value"),
    (MODEL_CHECKPOINT, "in ModelCheckpoint"),
    (BACKWARD, "in the backward pass"),
)
_WHERE = 4
_VARIANTS = 3
_LISTED = 8


def culprits(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Those of whom something says that they are out of step, else the minority; all of them where nothing decides.

    A condition on the rank comes first. Of as many on both sides, those are next that went on after an exception.
    """
    every = called_or_ended(view, split)
    ended = len(every) > len(split.calls)
    ranks = split.deviating
    gone_on = has_gone_on(view, ranks) or skips_handled(view, ranks)[0] if len(ranks) == len(split.calls) else ()
    few = (_few_by_room(view, split) or few_by_site(view, every)) if ended else ()
    return tuple(conditioned(view, every)) or gone_on or tuple(out_of_step(view, every)) or few or ranks


def _few_by_room(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority, to which those count that gloo has ended: there was room for what they had called, as it says."""
    different = variants(split.calls)
    called = [[*ranks] for _, ranks in different]
    for rank in aborted(view):
        told = overrun_of(view, rank)
        fits = [
            number
            for number, (call, _) in enumerate(different)
            if told is not None and told[1] in bytes_at_once(call, view.job.world_size)
        ]
        if len(fits) != 1:
            return ()
        called[fits[0]].append(rank)
    most, *others = sorted(called, key=len, reverse=True)
    is_most = bool(others) and len(others[0]) < len(most)
    return tuple(sorted(rank for few in others for rank in few)) if is_most else ()


def overrun_in(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Members whose process is gone where the back end is gloo, which ends one that receives too much."""
    group = next((group for group in view.groups if group.name == split.group), None)
    if group is None or not all(call.backend == "gloo" for call in split.calls.values()):
        return ()
    return tuple(rank for rank in view.silent if is_gone(view, rank) and rank in group.members)


def odd_sizes(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority, in which a rank that received too much counts for the smallest call."""
    different, overrun = variants(split.calls), overrun_in(view, split)
    if not overrun or len(different) != 2:
        return culprits(view, split)
    smaller, larger = sorted(different, key=lambda variant: size_bytes(variant[0]))
    return tuple(larger[1]) if len(larger[1]) < len(smaller[1]) + len(overrun) else tuple(smaller[1])


@once
def called_by_threads(view: Timeline) -> dict[int, Frame]:
    """The line at which each rank has called a collective in a thread of its own, where collectives do not fit.

    That thread's calls and those of the main thread come in another order on each rank. Where the recorder knows from
    where the call was made that does not fit, it has to be that thread's.
    """
    split = view.divergence or view.lost_divergence
    calls = split.calls if split is not None else {}
    told = {rank: facts.thread_stack for rank, facts in view.facts.items() if _may_be_of_thread(calls.get(rank), facts)}
    told |= {rank: view.witnesses[rank].thread_stack for rank in aborted(view)}
    if split is None and not aborted(view):
        return {}
    lines = {rank: deepest_user_frame(stack) for rank, stack in sorted(told.items()) if stack}
    return {rank: line for rank, line in lines.items() if line is not None}


def _may_be_of_thread(call: Collective | None, facts: RankFacts) -> bool:
    places = {(frame.file, frame.line) for frame in facts.thread_stack}
    return call is None or not call.site or all((frame.file, frame.line) in places for frame in call.stack)


def called_or_ended(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks that have called something, and those that gloo has ended in what is known of their last words."""
    ended = (rank for rank in aborted(view) if view.witnesses[rank].stack)
    return tuple(sorted({*split.calls, *ended}))


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
        if frame.user or (not is_telling(frame) and not DISTRIBUTED.has(frame.file, frame.function)):
            return frame.file, frame.function, frame.line
    return None


def why_it_went_on(view: Timeline, split: Divergence, ranks: tuple[int, ...]) -> tuple[Frame | None, str]:
    """Where an exception took these ranks past what the others called, and what is said of it; None without one."""
    if condition_of(view, ranks[0]) or len(ranks) == len(split.calls):
        return None, ""
    caught = next((one for one in caught_by(view, ranks[0]) if not one.thread), None)
    if caught is not None and has_gone_on(view, ranks[:1]):
        return raised_at(caught), ""
    beyond, frame = skips_handled(view, split.calls)
    if frame is None or not set(ranks) <= set(beyond):
        return None, ""
    others = [rank for rank in split.calls if rank not in beyond]
    return frame, skipped_words(frame, clause(others, "waits|wait"))


def is_at_words(view: Timeline, rank: int) -> str:
    """Where a rank is, or was until the connections broke."""
    is_there = rank in view.facts and view.facts[rank].exception is None
    return f"is {standing(view, rank)}" if is_there else f"was {was_at_words(view, rank)}"


def was_at_words(view: Timeline, rank: int) -> str:
    """The user's line, or what of Lightning's and DDP's it was in."""
    stack = stack_of(view, rank)
    known = (words for code, words in _CALLERS if is_in(code, stack))
    return place_words(deepest_user_frame(stack[trainer_start(stack) :])) or next(known, "in Lightning's own code")


def silent_words(view: Timeline) -> str:
    """What is known of ranks that do not answer; empty without any."""
    gone = tuple(rank for rank in view.silent if is_gone(view, rank))
    outside = tuple(rank for rank in view.silent if rank not in gone)
    ended = f" The process of {ranks_words(gone)} has ended." if gone else ""
    away = f"{capitalised(ranks_words(outside))} {verb(outside, 'does', 'do')} not answer, as"
    return ended + (f" {away} {verb(outside, 'a rank', 'ranks')} outside the Trainer." if outside else "")
