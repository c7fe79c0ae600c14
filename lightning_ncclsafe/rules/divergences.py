"""Parts of findings about ranks that called different collectives: who deviates, what each called, and from where."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import Collective, Frame, ModelUnit, RankFacts, UnitKind
from lightning_ncclsafe.findings import Evidence
from lightning_ncclsafe.known_code import DISTRIBUTED, FSDP
from lightning_ncclsafe.rules.activity import Kind, deepest_user_frame, trainer_start
from lightning_ncclsafe.rules.caught import has_gone_on, skips_handled
from lightning_ncclsafe.rules.landmarks import landmark, starts_trainer
from lightning_ncclsafe.rules.sentences import phase_evidence, stack_evidence
from lightning_ncclsafe.rules.timeline import Divergence, Timeline, signature
from lightning_ncclsafe.rules.units import unit_of, unit_words
from lightning_ncclsafe.rules.wording import (
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
_WHERE = 4
_VARIANTS = 3
_LISTED = 8


def culprits(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority; between equals those whose line stands under a condition on the rank, or that went on."""
    ranks = split.deviating
    if len(ranks) < len(split.calls):
        return ranks
    conditioned = tuple(rank for rank in ranks if condition_of(view, rank))
    return conditioned or has_gone_on(view, ranks) or skips_handled(view, ranks)[0] or ranks


def condition_of(view: Timeline, rank: int) -> str:
    """The condition on the rank under which its present line stands; empty if there is none."""
    return view.activities[rank].rank_condition


def apart(view: Timeline) -> dict[int, str]:
    """Ranks that wait where only some ranks come, and why only they do, in words; empty if that is true of all."""
    found = {rank: _why_apart(view, rank) for rank in view.waiting}
    alone = {rank: why for rank, why in found.items() if why}
    return alone if len(alone) < len(view.facts) else {}


def _why_apart(view: Timeline, rank: int) -> str:
    if condition := condition_of(view, rank):
        return f"under {condition_words(condition)}"
    in_prepare_data = any(action.name.endswith(".prepare_data") for action in view.facts[rank].progress.actions)
    return "in prepare_data, which Lightning calls on one rank of each host" if in_prepare_data else ""


def alone_in_trainer(view: Timeline) -> tuple[tuple[int, ...], str]:
    """Ranks that have called the Trainer under a condition on rank 0, and that condition; empty where others are in it.

    A rank that is in no call of the Trainer has no guard that would answer, and looks like one that is frozen.
    """
    conditions = {rank: _around_trainer(facts) for rank, facts in view.facts.items()}
    is_told = bool(conditions) and all(conditions.values()) and bool(view.silent)
    asleep = all(view.witnesses[rank].state == "sleeping" for rank in view.silent if rank in view.witnesses)
    if not is_told or not asleep or view.raised:
        return (), ""
    return tuple(sorted(conditions)), next(iter(conditions.values()))


def _around_trainer(facts: RankFacts) -> str:
    outside = facts.stack[: trainer_start(facts.stack)]
    conditions = (frame.rank_condition for frame in reversed(outside) if frame.user and frame.rank_condition)
    # What stands behind it on its line is not part of it.
    return next((condition for condition in conditions if _OF_RANK_ZERO.search(condition.partition(":")[0])), "")


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
        doing = view.activities[rank]
        if doing.rank_condition:
            text = f"{condition_words(doing.rank_condition)} encloses {location_of(doing.condition_frame)}."
            yield Evidence(source="source code", rank=rank, text=text)


def where_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """Where the first of these ranks stand."""
    listed = sorted(ranks)[:_WHERE]
    yield from stack_evidence(view, listed)
    yield from phase_evidence(view, listed)


def called_at(facts: RankFacts) -> Frame | None:
    """The deepest line in the user's code from which a rank called what it waits in, or waited in until it raised."""
    return deepest_user_frame(facts.exception.stack if facts.exception else facts.stack)


def calls_location(view: Timeline, ranks: Iterable[int]) -> str:
    """The same of the first of these ranks that has one."""
    frames = (called_at(view.facts[rank]) for rank in ranks if rank in view.facts)
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
    calls in one function a rank may have skipped the first.
    """
    purposes = [_purpose(view, rank, call) for rank, call in split.calls.items()]
    known = [purpose for purpose in purposes if purpose is not None]
    if len(known) < len(purposes):
        return None
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
    is_last = not any(later.group == call.group and later.seq > call.seq for later in facts.collectives)
    if not is_last or (view.activities[rank].kind is not Kind.COLLECTIVE and facts.exception is None):
        return None
    return _caller(facts.exception.stack if facts.exception else facts.stack)


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
