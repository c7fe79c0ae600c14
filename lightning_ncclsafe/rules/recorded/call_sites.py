"""Where ranks have called, as dumps with stacks show it: which call some of them have skipped, or made alone."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import PurePath

from lightning_ncclsafe.facts import Collective, Frame, RankFacts
from lightning_ncclsafe.rules.kit import (
    Divergence,
    Evidence,
    Shift,
    Timeline,
    inside_trainer,
    location_of,
    numel,
    once,
    shift,
)
from lightning_ncclsafe.rules.recorded.calls import record_of

# Of the ranks that have made the same call, this many are compared with the others.
_COMPARED = 32
_MOST_SIDES = 4


def left_out_at(view: Timeline, split: Divergence) -> str:
    """The user's line of the first call that only some ranks have made; empty if stacks do not show it."""
    found = _shift(view, split.group, _compared(view, split))
    return location_of(found.frame) if found is not None else ""


def out_of_step(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks that have skipped a call, or made one alone; empty if stacks and later calls do not show which."""
    found = _decided_shift(view, split)
    return found.ranks if found is not None and found.count else ()


def left_out_evidence(view: Timeline, split: Divergence) -> Iterator[Evidence]:
    """Which ranks have made a call that the others have not."""
    found = _decided_shift(view, split)
    if found is not None:
        number = f" (number {found.call.seq:,})" if found.call.seq != split.seq else ""
        yield Evidence(source="flight recorder", text=f"By their stacks, {found.words()}{number}.")


def _decided_shift(view: Timeline, split: Divergence) -> Shift | None:
    ranks = _compared(view, split)
    found = _shift(view, split.group, ranks)
    return found if found is not None and found.is_decided and len(ranks) == len(split.calls) else None


def _compared(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Ranks whose dumps are compared, some of each side; none if a side has no dump."""
    ranks: list[int] = []
    sides = split.variants
    for _, who in sides if len(sides) <= _MOST_SIDES else ():
        dumped = [rank for rank in who if record_of(view.facts[rank]).has_dump]
        if not dumped:
            return ()
        ranks += dumped[:_COMPARED]
    return tuple(sorted(ranks))


@once
def _shift(view: Timeline, group: str, ranks: tuple[int, ...]) -> Shift | None:
    if len(ranks) < 2:
        return None
    with_sites = tuple(_with_sites(view.facts[rank], group) for rank in ranks)
    return shift(Timeline(replace(view.job, ranks=with_sites)), group)


def _with_sites(facts: RankFacts, group: str) -> RankFacts:
    calls = [call for call in facts.collectives if call.group == group]
    if not any(call.stack for call in calls):
        # The recorder has kept no stacks: calls without one are not the backward pass alone.
        return replace(facts, collectives=tuple(calls))
    return replace(facts, collectives=tuple(replace(call, site=_site(call)) for call in calls))


def _site(call: Collective) -> str:
    """What is equal on all ranks for calls from one place."""
    if not call.stack:
        return f"native:{call.op}:{numel(call)}"
    places = "|".join(map(_place, inside_trainer(call.stack)))
    return blake2b(places.encode("utf-8", "replace"), digest_size=6).hexdigest()


def _place(frame: Frame) -> str:
    return f"{'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line}:{frame.function}"
