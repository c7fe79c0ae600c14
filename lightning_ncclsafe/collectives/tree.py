"""Sends the windows of all ranks to rank 0: through a leader for each 32, so that no rank reads more than some tens.

Everything goes over the exchange. Each rank writes to a few keys in turn, and the reader of a value empties its key, so
the size of what is on the store is bounded: if the reader is behind, the writer joins its windows and sends them later.
"""

from dataclasses import dataclass

from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.exchange import Exchange
from lightning_ncclsafe.facts import Straggler, codec
from lightning_ncclsafe.timing.matching import Mispairing
from lightning_ncclsafe.timing.windows import Window, WindowError, decode, empty_window, encode, joined, limited

FAN = 32
"""Ranks per leader."""

# This many turns of a writer may be unread.
_SLOTS = 4
_NUMBER_BYTES = 8
# More windows than these are joined into one, which has no more calls than one window.
_MOST_HELD = 64
_REPORT = "timing/stragglers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingReport:
    """What rank 0 sends to all ranks.

    Attributes:
        stragglers: Ranks that keep, or kept, the others waiting.
        mispairing: A collective that ranks have called differently; None if there was none.
    """

    stragglers: tuple[Straggler, ...] = ()
    mispairing: Mispairing | None = None


class Tree:
    """One rank's place in the tree.

    Args:
        most_calls: Calls of one rank in one group that are passed on at a time.
        fan: Ranks per leader.
    """

    def __init__(
        self, exchange: Exchange, *, rank: int, world_size: int, most_calls: int = 20_000, fan: int = FAN
    ) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._most_calls = most_calls
        self._sources = _sources(rank, world_size, fan)
        self._next = dict.fromkeys(self._sources, 0)
        self._held: list[Window] = []
        self._sent = 0
        self._outgoing = b""
        self.overwritten = 0
        """Number of windows that were lost on their way to this rank."""
        self.unreadable = 0
        """Number of values that were no windows of this job."""
        self.ended: set[int] = set()
        """Ranks whose last window has arrived."""

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def pass_on(self, own: Window) -> Window | None:
        """Sends this rank's window, and what the ranks below sent, one level up; on rank 0, returns all of it.

        Raises:
            ExchangeError: If ranks cannot share; the next call sends what this one could not.
        """
        others = (own.totals, own.lost, own.left_out, own.last, own.missing)
        if len(own.calls) or len(own.spans) or len(own.own) or any(others):
            self._held.append(limited(own, self._most_calls))
        if len(self._held) > _MOST_HELD:
            self._held = [limited(joined(self._held), self._most_calls)]
        if self.is_root:
            self._collect()
            found, self._held = joined(self._held), []
            return found
        key = _key(self._rank, self._sent)
        is_reader_behind = bool(self._exchange.get_many([key]).get(key))
        if not is_reader_behind:
            self._collect()
            self._send()
        return None

    @property
    def holds(self) -> bool:
        """Whether something waits here until the reader has read what was sent before."""
        return bool(self._held or self._outgoing)

    def _send(self) -> None:
        if self._held and not self._outgoing:
            window = joined(self._held) if len(self._held) > 1 else self._held[0]
            # The number is part of the value, so that the reader knows the order.
            self._outgoing = self._sent.to_bytes(_NUMBER_BYTES, "little") + encode(window)
            self._held = []
        if self._outgoing:
            # It may arrive although this raises. It is sent again with the same number, so the reader recognises it.
            self._exchange.set(_key(self._rank, self._sent), self._outgoing)
            self._sent += 1
            self._outgoing = b""

    @property
    def is_done(self) -> bool:
        """Whether all ranks below have sent their last window."""
        return self.ended.issuperset(self._sources)

    def relay(self) -> Window | None:
        """Sends on what others sent, without a window of this rank; see :meth:`pass_on`."""
        return self.pass_on(empty_window())

    def send_report(self, report: TimingReport) -> None:
        """Sends rank 0's report to all ranks; on rank 0.

        Raises:
            ExchangeError: If ranks cannot share.
        """
        self._exchange.set(_REPORT, codec.encode(report))

    def newest_report(self) -> TimingReport:
        """Rank 0's last report.

        Raises:
            ExchangeError: If ranks cannot share.
        """
        found = self._exchange.get_many([_REPORT]).get(_REPORT)
        return codec.decode(TimingReport, found) if found else TimingReport()

    def _collect(self) -> None:
        """Takes what the ranks below have written; kept until it is passed on."""
        keys = {_key(rank, slot): rank for rank in self._sources for slot in range(_SLOTS)}
        found = self._exchange.get_many(keys) if keys else {}
        numbered = [
            (keys[key], int.from_bytes(value[:_NUMBER_BYTES], "little"), key) for key, value in found.items() if value
        ]
        for rank, number, key in sorted(numbered):
            missed = number - self._next[rank]
            if missed >= 0 and self._take(found[key][_NUMBER_BYTES:]):
                self.overwritten += missed
                self._next[rank] = number + 1
            self._exchange.set(key, b"")

    def _take(self, value: bytes) -> bool:
        """Takes one value; whether it is a window, as only the number of a window means anything."""
        try:
            with OwnWork():
                window = decode(value)
            _check_ranks(window, self._world_size)
        except WindowError:
            self.unreadable += 1
            return False
        self._held.append(window)
        self.ended |= window.last
        return True


def _check_ranks(window: Window, world_size: int) -> None:
    ranks = {*window.clocks, *window.totals}.union(
        *(rows["rank"].tolist() for rows in (window.calls, window.spans, window.own))
    )
    ranks |= {*window.lost, *window.left_out, *window.last}.union(*(group.ranks for group in window.groups))
    if not ranks <= set(range(world_size)):
        raise WindowError(f"A window is about ranks {sorted(ranks)} of {world_size}.")


def _sources(rank: int, world_size: int, fan: int) -> tuple[int, ...]:
    """The ranks whose windows this one reads: as a leader those of its 32, as rank 0 the other leaders' as well."""
    if rank % fan:
        return ()
    members = range(rank + 1, min(rank + fan, world_size))
    leaders = range(fan, world_size, fan) if rank == 0 else ()
    return (*members, *leaders)


def _key(rank: int, number: int) -> str:
    return f"timing/{rank}/{number % _SLOTS}"
