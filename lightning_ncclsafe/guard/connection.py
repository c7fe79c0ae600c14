"""The exchange that one rank uses, and the change to the job's store once that exists."""

from lightning_ncclsafe.exchange import Exchange
from lightning_ncclsafe.guard.incident_log import IncidentLog


class Connection:
    """Connects a rank with the others: over one exchange until the process group exists, over another from then on.

    The main thread calls :meth:`connect`; the watchdog's thread, which may be in the middle of a round, changes over
    with its next tick.

    Args:
        exchange: What the ranks share before they have joined the process group.
        not_before_ns: See :class:`~lightning_ncclsafe.guard.incident_log.IncidentLog`.

    Attributes:
        exchange: The exchange that the watchdog's thread uses.
        log: The log of incidents on it.
        has_joined: Whether that is the one of the process group.
    """

    def __init__(self, exchange: Exchange, *, not_before_ns: int) -> None:
        self.exchange = exchange
        self.log = IncidentLog(exchange, not_before_ns=not_before_ns)
        self.has_joined = False
        self._next: Exchange | None = None

    @property
    def newest(self) -> Exchange:
        """The exchange that the main thread uses."""
        return self._next or self.exchange

    @property
    def is_superseded(self) -> bool:
        """Whether the watchdog's thread is still to change over: what it does on the old exchange is pointless."""
        return self._next is not None and not self.has_joined

    def connect(self, exchange: Exchange) -> None:
        """The process group exists, and so does the job's store."""
        self._next = exchange

    def change_over(self) -> bool:
        """Goes over to the new exchange if there is one, with a log of its own; returns whether it did."""
        if self._next is None or self.has_joined:
            return False
        self.exchange.close()
        self.exchange, self.has_joined = self._next, True
        self.log = IncidentLog(self.exchange)
        return True

    def close(self) -> None:
        """Closes both."""
        for exchange in (self.exchange, self._next):
            if exchange is not None:
                exchange.close()
