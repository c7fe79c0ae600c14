"""Ranks that run a model which is spread over all ranks (FSDP, DTensors) while the others do something else."""

from dataclasses import dataclass

from lightning_ncclsafe.code.libraries import DTENSOR, FSDP
from lightning_ncclsafe.facts import Frame, RankFacts, UnitKind
from lightning_ncclsafe.rules.kit.activity import Kind, condition_around, deepest_user_frame
from lightning_ncclsafe.rules.kit.overruns import aborted
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.units import unit_of

_SPREAD = (UnitKind.FSDP_UNIT, UnitKind.PARAMETER)
_CODE = FSDP | DTENSOR


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """What a rank ran alone when gloo ended a process, to which it sent, or which it sent something else.

    Attributes:
        rank: The rank.
        condition: The condition on the rank, with its line number.
        condition_frame: The frame in which that condition stands.
        frame: The user's line that ran the model.
        ended: Ranks whose processes gloo has ended.
    """

    rank: int
    condition: str
    condition_frame: Frame | None
    frame: Frame | None
    ended: tuple[int, ...]


def gathering_alone(view: Timeline) -> tuple[int, ...]:
    """Ranks that wait, under a condition on the rank, for a part of the model that nobody else has come to give them.

    Empty where the wait has another reason: a rank at work, one that has raised or is silent, or ranks that all are
    under such conditions, or all at one place.
    """
    if view.raised or view.silent or view.working(view.facts) or not _is_out_of_step(view):
        return ()
    ranks = tuple(rank for rank in sorted(view.facts) if _gathers(view, rank))
    others = view.facts.keys() - set(ranks)
    is_shared = any(view.activities[rank].rank_condition for rank in others)
    return ranks if others and not is_shared else ()


def broken_off_alone(view: Timeline) -> BrokenOff | None:
    """The rank that did so until gloo ended a process and the connections broke; None where that is not known."""
    ended = () if view.raised else aborted(view)
    if not ended:
        return None
    errors = {rank: facts.exception for rank, facts in sorted(view.facts.items())}
    stacks = {rank: error.stack for rank, error in errors.items() if error is not None}
    stacks |= {rank: view.witnesses[rank].stack for rank in ended}
    around = {rank: condition_around(stack) for rank, stack in stacks.items()}
    found = [(rank, *told) for rank, told in around.items() if told[0]]
    if len(found) != 1 or not _runs_spread(stacks[found[0][0]]):
        return None
    rank, condition, frame = found[0]
    return BrokenOff(rank, condition, frame, deepest_user_frame(stacks[rank]), ended)


def _is_out_of_step(view: Timeline) -> bool:
    """Whether ranks have called different collectives, or not all have come to where others wait."""
    return view.divergence is not None or bool(view.behind)


def _gathers(view: Timeline, rank: int) -> bool:
    doing, facts = view.activities[rank], view.facts[rank]
    if not doing.rank_condition or doing.kind is not Kind.COLLECTIVE or doing.collective is None:
        return False
    # On a device the main thread may wait for what the training has called before.
    is_called_here = not doing.on_device or _is_sole(facts)
    unit = unit_of(doing.collective, facts)
    is_unit = unit is not None and unit.kind in _SPREAD
    return is_called_here and (is_unit or _runs_spread(facts.stack))


def _is_sole(facts: RankFacts) -> bool:
    return len([entry for entry in facts.collectives if not entry.completed and not entry.is_p2p]) == 1


def _runs_spread(stack: tuple[Frame, ...]) -> bool:
    """Whether FSDP or a DTensor has called what a rank waits in, below the last line of the user's own."""
    for frame in reversed(stack):
        if frame.user:
            return False
        if _CODE.has(frame.file, frame.function):
            return True
    return False
