"""The log of incidents on which all ranks agree: numbered entries, each written by whichever rank comes first."""

from contextlib import suppress
from dataclasses import dataclass

from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import Incident, codec


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEntry:
    """One entry: an incident, or the end of one.

    Attributes:
        incident: What the entry is about.
        recovered_after_s: If training makes progress again: seconds for which it made none.
        is_leaving: Whether no rank waits: one that has finished is about to leave others behind.
    """

    incident: Incident
    recovered_after_s: float | None = None
    is_leaving: bool = False


class IncidentLog:
    """Reads and writes the log, entry by entry.

    Args:
        exchange: What the ranks share.
        not_before_ns: Entries about incidents before this wall-clock time, in nanoseconds since the epoch, are passed
            over: they were left behind by an earlier start of the job.

    Attributes:
        number: Number of the next entry, from 0; the same on all ranks that have read as far.
    """

    def __init__(self, exchange: Exchange, *, not_before_ns: int = 0) -> None:
        self._exchange = exchange
        self._not_before_ns = not_before_ns
        self.number = 0

    def read(self) -> IncidentEntry | None:
        """The next entry, if some rank has written it. A rank without an exchange sees none."""
        with suppress(ExchangeError):
            while (found := self._exchange.get_many([self._key]).get(self._key)) is not None:
                entry = codec.decode(IncidentEntry, found)
                if entry.incident.opened_ns >= self._not_before_ns:
                    return entry
                self.number += 1
        return None

    def write(self, entry: IncidentEntry) -> IncidentEntry:
        """Writes the next entry, and returns the one in the log: another rank may have been faster.

        A rank without an exchange follows its own entry: alone, but not silent.
        """
        try:
            return codec.decode(IncidentEntry, self._exchange.set_if_absent(self._key, codec.encode(entry)))
        except ExchangeError:
            return entry

    @property
    def _key(self) -> str:
        return f"log/{self.number}"
