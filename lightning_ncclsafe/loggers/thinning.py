"""Thins scalar points: of many, the smallest, the largest and the last stand for all."""

from collections.abc import Iterator
from dataclasses import dataclass

# Of each window at most this many points are left: the smallest, the largest and the last.
_LEFT = 3
# How long a window that is closed by its number of points stays open at most, for each step of coarseness.
_LONGEST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """What one call has logged.

    Attributes:
        step: Step, as it was given.
        values: Value by tag.
        created: Wall-clock time of the call, seconds since the epoch.
    """

    step: int | None
    values: dict[str, float]
    created: float


@dataclass(slots=True)
class _Window:
    opened: float
    seen: int = 0
    # Those that stand for the window, each with its place in the order of arrival.
    smallest: tuple[int, Scalars] | None = None
    largest: tuple[int, Scalars] | None = None
    last: tuple[int, Scalars] | None = None


class Thinner:
    """Lets scalar points through, or of each tag's window only the smallest, the largest and the last.

    The idea is that of M4 aggregation (Jugel et al., VLDB 2014): a line drawn through these points has the outline of
    the line through all. NaN counts as the smallest.

    Args:
        max_points_per_s: Most points of a tag in a second, on average; None for no such limit. Points wait for their
            window, ``3 / max_points_per_s`` seconds, to end.

    Attributes:
        coarseness: Beside the rate, a window is not closed before it has ``3 * 2**coarseness`` points; 0 lets all
            through.
        thinned: Points that were left out.
    """

    def __init__(self, max_points_per_s: float | None = None) -> None:
        self._window_s = _LEFT / max_points_per_s if max_points_per_s else 0.0
        self._windows: dict[str, _Window] = {}
        self._arrived = 0
        self.coarseness = 0
        self.thinned = 0

    @property
    def idle(self) -> bool:
        """Whether no point waits for its window to end."""
        return not self._windows

    def offer(self, scalars: Scalars, now: float) -> list[Scalars]:
        """Takes what was logged and returns what may go on, in the order of arrival.

        Args:
            scalars: What was logged.
            now: Seconds of a monotonic clock.
        """
        if not self.coarseness and not self._window_s and not self._windows:
            return [scalars]
        self._arrived += 1
        closed: list[tuple[str, _Window]] = []
        for tag, value in scalars.values.items():
            window = self._windows.setdefault(tag, _Window(opened=now))
            self._put(window, tag, value, scalars)
            if self._is_over(window, now):
                closed.append((tag, self._windows.pop(tag)))
        return list(self._left_of(closed))

    def due(self, now: float) -> list[Scalars]:
        """What has waited for as long as it may."""
        longest_s = max(self._window_s, _LONGEST_S * 2**self.coarseness)
        over = [tag for tag, window in self._windows.items() if now - window.opened >= longest_s]
        return list(self._left_of([(tag, self._windows.pop(tag)) for tag in over]))

    def rest(self) -> list[Scalars]:
        """Everything that waits."""
        windows, self._windows = self._windows, {}
        return list(self._left_of(list(windows.items())))

    def _put(self, window: _Window, tag: str, value: float, scalars: Scalars) -> None:
        place = (self._arrived, scalars)
        window.seen += 1
        window.last = place
        if window.smallest is None or _below(value, window.smallest[1].values[tag]):
            window.smallest = place
        if window.largest is None or _below(window.largest[1].values[tag], value):
            window.largest = place

    def _is_over(self, window: _Window, now: float) -> bool:
        enough = window.seen >= _LEFT * 2**self.coarseness if self.coarseness else True
        return enough and now - window.opened >= self._window_s

    def _left_of(self, windows: list[tuple[str, _Window]]) -> Iterator[Scalars]:
        """The points that stand for these windows; those of one call together again."""
        chosen: dict[int, tuple[Scalars, dict[str, float]]] = {}
        for tag, window in windows:
            places = {place[0]: place[1] for place in (window.smallest, window.largest, window.last) if place}
            self.thinned += window.seen - len(places)
            for number, scalars in places.items():
                chosen.setdefault(number, (scalars, {}))[1][tag] = scalars.values[tag]
        for _, (scalars, values) in sorted(chosen.items(), key=lambda item: item[0]):
            yield Scalars(step=scalars.step, values=values, created=scalars.created)


def _below(one: float, other: float) -> bool:
    # Only NaN is not itself; math.isnan would not take an integer that no float can hold.
    return one != one or one < other
