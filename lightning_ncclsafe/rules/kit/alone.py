"""Ranks that do alone what takes all of them: run a model that is spread over all ranks, or call the Trainer."""

import re
from dataclasses import dataclass
from functools import partial

from lightning_ncclsafe.code.libraries import DTENSOR, FSDP
from lightning_ncclsafe.facts import Frame, Phase, ProcessFacts, RankFacts, UnitKind
from lightning_ncclsafe.rules.kit.activity import (
    Kind,
    condition_around,
    deepest_user_frame,
    starts_trainer,
    trainer_start,
)
from lightning_ncclsafe.rules.kit.meaning import unit_of
from lightning_ncclsafe.rules.kit.overruns import aborted
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline

# Conditions that hold on one rank, and not ``if rank != -1``, which holds on all.
_OF_RANK_ZERO = re.compile(r"zero|is_main|master|==\s*0\b|not\s+[\w.]*rank", re.IGNORECASE)
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


@once
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


@once
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


@once
def alone_in_trainer(view: Timeline) -> dict[int, str]:
    """Ranks that have called the Trainer under a condition on rank 0, and that condition; empty where others have, too.

    The others are in another call of the Trainer, or in none: then they have no guard that would answer, and look like
    ranks that are frozen, or they have ended in good order.
    """
    # After `if rank == 0: return` it is the others that have called it, and none of them alone.
    first = {rank: facts for rank, facts in view.facts.items() if facts.local_rank == 0 and not _has_no_trainer(facts)}
    conditions = {rank: condition for rank, facts in first.items() if (condition := _around_trainer(facts))}
    calls = {rank: _calls_of_trainer(facts) for rank, facts in view.facts.items()}
    alone = {calls[rank] for rank in conditions}
    others = [calls[rank] for rank in view.facts if rank not in conditions]
    is_told = bool(conditions) and bool(others or view.silent) and all(call and call not in alone for call in others)
    if not is_told or view.raised or not all(map(partial(_may_be_outside, view), view.silent)):
        return {}
    return conditions


def _has_no_trainer(facts: RankFacts) -> bool:
    """Who answers has one; a program that was looked at from outside may do without."""
    return facts.inspection is not None and facts.progress.phase is Phase.UNKNOWN


def _may_be_outside(view: Timeline, rank: int) -> bool:
    """Whether a silent rank may have left the Trainer, or the program, as far as others see."""
    seen = view.witnesses.get(rank)
    return seen is None or seen.state == "sleeping" or (seen.state in ("gone", "zombie") and left_in_order(seen))


def left_in_order(process: ProcessFacts) -> bool:
    """Whether a process that is gone may have come to its end: no signal is known of it, nor another status than 0."""
    return not process.ended_by and not process.exit_code


@once
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


@once
def held_at_one_line(view: Timeline) -> tuple[int, ...]:
    """Ranks at one line of the user's own, to which they have come by other ways: in a loader, or under a condition.

    Then it is that line which holds them, say by a storage that answers none of them.
    """
    ways: dict[tuple[str, int], dict[int, tuple[bool, str]]] = {}
    for rank in view.working(view.suspects):
        doing = view.activities[rank]
        if doing.frame is not None:
            way = doing.waits_for_data, doing.rank_condition
            ways.setdefault((doing.frame.file, doing.frame.line), {})[rank] = way
    return tuple(sorted(rank for one in ways.values() if len({*one.values()}) > 1 for rank in one))
