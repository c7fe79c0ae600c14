"""Words for recordings: what ranks wait in, what they called last, and when."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone

from lightning_ncclsafe.facts import Collective, Frame, JobFacts, Phase, Progress, RankFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    GroupView,
    Severity,
    Timeline,
    capitalised,
    clause,
    collective_words,
    deepest_user_frame,
    duration_words,
    group_words,
    numel,
    purpose_words,
    ranks_words,
    short_location,
    verb,
)
from lightning_ncclsafe.rules.recorded.calls import peer_of
from lightning_ncclsafe.rules.recorded.standstill import Root

LOOK_THERE = (
    "A longer timeout only lets the others wait longer, nothing reads NCCL_TIMEOUT, and a GPU that waits shows 100 % "
    "load."
)
UNKNOWN_CALL = "a collective"
_VARIANTS = 3
_QUOTED = 4
_NOBODY = RankFacts(rank=0, progress=Progress(phase=Phase.UNKNOWN))
# The purpose of collectives with one element.
_ONE_ELEMENT = {
    "all_reduce": "a barrier, or one value that is reduced",
    "broadcast": "one value, such as the length of an object or Lightning's per-batch SIGTERM broadcast",
    "all_gather": "one value of each rank, such as the length of an object",
    "_all_gather_base": "one value of each rank, such as the length of an object",
}


def recorded(
    ranks: tuple[int, ...],
    summary: str,
    *,
    evidence: Iterable[Evidence],
    confidence: Confidence = Confidence.LIKELY,
    location: str = "",
    remedy: str = "",
) -> Finding:
    """A finding about recordings: the run is over, and this ended it.

    Args:
        ranks: The ranks that cause it; none if unknown.
        summary: The answer in a sentence; its first letter becomes a capital one.
        remedy: What to do, if that depends on the finding.
    """
    return Finding(
        rule="",
        severity=Severity.ERROR,
        confidence=confidence,
        summary=capitalised(summary),
        ranks=ranks,
        location=location,
        evidence=tuple(evidence),
        remedy=remedy,
    )


def record_kinds(job: JobFacts) -> tuple[bool, bool]:
    """Whether any dump, and whether any log was read."""
    records = [facts.record for facts in job.ranks if facts.record is not None]
    return any(record.has_dump for record in records), any(record.has_log for record in records)


def oldest_outstanding(facts: RankFacts, group: str) -> Collective | None:
    """The oldest collective of a group that this rank has called and that has not completed."""
    open_calls = (call for call in facts.collectives if not call.completed and not call.is_p2p)
    return next((call for call in open_calls if call.group == group), None)


def last_call(facts: RankFacts, group: str) -> Collective | None:
    """The last collective of a group that this rank has called."""
    return next((call for call in reversed(facts.collectives) if call.group == group and not call.is_p2p), None)


def call_site(call: Collective | None) -> Frame | None:
    """The line of the user's own code that called it."""
    return deepest_user_frame(call.stack) if call is not None else None


def described(call: Collective) -> str:
    """The collective with its purpose, if its stack shows it, and its line."""
    means = purpose_words(call, replace(_NOBODY, stack=call.stack)) if call.stack else ""
    site = call_site(call)
    return collective_words(call if call.op else replace(call, op=UNKNOWN_CALL), means) + (
        f" at {short_location(site)}" if site else ""
    )


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


def one_element(calls: Iterable[Collective]) -> Iterable[Evidence]:
    """What collectives of a single element are mostly for."""
    for op in sorted({call.op for call in calls if numel(call) == 1} & _ONE_ELEMENT.keys()):
        yield Evidence(source="size", text=f"An {op} of 1 element is {_ONE_ELEMENT[op]}.".replace("An b", "A b"))


def waiting_words(calls: Mapping[int, Collective]) -> str:
    """``"ranks 0-1, 3 wait in all_reduce (…)"``, equal waits together; empty if nobody waits."""
    alike: dict[str, list[int]] = defaultdict(list)
    words = Words()
    for rank, call in sorted(calls.items()):
        alike[words.of(call)].append(rank)
    ordered = sorted(alike.items(), key=lambda item: (item[0].startswith(UNKNOWN_CALL), -len(item[1]), item[1]))
    parts = [f"{clause(who, 'waits|wait in')} {what}" for what, who in ordered[:_VARIANTS]]
    if len(ordered) > _VARIANTS:
        parts.append(f"{sum(len(who) for _, who in ordered[_VARIANTS:]):,} more wait elsewhere")
    return "; ".join(parts)


def waiting_in(facts: Mapping[int, RankFacts], group: GroupView) -> dict[int, Collective]:
    """The call in which each rank of a group waits; only group and number if the recorder has lost it."""
    return {
        rank: oldest_outstanding(facts[rank], group.name) or Collective(group=group.name, seq=seq, op=UNKNOWN_CALL)
        for rank, seq in group.oldest.items()
    }


def waiting_on_peers(view: Timeline, ranks: Iterable[int]) -> dict[int, Collective]:
    """The oldest send or receive of each rank that waits for one of these."""
    awaited = set(ranks)
    members = {group.name: group.members for group in view.groups}
    found: dict[int, Collective] = {}
    for rank, facts in view.facts.items():
        for call in facts.collectives:
            end = peer_of(call, members.get(call.group, ())) if call.is_p2p and not call.completed else None
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


def called_words(group: GroupView, ranks: Iterable[int]) -> str:
    """``"called 60 collectives of the default group"``, or a range."""
    counts = sorted({group.enqueued[rank] for rank in ranks})
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"called {number} collective{'s' * (counts != [1])} of {group_words(group.name)}"


def last_call_evidence(facts: RankFacts, group: GroupView, waiting: Mapping[int, Collective]) -> Iterable[Evidence]:
    """The last call of a rank that waits for nothing, and how long before the others' wait it was."""
    call = last_call(facts, group.name)
    if call is None:
        return
    text = f"Its last collective there was {described(call)}"
    since = min((other.created_ns for other in waiting.values() if other.created_ns), default=0)
    if call.created_ns and since:
        text += f", called at {_clock(call.created_ns)}; the first of the others began to wait at {_clock(since)}"
        if since > call.created_ns:
            text += f", {duration_words((since - call.created_ns) / 1e9)} later"
    yield Evidence(source="flight recorder", rank=facts.rank, text=f"{text}.")


def _clock(moment_ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(moment_ns / 1e9, tz=timezone.utc):%H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def counters_evidence(facts: Mapping[int, RankFacts], group: GroupView) -> Iterable[Evidence]:
    """The positions of a group's ranks, equal positions together."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in group.enqueued:
        own = next((one for one in facts[rank].groups if one.name == group.name), None)
        if own is not None:
            alike[(own.last_enqueued, own.last_completed)].append(rank)
    for (enqueued, completed), ranks in sorted(alike.items())[:8]:
        text = f"{capitalised(ranks_words(ranks))}: last called {enqueued:,}, last completed {completed:,}"
        yield Evidence(source="counters", text=f"{text}, in {group_words(group.name)}.")


def quotes(facts: RankFacts, most: int = 1) -> Iterable[Evidence]:
    """The most telling lines of a rank's log."""
    for line in (facts.record.lines if facts.record else ())[: min(most, _QUOTED)]:
        yield Evidence(source="log", rank=facts.rank, text=line)


def last_site(facts: RankFacts, group: str) -> str:
    """``"at train.py:40 in training_step"``, the line of a rank's last call in a group; empty if unknown."""
    site = call_site(last_call(facts, group))
    return f"at {short_location(site)}" if site is not None else ""
