"""The cause host-stuck: a rank has nothing outstanding, and has not called what the others wait in."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone

from lightning_ncclsafe.facts import Collective, RankFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    GroupView,
    Timeline,
    at_words,
    clause,
    deepest_user_frame,
    duration_words,
    finding,
    group_words,
    location_of,
    place_words,
    recorded_rule,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import behind_elsewhere, has_dumps, idle_behind, record_of
from lightning_ncclsafe.rules.recorded.kit.ends import AT_INIT, failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    NO_LONGER_TIMEOUT,
    consequence_evidence,
    counters_evidence,
    described,
    exception_in_log,
    finished_evidence,
    log_evidence,
    one_element_evidence,
    waiting_in,
    waiting_on_peers,
    waiting_words,
)
from lightning_ncclsafe.rules.recorded.kit.roots import Root, RootCause, roots, roots_of


@recorded_rule(
    after="watchdog-stuck",
    remedy=(
        "The GPUs and the network wait for this rank's Python: look at what its code does after its last collective. "
        "Usually it is work that one rank does alone (evaluation, tokenising, a checkpoint, a logger on slow storage), "
        "data that does not arrive, a compilation, one batch fewer than the others, or an exception that was caught. "
        "py-spy dump --pid PID shows the line while it hangs. "
    )
    + NO_LONGER_TIMEOUT,
)
def host_stuck(view: Timeline) -> Iterator[Finding]:
    """All others wait in a collective that this rank never called; it has completed everything that it called.

    Symptom:
        The rank's recorder has nothing outstanding, or its log shows "last enqueued work: 166, last completed work:
        166" while others time out in 167.

    Cause:
        Its Python code is elsewhere: work that it does alone, its data, a compilation, an exception that was caught.

    Remedy:
        Look at what the rank does after its last collective; share that work, or make it short.

    Cannot see:
        At which line it is: neither dumps nor logs have the main thread's stack, only where collectives were called.
    """
    if failed(view):
        return
    if has_dumps(view.job):
        found = [root for root in roots_of(view, RootCause.HOST) if not _have_raised(view, root.ranks)]
        for is_sure in (True, False):
            culprits = [root for root in found if root.is_sure is is_sure]
            if culprits:
                yield _of_dumps(view, culprits, is_sure)
    elif held := [(group, ranks) for group in view.groups if (ranks := idle_behind(view, group))]:
        # Its other groups wait for the same reason.
        group, ranks = max(held, key=lambda one: len(one[0].oldest))
        yield _finding(view, group, ranks)
        return
    elif elsewhere := [(group, ranks) for group in view.groups if (ranks := behind_elsewhere(view, group))]:
        group, ranks = max(elsewhere, key=lambda one: len(one[0].oldest))
        yield _of_other_back_end(view, group, ranks)
        return
    if not roots(view):
        yield from _named(view)


def _have_raised(view: Timeline, ranks: Iterable[int]) -> bool:
    """Whether ranks without a dump have raised, by their log: they have called nothing more because of that."""
    every = (view.facts[rank] for rank in ranks)
    return any(facts.exception and not record_of(facts).has_dump for facts in every)


def _called_words(group: GroupView, ranks: Iterable[int]) -> str:
    """``"called 60 collectives of the default group"``, or a range."""
    counts = sorted({group.enqueued[rank] for rank in ranks})
    number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"called {number} collective{'s' * (counts != [1])} of {group_words(group.name)}"


def _last_call_evidence(facts: RankFacts, group: GroupView, waiting: Mapping[int, Collective]) -> Iterable[Evidence]:
    """The last call of a rank that waits for nothing, and how long before the others' wait it was."""
    call = _last_call(facts, group.name)
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


def _last_site(facts: RankFacts, group: str) -> str:
    """``"at train.py:40 in training_step"``, the line of a rank's last call in a group; empty if unknown."""
    call = _last_call(facts, group)
    return place_words(deepest_user_frame(call.stack)) if call is not None else ""


def _last_call(facts: RankFacts, group: str) -> Collective | None:
    """The last collective of a group that this rank has called."""
    return next((call for call in reversed(facts.collectives) if call.group == group and not call.is_p2p), None)


def _of_dumps(view: Timeline, culprits: list[Root], is_sure: bool) -> Finding:
    """All ranks that are stuck in this way according to dumps, in whichever groups others wait for them."""
    by_op: dict[tuple[str, int] | None, list[int]] = defaultdict(list)
    for root in culprits:
        by_op[root.ops[0] if root.ops else None] += root.ranks
    ranks = tuple(sorted(rank for root in culprits for rank in root.ranks))
    parts = [_part(view, op, tuple(sorted(who))) for op, who in by_op.items()]
    first = next((view.groups_by_name[op[0]] for op in by_op if op is not None), None)
    site = _last_site(view.facts[ranks[0]], first.name) if len(ranks) == 1 and first is not None else ""
    return finding(
        view,
        ranks,
        f"{'; '.join(parts)}{f'; its last call was {site}' if site else ''}.",
        confidence=Confidence.LIKELY if is_sure else Confidence.POSSIBLE,
        evidence=(*_evidence(view, culprits), *consequence_evidence(culprits)),
    )


def _part(view: Timeline, op: tuple[str, int] | None, ranks: tuple[int, ...]) -> str:
    if op is None:
        waiting = waiting_on_peers(view, ranks)
        return (
            f"{clause(ranks, 'has|have finished all that')} {verb(ranks, 'it', 'they')} called, "
            f"but not called the other side, while {waiting_words(waiting)}"
        )
    group = view.groups_by_name[op[0]]
    waiting = waiting_in(view, group)
    known = all(group.enqueued.get(rank) for rank in ranks)
    called = f"{_called_words(group, ranks)} and finished all" if known else "finished all that was called there"
    of = "" if known else f" of {group_words(group.name)}"
    return (
        f"{clause(ranks, 'has|have')} {called}, and never called number {op[1]:,}{of}, while {waiting_words(waiting)}"
    )


def _evidence(view: Timeline, culprits: list[Root]) -> Iterator[Evidence]:
    for root in culprits[:4]:
        if root.ops:
            group = view.groups_by_name[root.ops[0][0]]
            waiting = waiting_in(view, group)
            for rank in root.ranks:
                yield from _last_call_evidence(view.facts[rank], group, waiting)
    for name in dict.fromkeys(root.ops[0][0] for root in culprits[:4] if root.ops):
        yield from counters_evidence(view, view.groups_by_name[name])
        yield from one_element_evidence(waiting_in(view, view.groups_by_name[name]).values())
    yield from finished_evidence(view, [rank for root in culprits for rank in root.ranks])
    yield from log_evidence(view, [root.ranks[0] for root in culprits[:2]])


def _finding(view: Timeline, group: GroupView, ranks: tuple[int, ...]) -> Finding:
    waiting = waiting_in(view, group)
    text = (
        f"{clause(ranks, 'has|have')} {_called_words(group, ranks)} and finished all, and never "
        f"called number {group.seq:,}, while {waiting_words(waiting)}"
    )
    site = _last_site(view.facts[ranks[0]], group.name) if len(ranks) == 1 else ""
    return finding(
        view,
        ranks,
        f"{text}{f'; its last call was {site}' if site else ''}.",
        evidence=(
            *(item for rank in ranks[:4] for item in _last_call_evidence(view.facts[rank], group, waiting)),
            *counters_evidence(view, group),
            *log_evidence(view, ranks[:2]),
            *one_element_evidence(waiting.values()),
        ),
    )


def _of_other_back_end(view: Timeline, group: GroupView, ranks: tuple[int, ...]) -> Finding:
    """Ranks that waited in another back end's call, such as gloo's: each side may wait for the other."""
    found = _finding(view, group, ranks)
    exceptions = [(rank, one) for rank in ranks if (one := view.facts[rank].exception) is not None]
    place = next((frame for _, one in exceptions if (frame := deepest_user_frame(one.stack)) is not None), None)
    lost = f"{verb(ranks, 'it', 'they')} lost a connection of another back end{at_words(place)}"
    text = f"{found.summary.rstrip('.')}; meanwhile {lost}"
    return replace(
        found,
        summary=f"{text}.",
        confidence=Confidence.POSSIBLE,
        location=found.location or location_of(place),
        evidence=(*found.evidence, *(exception_in_log(one, rank) for rank, one in exceptions[:4])),
    )


def _named(view: Timeline) -> Iterator[Finding]:
    """A monitored barrier and a desync report name the ranks that did not arrive."""
    for rank, facts in sorted(view.facts.items()):
        record = record_of(facts)
        if not record.awaited or record.awaited_in in AT_INIT:
            continue
        ranks = record.awaited
        text = f"{clause(ranks, 'has|have not reached')} {record.awaited_in}, according to PyTorch"
        yield finding(
            view,
            ranks,
            f"{text}.",
            evidence=tuple(log_evidence(view, (rank,), most=4)) or (Evidence(source="log", rank=rank, text=text),),
        )
        return
