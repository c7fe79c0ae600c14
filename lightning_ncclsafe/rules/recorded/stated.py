"""What logs say in so many words, asked by the causes that it is about."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts, Statement, StatementKind
from lightning_ncclsafe.rules.kit import Evidence, Timeline, has_given_up

_QUOTED = 4


def stated(job: JobFacts, *kinds: StatementKind) -> tuple[Statement, ...]:
    """The statements of these kinds, in the order of the log."""
    return tuple(one for one in job.log.statements if one.kind in kinds)


def compared(job: JobFacts) -> tuple[Statement, ...]:
    """Those by which ranks have called what cannot complete together."""
    return stated(job, StatementKind.OTHER_SIZES, StatementKind.OTHER_OPERATIONS)


def said_of_all(statements: tuple[Statement, ...]) -> tuple[int, ...]:
    """The ranks that these are about, ascending."""
    return tuple(sorted({rank for one in statements for rank in one.ranks}))


def lines_of(statements: tuple[Statement, ...]) -> tuple[Evidence, ...]:
    """The lines that say so."""
    return tuple(Evidence(source="log", rank=one.by, text=one.line) for one in statements if one.line)[:_QUOTED]


def details_of(statements: tuple[Statement, ...]) -> Iterator[str]:
    """What they say, each once."""
    yield from dict.fromkeys(one.detail for one in statements if one.detail)


def anybody_gave_up(view: Timeline) -> bool:
    """Whether a rank's own limit was over: what others lost after that, they lost because of it."""
    return any(
        (facts.record is not None and facts.record.waited_ms) or has_given_up(facts) for facts in view.facts.values()
    )
