"""The cause gc-pause: Python's garbage collector delays a rank."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import GarbageFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Reason,
    Timeline,
    deepest_user_frame,
    duration_words,
    hang_rule,
    how_we_know,
    is_starved,
    is_swapped_out,
    place_words,
    silent_finding,
    silent_processes,
    straggler_finding,
)

# Shorter pauses cannot explain a wait for which an incident is opened.
_LONG_S = 1.0
_SHARE = 0.5
_REMEDY = (
    "Keep fewer Python objects: hold the data in arrays or tensors instead of lists and dicts of small objects, call "
    "gc.freeze() once the data is loaded (it is then never scanned again), or gc.disable() and gc.collect() at the "
    "same step on every rank."
)
_REMEDY_FINALIZER = (
    "Let no __del__, weakref callback or destructor wait for anything (a lock, a file, a server, another thread or "
    "rank): close such resources explicitly when they are no longer needed, before the last reference is dropped."
)


@hang_rule(after="stopped-process", remedy=_REMEDY, is_of_machine=True)
def gc_pause(view: Timeline) -> Iterator[Finding]:
    """A full collection of Python's garbage collector takes seconds, and no other Python code runs meanwhile.

    Symptom:
        All other ranks wait; one pauses at a harmless line that creates objects, again and again, and answers only when
        the collection is over.

    Cause:
        Millions of small Python objects (a dataset in lists or dicts): each full collection visits all of them. Or
        something it frees waits in its __del__ or destructor: then the rank answers while it collects.

    Remedy:
        Keep the data in arrays; call gc.freeze() after loading; collect at the same step on every rank.

    Cannot see:
        Which objects these are; on which thread a finalizer runs, unless it is Python code on the main thread.
    """
    for rank, process in silent_processes(view, Reason.COLLECTING):
        frame = deepest_user_frame(process.stack)
        at = f", {place_words(frame)}" if frame else ""
        yield silent_finding(
            view,
            rank,
            process,
            f"in Python's garbage collector{at}",
            # Scanning all objects is also slow for lack of a core or of memory.
            confidence=Confidence.LIKELY if is_starved(process) or is_swapped_out(process) else Confidence.CERTAIN,
        )
    for rank in view.working(view.stragglers):
        garbage = view.facts[rank].machine.garbage
        if _is_delayed(view.facts[rank]):
            evidence = (_evidence(rank, garbage), *how_we_know(view, (rank,)))
            remedy = _REMEDY_FINALIZER if garbage.running_s else _REMEDY
            yield straggler_finding(view, (rank,), _words(garbage), evidence=evidence, remedy=remedy)


def _is_delayed(facts: RankFacts) -> bool:
    """Whether it collects garbage, or just did, for most of the time without progress."""
    garbage, idle_s = facts.machine.garbage, facts.progress.idle_s
    within = max(idle_s, _LONG_S)
    just_now = garbage.longest_s if garbage.ended_ago_s <= within else 0.0
    return max(garbage.running_s, just_now) >= max(_LONG_S, _SHARE * idle_s)


def _words(garbage: GarbageFacts) -> str:
    if garbage.running_s:
        # The collector itself lets no other thread run: a rank that answers is in a finalizer.
        return (
            f"has been in Python's garbage collector for {duration_words(garbage.running_s)}, in a finalizer that it "
            "has called"
        )
    return (
        f"was in Python's garbage collector for {duration_words(garbage.longest_s)}, until "
        f"{duration_words(garbage.ended_ago_s)} ago"
    )


def _evidence(rank: int, garbage: GarbageFacts) -> Evidence:
    if garbage.running_s:
        text = f"A collection began {duration_words(garbage.running_s)} ago and is not over."
        return Evidence(source="process", rank=rank, text=text)
    count = f"{garbage.count} whole {'collection' if garbage.count == 1 else 'collections'}"
    text = f"In the last minute {count} took {duration_words(garbage.total_s)}"
    text += f"; about {garbage.blocks:,} Python objects are alive" if garbage.blocks is not None else ""
    return Evidence(source="process", rank=rank, text=f"{text}.")
