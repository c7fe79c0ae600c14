"""The cause host-stuck: a rank has nothing outstanding, and has not called what the others wait in."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.recorded.absent import idle_behind
from lightning_ncclsafe.rules.recorded.ended import gone
from lightning_ncclsafe.rules.recorded.late_at_init import SET_UP
from lightning_ncclsafe.rules.recorded.telling import (
    LOOK_THERE,
    called_words,
    counters_evidence,
    last_call_evidence,
    last_site,
    one_element,
    quotes,
    waiting_in,
    waiting_words,
)
from lightning_ncclsafe.rules.timeline import GroupView, Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, ranks_words, verb

_REMEDY = (
    "The GPUs and the network wait for this rank's Python: look at what its code does after its last collective. It is "
    "mostly work that one rank does alone (evaluation, tokenising, a checkpoint, a logger on slow storage), data that "
    "does not come, a compilation, one batch less than the others, or an exception that was caught. py-spy dump --pid "
    "PID shows the line while it hangs. "
) + LOOK_THERE


def host_stuck(job: JobFacts) -> Iterable[Finding]:
    """All others wait in a collective that this rank has never called; it has finished all that it called.

    Symptom:
        The rank's recorder has nothing outstanding, or its log "last enqueued 166, last completed 166", where others
        time out in 167.

    Cause:
        Its Python code is elsewhere: work that it does alone, its data, a compilation, an exception that was caught.

    Remedy:
        Look at what the rank does after its last collective; share that work, or make it short.

    Cannot see:
        At which line it stands: neither dumps nor logs have the main thread's stack, but where collectives were called.
    """
    view = timeline(job)
    if gone(view):
        return
    held = [(group, ranks) for group in view.groups if (ranks := idle_behind(view, group))]
    if held:
        # Its other groups wait for the same reason.
        group, ranks = max(held, key=lambda one: len(one[0].oldest))
        yield _finding(view, group, ranks)
    else:
        yield from _named(view)


def _finding(view: Timeline, group: GroupView, ranks: tuple[int, ...]) -> Finding:
    waiting = waiting_in(view.facts, group)
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} {called_words(group, ranks)} and finished all, and never "
        f"called number {group.seq:,}, while {waiting_words(waiting)}"
    )
    site = last_site(view.facts[ranks[0]], group.name) if len(ranks) == 1 else ""
    return Finding(
        rule="host-stuck",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        summary=f"{capitalised(text)}{f'; its last call was {site}' if site else ''}.",
        ranks=ranks,
        evidence=(
            *(item for rank in ranks[:4] for item in last_call_evidence(view.facts[rank], group, waiting)),
            *counters_evidence(view.facts, group),
            *(item for rank in ranks[:2] for item in quotes(view.facts[rank])),
            *one_element(waiting.values()),
        ),
        remedy=_REMEDY,
    )


def _named(view: Timeline) -> Iterator[Finding]:
    """A monitored barrier and a desync report name those who did not come."""
    for rank, facts in sorted(view.facts.items()):
        record = facts.record
        if record is None or not record.awaited or record.awaited_in == SET_UP:
            continue
        ranks = record.awaited
        text = f"{ranks_words(ranks)} {verb(ranks, 'has', 'have')} not come to {record.awaited_in}, PyTorch says"
        yield Finding(
            rule="host-stuck",
            severity=Severity.ERROR,
            confidence=Confidence.LIKELY,
            summary=f"{capitalised(text)}.",
            ranks=ranks,
            evidence=tuple(quotes(facts, most=4)) or (Evidence(source="log", rank=rank, text=text),),
            remedy=_REMEDY,
        )
        return
