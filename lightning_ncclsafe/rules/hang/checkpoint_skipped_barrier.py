"""The cause checkpoint-skipped-barrier: a rank's save failed and was caught, and the others wait in the save."""

import builtins
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

from lightning_ncclsafe.code.libraries import SAVE_CHECKPOINT
from lightning_ncclsafe.facts import Branch, Decides, ExceptionFacts, Frame, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Timeline,
    advice,
    at_words,
    branch_place,
    condition_words,
    deepest_user_frame,
    error_words,
    finding,
    hang_rule,
    location_of,
    phase_evidence,
    ranks_words,
    recorder_evidence,
    short_location,
    signature,
    storage_evidence,
    verb,
    where_words,
    while_others_wait,
)

_SAVES = ("save_checkpoint", "barrier:Trainer.save_checkpoint")
_SUPPRESSES = ("with", "async with")
# Names in the clause of a handler.
_TYPES = re.compile(r"\b(?!(?:except|with|async|suppress|contextlib|line)\b)[A-Za-z_]\w*")
_REMEDY = (
    "{advice}. If training should continue after a failed save, catch the exception around the writing alone (in your "
    "own CheckpointIO), so that this rank still reaches the barrier; otherwise raise it."
)


@hang_rule(after="at-breakpoint")
def checkpoint_skipped_barrier(view: Timeline) -> Iterator[Finding]:
    """Saving a checkpoint raised on one rank, the user's code caught it, and the rank never reached the save's barrier.

    Symptom:
        All ranks but one wait in the barrier after a save; that one is in the next step as if nothing had happened.

    Cause:
        try … except around trainer.save_checkpoint: a full disk, an error of the remote storage.

    Remedy:
        Catch the exception where the file is written, or not at all.

    Cannot see:
        Saves that bypass the Trainer; a failed and caught save under a profiler that replaces Lightning's profile().
    """
    left = tuple(rank for rank, facts in sorted(view.facts.items()) if _left_save(facts))
    # If a save failed on all ranks, none was left in it, and the present save is another one.
    others = [facts for rank in view.waiting_besides(left) if (facts := view.facts[rank]).failed_save is None]
    if not left or not others or view.raised:
        return
    if any(map(_is_saving, others)):
        yield _finding(view, left, Confidence.CERTAIN)
    elif _are_apart(view, left, others):
        # The save's barrier has completed with a later call of the rank that has left it.
        yield _finding(view, left, Confidence.LIKELY)


def _are_apart(view: Timeline, left: tuple[int, ...], others: Iterable[RankFacts]) -> bool:
    """Whether ranks that have left a save are in another call than the others, under the same number."""
    split = view.divergence
    if split is None:
        return False
    own, theirs = (
        {signature(split.calls[rank]) for rank in ranks if rank in split.calls}
        for ranks in (left, (facts.rank for facts in others))
    )
    return bool(own and theirs) and own.isdisjoint(theirs)


def _left_save(facts: RankFacts) -> bool:
    failed = facts.failed_save
    return failed is not None and not failed.is_consequence and not _is_saving(facts)


def _is_saving(facts: RankFacts) -> bool:
    return any(action.name.startswith(_SAVES) for action in facts.progress.actions)


def _finding(view: Timeline, ranks: tuple[int, ...], confidence: Confidence) -> Finding:
    facts = view.facts[ranks[0]]
    failed = facts.failed_save
    assert failed is not None
    raised_at, (caught_at, handler) = deepest_user_frame(failed.stack), _caught_at(failed)
    by, place, decided_at = "", location_of(raised_at), ""
    if caught_at is not None and handler is not None:
        # What raised may be the very call in the ``try``.
        around = f" around {short_location(caught_at)}" if location_of(caught_at) != place else ""
        by = f" by {condition_words(handler.test)}{around}"
        place, decided_at = location_of(caught_at), branch_place(caught_at, handler)
    text = (
        f"saving a checkpoint on {ranks_words(ranks)} raised {error_words(failed)}{at_words(raised_at)}; "
        f"the exception was caught{by}, so "
        f"{verb(ranks, 'the rank', 'these ranks')} never reached the save's barrier and {verb(ranks, 'is', 'are')} now "
        f"{where_words(view, ranks[0])}{while_others_wait(view, ranks)}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=confidence,
        location=place,
        decided_at=decided_at,
        evidence=(*_evidence(view, ranks), *phase_evidence(view, ranks), *recorder_evidence(view)),
        remedy=_REMEDY.format(advice=advice(failed)),
    )


def _caught_at(failed: ExceptionFacts) -> tuple[Frame, Branch] | tuple[None, None]:
    """The user's line that called for the save within a ``try`` that catches this, and its handler, if known."""
    stack = failed.stack
    calls = tuple(takewhile(lambda frame: not SAVE_CHECKPOINT.has(frame.file, frame.function), stack))
    if len(calls) < len(stack):  # what is inside the save has not caught it
        for frame in reversed(calls):
            for branch in reversed(frame.branches):
                if _is_tried(frame.line, branch) and _may_catch(branch.test, failed.type):
                    return frame, branch
    return None, None


def _is_tried(line: int, branch: Branch) -> bool:
    """Whether an exception at a line is handled there: it is not in an ``else`` block, nor in the handler itself."""
    is_head = branch.test.startswith(_SUPPRESSES) or bool(branch.handled_at)
    is_inside = line <= branch.until and (is_head or branch.until < branch.line)
    return branch.on is Decides.EXCEPTION and not branch.jump and is_inside


def _may_catch(handler: str, raised: str) -> bool:
    """Whether a clause may handle an exception of this type: unknown types may derive from any other."""
    error = getattr(builtins, raised, None)
    types = [getattr(builtins, name, None) for name in _TYPES.findall(handler.partition(" as ")[0])]
    named = [one for one in types if isinstance(one, type) and issubclass(one, BaseException)]
    if not isinstance(error, type) or not named or len(named) < len(types):
        return True
    return issubclass(error, tuple(named))


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    for rank in ranks[:LISTED]:
        failed = view.facts[rank].failed_save
        if failed is not None:
            text = f"Its last save of a checkpoint raised {failed.type}: {failed.message}"
            yield Evidence(source="exception", rank=rank, text=text)
        yield from storage_evidence(view.facts[rank], of_checkpoints=True)
