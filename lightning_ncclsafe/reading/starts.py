"""The starts of a run of which logs tell: launchers start it again, and go on in the same files."""

from dataclasses import dataclass, field

from lightning_ncclsafe.facts import ExceptionFacts
from lightning_ncclsafe.reading.said import Said

_MOST_SAID = 100_000
_MOST_UNNAMED = 16


@dataclass(slots=True)
class Start:
    """What logs say of one start.

    Attributes:
        said: What was said of each rank, by rank.
        unnamed: Exceptions of which no rank is known.
        world_size: The number of ranks by a log's own word; 0 where it says nothing of that.
    """

    said: dict[int, Said] = field(default_factory=dict)
    unnamed: list[ExceptionFacts] = field(default_factory=list)
    world_size: int = 0

    @property
    def tells(self) -> bool:
        """Whether any rank is said to wait, to fail or to end."""
        return bool(self.unnamed) or any(one.tells for one in self.said.values())

    def of(self, rank: int) -> Said | None:
        """What is said of a rank; None where there is no room for more."""
        if rank not in self.said and len(self.said) >= _MOST_SAID:
            return None
        return self.said.setdefault(rank, Said(rank))

    def has_raised(self, exception: ExceptionFacts) -> None:
        """Keeps an exception of which no rank is known."""
        if len(self.unnamed) < _MOST_UNNAMED and exception not in self.unnamed:
            self.unnamed.append(exception)


class Starts:
    """All starts. Files number theirs alike: what one says of the second belongs to what another says of the second."""

    def __init__(self) -> None:
        self._by_number: dict[int, Start] = {}
        self._number = 0
        self._world_size = 0

    def begin(self, number: int) -> None:
        """A file begins with the start of this number."""
        self._number = number

    def again(self) -> None:
        """The run starts again. Of those before, only the last one that tells anything may still be asked for."""
        told = self._last_told()
        self._by_number = {number: start for number, start in self._by_number.items() if number == told}
        self._number += 1

    @property
    def now(self) -> Start:
        """The one that is being read of."""
        return self._by_number.setdefault(self._number, Start())

    @property
    def last(self) -> Start:
        """The last one that tells anything."""
        return self._by_number.get(self._last_told(), Start())

    @property
    def world_size(self) -> int:
        """The number of ranks in the last one; of any, where that says nothing; 0 where none does."""
        return self.last.world_size or self._world_size

    def has_size(self, size: int) -> None:
        """Keeps the number of ranks."""
        self.now.world_size = max(self.now.world_size, size)
        self._world_size = max(self._world_size, size)

    def _last_told(self) -> int:
        return max((number for number, start in self._by_number.items() if start.tells), default=-1)
