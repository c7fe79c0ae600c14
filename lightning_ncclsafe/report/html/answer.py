"""The answer on the page: causes with their evidence, each piece linked to the facts it comes from."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.facts import Frame, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding
from lightning_ncclsafe.facts.wording import capitalised, location_of, ranks_words
from lightning_ncclsafe.report.ranks import hosts_words, without_repeats
from lightning_ncclsafe.report.text import observed
from lightning_ncclsafe.rules.common_paths import with_common_paths
from lightning_ncclsafe.rules.kit.sentences import others_wait
from lightning_ncclsafe.rules.kit.timeline import Timeline

Place = Callable[[int, str], str]
"""The place on the page of a rank's facts for an observation's source; empty if they are not on it."""


# A longer one takes more than two lines on a phone.
_LONGEST_PLACE = 72
# Tables of all ranks, for observations about several.
_TABLES = {"flight recorder": "groups", "counters": "groups", "host": "hosts", "loader": "data-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation.

    Attributes:
        source: Where it comes from.
        text: The observation in words.
        ranks: The ranks it was made on; empty if it is about several.
        link: Place on the page of its facts; empty if they are not on it.
    """

    source: str
    text: str
    ranks: str
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause that the facts support.

    Attributes:
        finding: What the rule has found.
        ranks: The ranks that cause it, in words.
        process: Where these run: host, and process if it is one; empty if unknown.
        alike: Other ranks with the same finding; empty if there are none.
        place: Its location, a long path shortened.
        code: The line at its location, if the source was readable.
        decided_at: What decides that it happens there, if that is another line; a long path shortened.
        waits: Who waits, and in what; empty if nobody does, or that is unknown.
        evidence: How we know.
    """

    finding: Finding
    ranks: str
    process: str
    alike: str
    place: str
    code: str
    decided_at: str
    waits: str
    evidence: tuple[Observation, ...]


def causes_of(diagnosis: Diagnosis, view: Timeline, place: Place, tables: Container[str]) -> list[Cause]:
    """All findings, the most probable first.

    Args:
        place: The place of a rank's facts on the page.
        tables: Names of the tables on the page, which are their places.
    """
    # A location has the path of the first host that has the file.
    seen = {facts.rank: facts for facts in with_common_paths(diagnosis.job).ranks}
    return [
        Cause(
            finding=finding,
            ranks=capitalised(ranks_words(finding.ranks)),
            process=_process(view, finding.ranks),
            alike=ranks_words(alike) if alike else "",
            place=_short_place(finding.location),
            code=_code(seen, finding),
            decided_at=_short_place(finding.decided_at) if finding.decided_at != finding.location else "",
            waits="" if diagnosis.job.is_compared else _waits(view, finding),
            evidence=tuple(_observations(finding, place, tables)),
        )
        for finding, alike in without_repeats(diagnosis.findings)
    ]


def _process(view: Timeline, ranks: Sequence[int]) -> str:
    """``"process 4711 on node-3"``, ``"on node-3, node-4"``, ``"on 64 hosts"``."""
    facts = [view.facts[rank] for rank in ranks if rank in view.facts]
    pids = [one.pid for one in facts if one.pid] or [
        view.witnesses[rank].pid for rank in ranks if rank in view.witnesses
    ]
    where = hosts_words(one.host for one in facts)
    return " ".join(filter(None, [f"process {pids[0]}" if len(ranks) == len(pids) == 1 else "", where]))


def _short_place(location: str) -> str:
    """Drops the first folders of a long path: its end says more."""
    kept = location
    while len(kept) > _LONGEST_PLACE and "/" in kept:
        kept = kept.partition("/")[2]
    return location if kept == location else f"…/{kept}"


def _waits(view: Timeline, finding: Finding) -> str:
    """Who waits and in what. Most sentences end with what the others wait in: then who waits is enough.

    Empty for records: a log may not say in what a rank waits.
    """
    if view.job.is_recorded:
        return ""
    words, ranks = others_wait(view, finding.ranks), view.waiting_besides(finding.ranks)
    return capitalised(ranks_words(ranks) if ranks and words in finding.summary else words)


def _observations(finding: Finding, place: Place, tables: Container[str]) -> Iterator[Observation]:
    """The evidence of a finding; equal observations on several ranks appear once."""
    for one in observed(finding.evidence):
        link = next((place(rank, one.source) for rank in one.ranks or finding.ranks[:1]), "")
        if not one.ranks and (table := _TABLES.get(one.source, "")) in tables:
            link = table
        ranks = ranks_words(one.ranks) if one.ranks else ""
        yield Observation(source=one.source, text=one.text, ranks=ranks, link=link)


def _code(seen: Mapping[int, RankFacts], finding: Finding) -> str:
    if not finding.location:
        return ""
    known = (seen[rank] for rank in finding.ranks if rank in seen)
    return next((frame.code for facts in known for frame in _frames(facts, finding.location) if frame.code), "")


def _frames(facts: RankFacts, location: str) -> Iterator[Frame]:
    of_workers = (frame for worker in facts.workers for frame in worker.stack)
    return (frame for frame in (*facts.stack, *facts.raised_stack, *of_workers) if location_of(frame) == location)
