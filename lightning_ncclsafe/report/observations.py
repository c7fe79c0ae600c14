"""Evidence as reports show it: what was observed alike on several ranks appears once."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_ncclsafe.facts.findings import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One observation.

    Attributes:
        source: Where it comes from.
        text: The observation in words.
        ranks: The ranks it was made on; empty if it is about several.
    """

    source: str
    text: str
    ranks: tuple[int, ...]


def observed(evidence: Iterable[Evidence]) -> list[Observed]:
    """The evidence in its order, equal observations once."""
    alike: dict[tuple[str, str], list[int]] = {}
    for item in evidence:
        ranks = alike.setdefault((item.source, item.text), [])
        ranks += [item.rank] if item.rank is not None else []
    return [Observed(source=source, text=text, ranks=tuple(ranks)) for (source, text), ranks in alike.items()]
