"""Ranks that called different collectives, according to the Flight Recorder: which deviate, and what each called.

What stacks show of ranks that wait in different calls is in ``waits``.
"""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.code.libraries import BACKWARD, FSDP, LOGGED_VALUES, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Collective, Frame, RankFacts, UnitKind
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.facts.wording import (
    LISTED,
    call_words,
    capitalised,
    collective_words,
    encloses_words,
    place_words,
    ranks_words,
)
from lightning_ncclsafe.rules.kit.caught_exceptions import (
    beyond_try,
    continued_after_exception,
)
from lightning_ncclsafe.rules.kit.exception_messages import is_garbled, is_raised_by_torch_distributed
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame, inside_trainer, is_in, starts_trainer
from lightning_ncclsafe.rules.kit.gloo_aborts import (
    aborted_by_gloo,
    at_once,
    minority_by_site,
    overrun_bytes,
    size_bytes,
)
from lightning_ncclsafe.rules.kit.landmarks import Kind, condition_around
from lightning_ncclsafe.rules.kit.parts import evidence_about, minority
from lightning_ncclsafe.rules.kit.purpose import unit_of, unit_words
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.sentences import phase_evidence, stack_evidence
from lightning_ncclsafe.rules.kit.shifts import shift
from lightning_ncclsafe.rules.kit.silent_ranks import is_gone
from lightning_ncclsafe.rules.kit.timeline import Divergence, Timeline, stack_of
from lightning_ncclsafe.rules.kit.user_lines import called_at
from lightning_ncclsafe.rules.kit.waits import is_of_wait, out_of_step, under_rank_condition

_CALLING_CODE = (
    (LOGGED_VALUES, "in the reduction of a logged value"),
    (MODEL_CHECKPOINT, "in ModelCheckpoint"),
    (BACKWARD, "in the backward pass"),
)
_WHERE = 4
_VARIANTS = 3


def culprits(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks that are out of step for a known reason, else the minority; all of them if nothing decides.

    A condition on the rank decides first; if both sides are equally large, next an exception decides.
    """
    every = callers_and_aborted(view, split)
    ended = len(every) > len(split.calls)
    ranks = split.deviating
    continued = (
        continued_after_exception(view, ranks) or beyond_try(view, ranks)[0] if len(ranks) == len(split.calls) else ()
    )
    few = (_few_by_room(view, split) or minority_by_site(view, every)) if ended else ()
    return tuple(under_rank_condition(view, every)) or continued or tuple(out_of_step(view, every)) or few or ranks


def _few_by_room(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority, counting ranks that gloo aborted: the size they had room for shows what they had called."""
    different = split.variants
    called = [[*ranks] for _, ranks in different]
    for rank in aborted_by_gloo(view):
        sizes = overrun_bytes(view, rank)
        fits = [
            number
            for number, (call, _) in enumerate(different)
            if sizes is not None and sizes[1] in at_once(view, call)
        ]
        if len(fits) != 1:
            return ()
        called[fits[0]].append(rank)
    return minority(called)


def overrun_ranks(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """Members on gloo whose process is gone: gloo aborts a process that receives more than it has room for."""
    group = view.groups_by_name.get(split.group)
    if group is None or not all(call.backend == "gloo" for call in split.calls.values()):
        return ()
    return tuple(rank for rank in view.silent if is_gone(view, rank) and rank in group.members)


def odd_sizes(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The minority, counting ranks that received too much as callers of the smallest call."""
    different, overrun = split.variants, overrun_ranks(view, split)
    if not overrun or len(different) != 2:
        return culprits(view, split)
    smaller, larger = sorted(different, key=lambda variant: size_bytes(variant[0]))
    return larger[1] if len(larger[1]) < len(smaller[1]) + len(overrun) else smaller[1]


def all_garbled(view: Timeline) -> bool:
    """Whether all exceptions, if there are any, only follow from data of another collective than the one waited for."""
    errors = (view.facts[rank].exception for rank in view.raised)
    return all(error is not None and is_garbled(error) for error in errors)


def has_misread_sizes(view: Timeline) -> bool:
    """Whether ranks have raised, and only because ``torch.distributed`` took data of another collective for a size."""
    errors = [view.facts[rank].exception for rank in view.raised]
    are_of_torch = all(error is not None and is_raised_by_torch_distributed(error) for error in errors)
    return bool(errors) and view.job.world_size > 1 and are_of_torch and all_garbled(view)


@once
def called_by_threads(view: Timeline) -> dict[int, Frame]:
    """The line at which each rank calls a collective in another thread, if ranks have called different collectives.

    The calls of that thread and of the main thread interleave differently on each rank. If the recorder has the stack
    of the differing call, it has to be that thread's on one of the ranks. On another rank whose thread is at the same
    line, the thread has merely come later.
    """
    split = view.any_divergence
    calls = split.calls if split is not None else {}
    stacks = {
        rank: facts.thread_stack for rank, facts in view.facts.items() if _may_be_of_thread(calls.get(rank), facts)
    }
    stacks |= {rank: view.witnesses[rank].thread_stack for rank in aborted_by_gloo(view)}
    if split is None and not aborted_by_gloo(view):
        return {}
    lines = {rank: line for rank, stack in stacks.items() if (line := deepest_user_frame(stack)) is not None}
    later = {rank: deepest_user_frame(facts.thread_stack) for rank, facts in view.facts.items() if rank not in lines}
    places = {(line.file, line.line) for line in lines.values()}
    lines |= {rank: line for rank, line in later.items() if line is not None and (line.file, line.line) in places}
    return dict(sorted(lines.items()))


def _may_be_of_thread(call: Collective | None, facts: RankFacts) -> bool:
    places = {(frame.file, frame.line) for frame in facts.thread_stack}
    return call is None or not call.site or all((frame.file, frame.line) in places for frame in call.stack)


def callers_and_aborted(view: Timeline, split: Divergence) -> tuple[int, ...]:
    """The ranks with a call at this number, and those that gloo aborted and whose last traceback is known."""
    ended = (rank for rank in aborted_by_gloo(view) if view.witnesses[rank].stack)
    return tuple(sorted({*split.calls, *ended}))


def calls_words(view: Timeline, split: Divergence) -> str:
    """``"ranks 0-2 called all_reduce (8 elements) and rank 3 called barrier"``."""
    different = split.variants
    listed = [
        f"{ranks_words(who)} called {_call_words(call, view.facts[who[0]])}" for call, who in different[:_VARIANTS]
    ]
    more = len(different) - _VARIANTS
    return " and ".join(listed) + (f" and {more} other variants" if more > 0 else "")


def _call_words(call: Collective, facts: RankFacts) -> str:
    unit = unit_words(call, facts)
    return f"{call_words(call)} for {unit}" if unit else call_words(call)


def call_evidence(split: Divergence | None) -> Iterator[Evidence]:
    """One line for each different call, with its number; nothing if there is no difference."""
    for call, who in split.variants[:LISTED] if split is not None else ():
        text = f"{capitalised(ranks_words(who))} called {collective_words(call)}."
        yield evidence_about(who, "flight recorder", text)


def condition_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """The conditions on the rank around the present lines of these ranks."""
    for rank in sorted(ranks)[:LISTED]:
        condition, frame = condition_around(stack_of(view, rank))
        if condition:
            yield Evidence(source="source code", rank=rank, text=encloses_words(condition, frame))


def where_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """Where the first of these ranks are: stack and phase."""
    listed = sorted(ranks)[:_WHERE]
    yield from stack_evidence(view, listed)
    yield from phase_evidence(view, listed)


def send_different_units(view: Timeline, split: Divergence) -> bool:
    """Whether each rank's call sends an FSDP unit, by its size, and not the same one: they compute different things."""
    units = [unit_of(call, view.facts[rank]) for rank, call in split.calls.items()]
    names = [unit.name for unit in units if unit is not None and unit.kind is UnitKind.FSDP_UNIT]
    return len(names) == len(units) and len({*names}) > 1


def same_purpose(view: Timeline, split: Divergence) -> bool | None:
    """Whether ranks made these calls for one purpose: for parts of the model of one kind, or from one line.

    None if unknown: without stacks in the recorder, a rank's own stack shows the purpose of its last call only, and of
    two calls in one function a rank may have skipped the first. A call by the user's code and a call by Lightning's
    have different purposes.
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
        are_users = {deepest_user_frame(inside_trainer(stack)) is not None for stack in stacks}
        all_known = len(stacks) == len(split.calls) and all(stacks)
        return False if all_known and len(are_users) > 1 else None
    if len({purpose[:2] for purpose in known}) > 1:
        return False
    # One helper may be called from several lines.
    is_one_line = "" in sites or all(purpose[0] == "unit" for purpose in known)
    return True if len({*known}) == 1 and is_one_line else None


def _purpose(view: Timeline, rank: int, call: Collective) -> tuple[str, str, int] | None:
    """File, function and line of the caller; or "unit" and the part of the model that it sends."""
    facts = view.facts[rank]
    unit = unit_of(call, facts)
    if unit is not None:
        # Buckets are reduced in order: a different bucket under the same number is a different call.
        return "unit", unit.kind.value + (unit.name if unit.kind is UnitKind.DDP_BUCKET else ""), 0
    recorded = view.with_stack(call).stack
    if any(frame.user for frame in recorded):
        return _caller(recorded)
    return _caller(stack_of(view, rank)) if _is_present(view, rank, call) else None


def _is_present(view: Timeline, rank: int, call: Collective) -> bool:
    """Whether a rank's stack shows where this was called: it is the last call, and the rank waits or raised in it."""
    facts = view.facts[rank]
    is_last = not any(later.group == call.group and later.seq > call.seq for later in facts.collectives)
    return is_last and (view.activities[rank].kind is Kind.COLLECTIVE or facts.exception is not None)


def _caller(stack: tuple[Frame, ...]) -> tuple[str, str, int] | None:
    """The deepest line below the Trainer that is not part of a collective itself; None if it is not specific.

    FSDP gathers many parts of the model from one line of forward.
    """
    inside = inside_trainer(stack)
    for frame in reversed(inside):
        if FSDP.has(frame.file, frame.function) or starts_trainer(frame):
            return None
        if frame.user or not is_of_wait(frame):
            return frame.file, frame.function, frame.line
    return None


def was_at_words(view: Timeline, rank: int) -> str:
    """The user's line that a rank was at, or what of Lightning or DDP it was in."""
    known = (words for code, words in _CALLING_CODE if is_in(code, stack_of(view, rank)))
    return place_words(called_at(view, rank)) or next(known, "in Lightning's own code")
