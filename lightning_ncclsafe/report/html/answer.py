"""The answer as a page shows it: causes with their evidence, each piece of which leads to the facts it is from."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.facts.findings import Diagnosis, Evidence, Finding
from lightning_ncclsafe.report.compared import compares
from lightning_ncclsafe.report.recorded import is_recorded
from lightning_ncclsafe.rules.kit.sentences import others_wait
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import capitalised, location_of, ranks_words

Place = Callable[[int, str], str]
"""Where on the page a rank's facts are that an observation of this source was made in; empty where they are not."""


# Tables of all ranks, for observations that are about several.
_TABLES = {"flight recorder": "groups", "counters": "groups", "host": "hosts", "loader": "data-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One observation.

    Attributes:
        source: Where it comes from.
        text: The observation in words.
        rank: The rank it was made on; empty if it is about several.
        link: Place on the page of the facts it was made in; empty where they are not on it.
    """

    source: str
    text: str
    rank: str
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause that the facts support.

    Attributes:
        finding: What the rule has found.
        ranks: The ranks that cause it, in words.
        code: The line at its location, where the source was there.
        waits: Who waits, and in what; empty where nobody does, or nobody can be told to.
        evidence: How we know.
    """

    finding: Finding
    ranks: str
    code: str
    waits: str
    evidence: tuple[Told, ...]


def causes_of(diagnosis: Diagnosis, view: Timeline, place: Place, tables: Container[str]) -> list[Cause]:
    """All findings, the most probable first.

    Args:
        diagnosis: What was found.
        view: The shared answers about its job.
        place: Where a rank's facts are on the page.
        tables: Names of the tables on the page, which are their places.
    """
    return [
        Cause(
            finding=finding,
            ranks=capitalised(ranks_words(finding.ranks)),
            code=_code(view, finding),
            waits="" if compares(diagnosis.job) else _waits(view, finding),
            evidence=tuple(_told(item, finding, place, tables) for item in finding.evidence),
        )
        for finding in diagnosis.findings
    ]


def _waits(view: Timeline, finding: Finding) -> str:
    """Most sentences end with what the others wait in: then who that is is enough.

    Of a record the rules tell it better: a log may not say in what a rank waits.
    """
    if is_recorded(view.job):
        return ""
    words, ranks = others_wait(view, finding.ranks), view.held_up(finding.ranks)
    return capitalised(ranks_words(ranks) if ranks and words in finding.summary else words)


def _told(evidence: Evidence, finding: Finding, place: Place, tables: Container[str]) -> Told:
    ranks = finding.ranks[:1] if evidence.rank is None else (evidence.rank,)
    link = next((place(rank, evidence.source) for rank in ranks), "")
    if evidence.rank is None and (table := _TABLES.get(evidence.source, "")) in tables:
        link = table
    rank = "" if evidence.rank is None else f"rank {evidence.rank}"
    return Told(source=evidence.source, text=evidence.text, rank=rank, link=link)


def _code(view: Timeline, finding: Finding) -> str:
    if not finding.location:
        return ""
    ranks = (rank for rank in finding.ranks if rank in view.facts)
    return next((frame.code for rank in ranks for frame in _frames(view, rank, finding.location) if frame.code), "")


def _frames(view: Timeline, rank: int, location: str) -> Iterator[Frame]:
    facts = view.facts[rank]
    raised = facts.exception.stack if facts.exception is not None else ()
    of_workers = (frame for worker in facts.workers for frame in worker.stack)
    return (frame for frame in (*facts.stack, *raised, *of_workers) if location_of(frame) == location)
