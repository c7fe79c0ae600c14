"""Ranks that do alone what needs all ranks: run a model that is sharded over them, or call the Trainer."""

import re
from dataclasses import dataclass
from functools import partial

from lightning_ncclsafe.code.libraries import DTENSOR, FSDP, SAVE_CHECKPOINT
from lightning_ncclsafe.facts import ELSE, PAST, Frame, Phase, RankFacts, UnitKind
from lightning_ncclsafe.rules.kit.activity import has_no_trainer, open_collectives, waits_for_silent_device
from lightning_ncclsafe.rules.kit.frames import (
    below_user,
    deepest_user_frame,
    is_in,
    outside_trainer,
    starts_trainer,
    user_frames,
)
from lightning_ncclsafe.rules.kit.gloo_aborts import aborted_by_gloo
from lightning_ncclsafe.rules.kit.landmarks import Kind, condition_around
from lightning_ncclsafe.rules.kit.purpose import unit_of
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.silent_ranks import is_before_trainer, is_gone, left_in_order, waiting_outside_trainer
from lightning_ncclsafe.rules.kit.timeline import Timeline

# Conditions that hold on one rank only, unlike ``if rank != -1``, which holds on all; a bare name is that of a test.
_OF_RANK_ZERO = re.compile(r"zero|is_main|master|==\s*0\b|not\s+[\w.]*rank|^if\s+[\w.]+(?:\(\))?$", re.IGNORECASE)
# Conditions that hold on all other ranks: only rank 0 is past a jump under one of these, or in its `else`.
_OF_OTHERS = re.compile(r"!=\s*0\b|>\s*0\b|>=\s*1\b|not\s+[\w.]*(?:zero|main|master)|if\s+[\w.]*rank$", re.IGNORECASE)
# Calls that a rank may have made between running the model alone and the abort.
_RECENT = 16
_SHARDED = (UnitKind.FSDP_UNIT, UnitKind.PARAMETER)
_SHARDED_CODE = FSDP | DTENSOR


@dataclass(frozen=True, slots=True)
class AbortedModelRun:
    """A rank that ran a sharded model alone, until gloo aborted its own process or that of another rank.

    Attributes:
        rank: The rank.
        condition: The condition on the rank, with its line number.
        condition_frame: The frame that contains this condition.
        frame: The user's line that ran the model.
        ended: Ranks whose processes gloo has aborted.
    """

    rank: int
    condition: str
    condition_frame: Frame | None
    frame: Frame | None
    ended: tuple[int, ...]


@once
def gathering_alone(view: Timeline) -> tuple[int, ...]:
    """Ranks that wait, under a condition on the rank, for shards of the model that no other rank sends.

    Empty if something else explains the wait: a rank that works, has raised or is silent, or all ranks are under such
    conditions or wait in the same collective.
    """
    is_unread = any(map(waits_for_silent_device, view.facts.values()))
    if view.raised or view.silent or view.working(view.facts) or not (view.divergence or view.behind or is_unread):
        return ()
    ranks = tuple(rank for rank in sorted(view.facts) if _gathers(view, rank))
    others = view.facts.keys() - set(ranks)
    is_shared = any(view.activities[rank].rank_condition for rank in others)
    return ranks if others and not is_shared else ()


@once
def aborted_model_run(view: Timeline) -> AbortedModelRun | None:
    """The rank that ran the model alone until gloo aborted a process and the connections broke; None if unknown."""
    ended = () if view.raised else aborted_by_gloo(view)
    if not ended:
        return None
    errors = {rank: facts.exception for rank, facts in sorted(view.facts.items())}
    stacks = {rank: error.stack for rank, error in errors.items() if error is not None}
    stacks |= {rank: view.witnesses[rank].stack for rank in ended}
    around = {rank: condition_around(stack) for rank, stack in stacks.items()}
    conditions = [(rank, condition, frame) for rank, (condition, frame) in around.items() if condition]
    if not conditions:
        return _earlier_model_run(view, ended) if any(map(_in_sharded_call, stacks.values())) else None
    if len(conditions) != 1 or not _in_sharded_call(stacks[conditions[0][0]]):
        return None
    rank, condition, frame = conditions[0]
    if _is_regular(view, rank, frame):
        return None
    return AbortedModelRun(rank, condition, frame, deepest_user_frame(stacks[rank]), ended)


def _earlier_model_run(view: Timeline, ended: tuple[int, ...]) -> AbortedModelRun | None:
    """A model run whose calls were paired with those of another step, so that gloo aborted a process only after it."""
    found: dict[int, AbortedModelRun] = {}
    for rank, facts in view.facts.items():
        for call in map(view.with_stack, facts.collectives[-_RECENT:]):
            condition, frame = condition_around(call.stack)
            # The recorder keeps no frames below the user's, by which FSDP would be known.
            if condition and "all_gather" in call.op and not _is_regular(view, rank, frame):
                found[rank] = AbortedModelRun(rank, condition, frame, frame, ended)
    return next(iter(found.values())) if len(found) == 1 else None


def _is_regular(view: Timeline, rank: int, frame: Frame | None) -> bool:
    """Whether this line has called collectives in earlier steps, too: then the rank does not do this work alone."""
    earlier = view.facts[rank].collectives[:-_RECENT] if rank in view.facts else ()
    lines = {(one.file, one.line) for call in map(view.with_stack, earlier) for one in call.stack}
    return frame is not None and (frame.file, frame.line) in lines


def _gathers(view: Timeline, rank: int) -> bool:
    doing, facts = view.activities[rank], view.facts[rank]
    if not doing.rank_condition or doing.kind is not Kind.COLLECTIVE or doing.collective is None:
        return False
    # On a device, the main thread may wait for what the training has called before.
    is_called_here = not doing.on_device or _called_all_under(view, rank, doing.condition_frame)
    unit = unit_of(doing.collective, facts)
    is_unit = unit is not None and unit.kind in _SHARDED
    return is_called_here and (is_unit or _in_sharded_call(facts.stack))


def _called_all_under(view: Timeline, rank: int, condition: Frame | None) -> bool:
    """Whether all that this rank waits for was called below the frame that has the condition on the rank."""
    calls = [*open_collectives(view.facts[rank])]
    stacks = [view.with_stack(call).stack for call in calls]
    if condition is None or len(calls) == 1:
        return True
    return all(any((one.file, one.function) == (condition.file, condition.function) for one in own) for own in stacks)


def _in_sharded_call(stack: tuple[Frame, ...]) -> bool:
    """Whether FSDP or a DTensor has called what this stack is in, below the user's deepest line."""
    return is_in(_SHARDED_CODE, below_user(stack))


@once
def saving_alone(view: Timeline) -> dict[int, tuple[Frame, ...]]:
    """Ranks that alone save a checkpoint outside of Trainer.fit and the like, with their stacks.

    The others have left or are elsewhere. If no rank saves under a condition, those that are elsewhere may be late.
    """
    stacks = {rank: facts.stack for rank, facts in view.facts.items() if saves_outside(facts)}
    if view.raised or 0 < len(stacks) < len(view.facts):
        return {}
    # Ranks in the next call of the Trainer see such a rank from outside.
    stacks = stacks or {rank: own for rank, own in waiting_outside_trainer(view).items() if _saves(own)}
    others = {*view.facts, *view.silent} - stacks.keys()
    left = {rank for rank in others if is_gone(view, rank) and left_in_order(view.witnesses[rank])}
    elsewhere = {rank for rank in others - left if rank in view.facts or _is_elsewhere(view, rank)}
    is_alone = left == others or any(condition_around(stack)[0] for stack in stacks.values())
    return stacks if others and is_alone and left | elsewhere == others else {}


def saves_outside(facts: RankFacts) -> bool:
    """Whether a rank saves a checkpoint outside of Trainer.fit and the like."""
    return _saves((*facts.stack, *facts.raised_stack))


def _saves(stack: tuple[Frame, ...]) -> bool:
    return is_in(SAVE_CHECKPOINT, stack) and not any(map(starts_trainer, stack))


def _is_elsewhere(view: Timeline, rank: int) -> bool:
    """Whether a silent rank has not called the save, and is not about to answer from there."""
    return is_before_trainer(view, rank) and not (rank in view.witnesses and _saves(view.witnesses[rank].stack))


@once
def alone_in_trainer(view: Timeline) -> dict[int, str]:
    """Ranks that have called the Trainer under a condition on rank 0, with that condition; empty if others did as well.

    The others are in another call of the Trainer, or in none. If they are in none, no guard answers for them, so they
    look frozen, or they have exited normally.
    """
    if saving := saving_alone(view):
        return {rank: condition_around(stack)[0] for rank, stack in saving.items()}
    # After `if rank == 0: return` the other ranks call it, and none of them alone.
    first = {rank: facts for rank, facts in view.facts.items() if facts.local_rank == 0 and not has_no_trainer(facts)}
    conditions = {rank: condition for rank, facts in first.items() if (condition := _around_trainer(facts))}
    outer = {rank: user_frames(outside_trainer(facts.stack)) for rank, facts in view.facts.items()}
    calls = {rank: tuple((frame.file, frame.line) for frame in frames) for rank, frames in outer.items()}
    alone = {calls[rank] for rank in conditions}
    others = [calls[rank] for rank in view.facts if rank not in conditions]
    are_elsewhere = bool(others or view.silent) and all(call and call not in alone for call in others)
    if not conditions or not are_elsewhere or view.raised:
        return {}
    if not all(map(partial(_may_be_outside, view), view.silent)):
        return {}
    return conditions


def _may_be_outside(view: Timeline, rank: int) -> bool:
    """Whether a silent rank may have left the Trainer, or the program, as far as other processes see."""
    process = view.witnesses.get(rank)
    if process is None or process.state == "sleeping":
        return True
    return is_gone(view, rank) and left_in_order(process)


@once
def in_trainer_again(view: Timeline) -> dict[int, Frame]:
    """Ranks that have called their Trainer from one of its own hooks, and where; empty unless all others have finished.

    A second Trainer made in a hook does not count: the other ranks are not part of it.
    """
    again = {rank: frame for rank, facts in view.facts.items() if (frame := _calls_trainer_again(facts))}
    others = view.facts.keys() - again.keys()
    return again if others and others <= {*view.finished} else {}


def _calls_trainer_again(facts: RankFacts) -> Frame | None:
    runs = [index for index, frame in enumerate(facts.stack) if starts_trainer(frame)]
    between = facts.stack[runs[0] : runs[-1]] if runs else ()
    hooks = {action.name.rpartition(".")[2] for action in facts.progress.actions}
    # The Trainer's present phase is not the one that the hook belongs to.
    is_called_again = facts.progress.phase in (Phase.VALIDATE, Phase.TEST, Phase.PREDICT)
    is_in_hook = not hooks.isdisjoint(frame.function for frame in between if frame.user)
    return deepest_user_frame(between) if is_called_again and is_in_hook else None


def _around_trainer(facts: RankFacts) -> str:
    """The condition on rank 0 around the call of the Trainer; empty if there is none."""
    conditions = (
        frame.rank_condition for frame in reversed(user_frames(outside_trainer(facts.stack))) if frame.rank_condition
    )
    return next(filter(_is_of_rank_zero, conditions), "")


def _is_of_rank_zero(condition: str) -> bool:
    known = _OF_OTHERS if condition.startswith((ELSE, PAST)) else _OF_RANK_ZERO
    # The rest of its line, behind the colon, is not part of the condition.
    return known.search(condition.partition(":")[0]) is not None


@once
def blocked_at_one_line(view: Timeline) -> tuple[int, ...]:
    """Ranks that have reached the same line of the user's code on different paths: in a loader, or under a condition.

    That line itself blocks them, for instance a storage that answers none of them.
    """
    by_line: dict[tuple[str, int], dict[int, tuple[bool, str]]] = {}
    for rank in view.working(view.suspects):
        doing = view.activities[rank]
        if doing.frame is not None:
            way = doing.waits_for_data, doing.rank_condition
            by_line.setdefault((doing.frame.file, doing.frame.line), {})[rank] = way
    return tuple(sorted(rank for ways in by_line.values() if len({*ways.values()}) > 1 for rank in ways))
