"""What lines of a log state explicitly: launchers about processes, PyTorch and NCCL about ranks and connections."""

from lightning_ncclsafe.facts import Statement, StatementKind
from lightning_ncclsafe.rules.kit import Evidence, Timeline, ranks_words

_QUOTED = 4


class LogStatements(tuple[Statement, ...]):
    """Statements in the order of the log."""

    __slots__ = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that they are about, ascending."""
        return tuple(sorted({rank for one in self for rank in one.ranks}))

    @property
    def by(self) -> tuple[int, ...]:
        """The ranks that wrote them, as far as known, ascending."""
        return tuple(sorted({one.by for one in self if one.by is not None}))

    @property
    def by_words(self) -> str:
        """The ranks that wrote them, as the subject of a sentence."""
        return ranks_words(self.by) if self.by else "a rank that the log does not name"

    @property
    def details(self) -> list[str]:
        """Their details, each once."""
        return [*dict.fromkeys(one.detail for one in self if one.detail)]

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Their lines."""
        return tuple(Evidence(source="log", rank=one.by, text=one.line) for one in self if one.line)[:_QUOTED]


def stated(view: Timeline, *kinds: StatementKind) -> LogStatements:
    """The statements of these kinds."""
    return LogStatements(one for one in view.job.log.statements if one.kind in kinds)


def compared(view: Timeline) -> LogStatements:
    """The statements that ranks have called what cannot complete together."""
    return stated(view, StatementKind.OTHER_SIZES, StatementKind.OTHER_MODEL, StatementKind.OTHER_OPERATIONS)
