"""The words and the evidence of findings about recordings: what ranks wait in and have called, and lines of logs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lightning_ncclsafe.facts import Collective, ExceptionFacts, Phase, Progress, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    GroupView,
    Timeline,
    at_words,
    capitalised,
    clause,
    collective_words,
    deepest_user_frame,
    first_user_frame,
    group_words,
    location_of,
    numel,
    open_collectives,
    purpose_words,
    ranks_by,
    ranks_words,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import end_of, record_of
from lightning_ncclsafe.rules.recorded.kit.roots import Root

NO_LONGER_TIMEOUT = (
    "A longer timeout only lets the others wait longer, nothing reads NCCL_TIMEOUT, and a GPU that waits shows 100 % "
    "load."
)
_UNKNOWN_CALL = "a collective"
_VARIANTS = 3
_NOBODY = RankFacts(rank=0, progress=Progress(phase=Phase.UNKNOWN))
# The purpose of collectives with one element.
_ONE_ELEMENT = {
    "all_reduce": "a barrier, or one value that is reduced",
    "broadcast": "one value, such as the length of an object or Lightning's per-batch SIGTERM broadcast",
    "all_gather": "one value of each rank, such as the length of an object",
    "_all_gather_base": "one value of each rank, such as the length of an object",
}


def oldest_outstanding(facts: RankFacts, group: str) -> Collective | None:
    """The oldest collective of a group that this rank has called and that has not completed."""
    return next((call for call in open_collectives(facts) if call.group == group), None)


def first_site(calls: Iterable[Collective]) -> str:
    """The location of the first of these calls whose line is known; empty if none is."""
    return location_of(first_user_frame(call.stack for call in calls))


def described(call: Collective) -> str:
    """The collective with its purpose, if its stack shows it, and its line."""
    means = purpose_words(call, replace(_NOBODY, stack=call.stack)) if call.stack else ""
    named = call if call.op else replace(call, op=_UNKNOWN_CALL)
    return f"{collective_words(named, means)}{at_words(deepest_user_frame(call.stack))}"


class Words:
    """Descriptions of many collectives, which must outlive this; equal calls are put into words once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}

    def of(self, call: Collective) -> str:
        """See :func:`described`."""
        same = (call.group, call.op, call.seq, call.input_sizes, call.output_sizes, call.dtypes, id(call.stack))
        if same not in self._known:
            self._known[same] = described(call)
        return self._known[same]


def one_element_evidence(calls: Iterable[Collective]) -> Iterable[Evidence]:
    """What collectives of a single element are mostly for."""
    for op in sorted({call.op for call in calls if numel(call) == 1} & _ONE_ELEMENT.keys()):
        yield Evidence(source="size", text=f"An {op} of 1 element is {_ONE_ELEMENT[op]}.".replace("An b", "A b"))


def waiting_words(calls: Mapping[int, Collective]) -> str:
    """``"ranks 0-1, 3 wait in all_reduce (…)"``, equal waits together; empty if nobody waits."""
    words = Words()
    alike = ranks_by({rank: words.of(call) for rank, call in sorted(calls.items())})
    ordered = sorted(alike.items(), key=lambda item: (item[0].startswith(_UNKNOWN_CALL), -len(item[1]), item[1]))
    parts = [f"{clause(who, 'waits|wait in')} {what}" for what, who in ordered[:_VARIANTS]]
    if len(ordered) > _VARIANTS:
        parts.append(f"{sum(len(who) for _, who in ordered[_VARIANTS:]):,} more wait elsewhere")
    return "; ".join(parts)


def waiting_in(view: Timeline, group: GroupView) -> dict[int, Collective]:
    """The call in which each rank of a group waits; only group and number if the recorder has lost it."""
    return {
        rank: oldest_outstanding(view.facts[rank], group.name)
        or Collective(group=group.name, seq=seq, op=_UNKNOWN_CALL)
        for rank, seq in group.oldest.items()
    }


def waiting_on_peers(view: Timeline, ranks: Iterable[int]) -> dict[int, Collective]:
    """The oldest send or receive of each rank that waits for one of these."""
    awaited = set(ranks)
    found: dict[int, Collective] = {}
    for rank, facts in view.facts.items():
        for call in facts.collectives:
            end = end_of(view, call) if not call.completed else None
            if end is not None and end[1] in awaited and rank not in awaited:
                found.setdefault(rank, call)
    return found


def consequence_evidence(found: Iterable[Root]) -> Iterator[Evidence]:
    """Names the ranks that only wait for a cause, directly or through others."""
    found = list(found)
    held = {rank for root in found for rank in root.held} - {rank for root in found for rank in root.ranks}
    if held:
        text = f"{ranks_words(sorted(held))} {verb(sorted(held), 'waits', 'wait')} for this, also by way of others"
        yield Evidence(source="flight recorder", text=f"{capitalised(text)}: that is a consequence.")


def counters_evidence(view: Timeline, group: GroupView) -> Iterable[Evidence]:
    """The positions of a group's ranks, equal positions together."""
    own = {rank: one for rank in group.enqueued for one in view.facts[rank].groups if one.name == group.name}
    alike = ranks_by({rank: (one.last_enqueued, one.last_completed) for rank, one in own.items()})
    for (enqueued, completed), ranks in sorted(alike.items())[:LISTED]:
        text = f"{capitalised(ranks_words(ranks))}: last called {enqueued:,}, last completed {completed:,}"
        yield Evidence(source="counters", text=f"{text}, in {group_words(group.name)}.")


def exception_in_log(exception: ExceptionFacts, rank: int | None = None) -> Evidence:
    """An exception as a log has it."""
    return Evidence(source="log", rank=rank, text=f"{exception.type}: {exception.message}")


def waited_words(view: Timeline, ranks: Iterable[int] = ()) -> str:
    """``"; ranks 0-2 waited in vain"``, about all others than these; empty if no rank waited."""
    others = view.waiting_besides(ranks)
    return f"; {ranks_words(others)} waited in vain" if others else ""


def finished_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """That the Trainer of rank 0 has stopped regularly, if rank 0 is one of these."""
    if view.job.log.finished and 0 in ranks:
        yield Evidence(source="log", rank=0, text=f"`Trainer.fit` stopped: {view.job.log.finished}.")


def log_evidence(view: Timeline, ranks: Iterable[int], most: int = 1) -> Iterator[Evidence]:
    """The most important lines of these ranks' logs, so many of each."""
    for rank in ranks:
        for line in record_of(view.facts[rank]).lines[:most]:
            yield Evidence(source="log", rank=rank, text=line)
