"""The log of rounds on which all ranks agree: numbered entries, each written by whichever rank comes first."""

from dataclasses import dataclass

from lightning_ncclsafe import codec
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One entry: an incident, or the end of one.

    Attributes:
        incident: What the round is about.
        recovered_after_s: If training moves again: seconds for which it stood still.
    """

    incident: Incident
    recovered_after_s: float | None = None


class RoundLog:
    """Reads and writes the log, entry by entry.

    Args:
        exchange: What the ranks share.

    Attributes:
        number: Number of the next entry, from 0; the same on all ranks that have read as far.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.number = 0

    def read(self) -> Round | None:
        """The next entry, if some rank has written it. A rank without an exchange sees none."""
        try:
            found = self._exchange.get_many([self._key]).get(self._key)
        except ExchangeError:
            return None
        return codec.decode(Round, found) if found is not None else None

    def write(self, entry: Round) -> Round:
        """Writes the next entry, and returns what stands there: another rank may have been faster.

        A rank without an exchange goes by its own entry: alone, but not silent.
        """
        try:
            return codec.decode(Round, self._exchange.set_if_absent(self._key, codec.encode(entry)))
        except ExchangeError:
            return entry

    @property
    def _key(self) -> str:
        return f"log/{self.number}"
