"""Whose workers are there: loaders that are not read at the same time have theirs in turn, where not all fit."""

from typing import Protocol


class Occupant(Protocol):
    """A loader that may have workers.

    Attributes:
        group: Loaders with the same one are read at the same time.
        alive: How many worker processes it has now.
    """

    group: str

    @property
    def alive(self) -> int:
        """Worker processes that it has now."""

    def park(self) -> None:
        """Ends them; it has new ones, and goes on with the batch that is due, as soon as it is read on."""


class Room:
    """Keeps the workers of all loaders of a rank within its budget. Belongs to the thread that reads them.

    Args:
        most: Most workers of all loaders together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._occupants: list[Occupant] = []

    def add(self, occupant: Occupant) -> None:
        """A loader may have workers from now on."""
        self._occupants.append(occupant)

    def remove(self, occupant: Occupant) -> None:
        """A loader has none any more."""
        self._occupants = [other for other in self._occupants if other is not occupant]

    def make(self, owner: Occupant, workers: int) -> None:
        """Called before a loader's workers are started: others give way, those first that were read the longest ago.

        Args:
            owner: The loader.
            workers: How many it is about to have; it has none now.
        """
        others = [other for other in self._occupants if other is not owner]
        for other in others:
            if sum(each.alive for each in others) + workers <= self._most:
                break
            if other.group != owner.group:
                other.park()
        # Whoever is read now is the last to give way.
        self._occupants = [*others, owner]
