"""Exceptions that did not end a rank: it has called the very collective in which others wait.

Programs catch and print a good many (a cache that is not there, a batch that needs too much memory). A rank that has
come as far as those that wait is not who they wait for.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from lightning_ncclsafe.facts import ExceptionFacts, RankFacts, RecordFacts
from lightning_ncclsafe.rules.kit.activity import deepest_user_frame
from lightning_ncclsafe.rules.kit.wording import short_location

_LONGEST = 300


def lived_on(ranks: Collection[RankFacts]) -> Iterator[RankFacts]:
    """The facts, with such an exception where it is no cause."""
    if not any(facts.exception for facts in ranks):
        yield from ranks
        return
    waiting = Counter(place for facts in ranks for place in _places(facts))
    for facts in ranks:
        exception = facts.exception
        is_own = exception is not None and not exception.is_consequence
        if exception is not None and is_own and any(waiting[place] > 1 for place in _places(facts)):
            record = replace(facts.record or RecordFacts(), survived=_words(exception))
            yield replace(facts, exception=None, record=record)
        else:
            yield facts


def _places(facts: RankFacts) -> set[tuple[str, int, str]]:
    """Groups, the numbers in them, and the operations in which the rank waits."""
    return {(call.group, call.seq, call.op) for call in facts.collectives if not call.completed and not call.is_p2p}


def _words(exception: ExceptionFacts) -> str:
    frame = deepest_user_frame(exception.stack)
    said = f"{exception.type}: {exception.message}" if exception.message else exception.type
    return said[:_LONGEST] + (f" at {short_location(frame)}" if frame else "")
