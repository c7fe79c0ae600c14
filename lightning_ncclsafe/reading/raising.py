"""Exceptions in a log of several ranks: tracebacks that are mixed or cut, and the ranks they belong to."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import ExceptionFacts
from lightning_ncclsafe.reading import tracebacks
from lightning_ncclsafe.reading.lines import Line

_Key = tuple[int | None, str]
_MOST_OPEN = 4096
_MOST_IDLE = 5000
_MOST_NAMELESS = 16


class RankException(NamedTuple):
    """An exception and its rank, if known."""

    rank: int | None
    exception: ExceptionFacts


class Raising:
    """Reads the exceptions of one file after the other, line by line.

    Attributes:
        nameless: Exceptions of unknown ranks in this file.
        child: Number of the process whose traceback a parent has announced; None if it has announced none.
    """

    def __init__(self) -> None:
        self.nameless: list[ExceptionFacts] = []
        self.child: int | None = None
        self._open: dict[_Key, tracebacks.Traceback] = {}
        self._chained: set[_Key] = set()
        self._idle = 0
        self._worker: RankException | None = None
        self._begun: _Key | None = None

    @property
    def is_open(self) -> bool:
        """Whether a traceback goes on in the next line."""
        return bool(self._open)

    def begin(self) -> None:
        """Another file begins."""
        self.nameless = []
        self._open.clear()
        self._chained.clear()
        self.child, self._worker = None, None

    def flush(self) -> Iterator[RankException]:
        """The failure of a loader's worker that its process has not reported."""
        if self._worker is not None:
            yield self.owned(*self._worker)

    def keep(self, exception: ExceptionFacts) -> None:
        """Keeps an exception of an unknown rank."""
        if len(self.nameless) < _MOST_NAMELESS:
            self.nameless.append(exception)

    def owned(self, rank: int | None, exception: ExceptionFacts) -> RankException:
        """The exception with its rank, which is the announced child if no other is known."""
        child, self.child = self.child, None
        if "DataLoader worker" in exception.message:
            self._worker = None
        return RankException(child if rank is None else rank, exception)

    def read(self, line: Line, rank: int | None, text: str, *, has_numbers: bool) -> tuple[list[RankException], bool]:
        """Reads the next line; the exceptions that end with it, and whether the line is about an exception.

        Args:
            text: The line, joined with what a terminal has broken off.
            has_numbers: Whether the number of a child is its rank.
        """
        key = (line.rank, line.stream)
        self._loses_its_prefix(key, text)
        reading = self._open.get(key)
        self._idle = 0 if reading is not None else self._idle + 1
        if self._idle > _MOST_IDLE:
            # Their ranks were ended in the middle of them.
            self._open.clear()
        self._between(key, text, has_numbers=has_numbers)
        if reading is not None and not reading.goes_on(text):
            del self._open[key]
            if reading.exception is not None:
                return self._ended(rank if reading.rank is None else reading.rank, reading.exception, key), True
        if tracebacks.begins(text) and len(self._open) < _MOST_OPEN:
            self._open[key] = tracebacks.Traceback(rank=tracebacks.of_rank(text))
            self._begun = key if line.rank is not None else None
        elif reading is None and tracebacks.begins_cut(text) and len(self._open) < _MOST_OPEN:
            self._open[key] = tracebacks.Traceback(has_head=False)
            self._open[key].goes_on(text)
        elif reading is None:
            return self._without_traceback(rank, text)
        return [], True

    def _ended(self, rank: int | None, exception: ExceptionFacts, key: _Key) -> list[RankException]:
        if key in self._chained:
            # The exception above is the original one.
            self._chained.discard(key)
            return []
        return [self.owned(rank, exception)]

    def _loses_its_prefix(self, key: _Key, text: str) -> None:
        """Finds the rank where a logger puts it before the first line of a traceback only."""
        begun, self._begun = self._begun, None
        if begun in self._open and key == (None, "") and key not in self._open and tracebacks.begins_cut(text):
            reading = self._open.pop(begun)
            reading.rank = begun[0] if reading.rank is None else reading.rank
            self._open[key] = reading

    def _between(self, key: _Key, text: str, *, has_numbers: bool) -> None:
        """Reads what is said about the next traceback."""
        if tracebacks.is_chain(text):
            self._chained.add(key)
        child = tracebacks.child(text) if has_numbers else None
        rank = tracebacks.announced(text)
        if child is not None or rank is not None:
            self.child = child if rank is None else rank

    def _without_traceback(self, rank: int | None, text: str) -> tuple[list[RankException], bool]:
        worker = tracebacks.of_worker(text)
        if worker is not None:
            self._worker = RankException(rank, worker)
            return [], True
        found = tracebacks.alone(text, is_of_rank=rank is not None)
        if found is None:
            return [], False
        same = next((one for one in self.nameless if tracebacks.is_one(one, found.exception)), None)
        if same is not None:
            # Its traceback did not give the rank, but this line does.
            self.nameless.remove(same)
        return [self.owned(one, same or found.exception) for one in found.ranks or (rank,)], True
