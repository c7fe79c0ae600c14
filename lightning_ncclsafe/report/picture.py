"""Ranks against time, as a page draws them: a lane for each rank, or for all that are alike, outliers first.

Places on the axis of time are percentages of its width, so that a picture fits any screen without its text shrinking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.findings import Diagnosis
from lightning_ncclsafe.report.alike import Alike
from lightning_ncclsafe.rules.activity import hook_words
from lightning_ncclsafe.rules.sentences import batch_words
from lightning_ncclsafe.rules.timeline import Timeline
from lightning_ncclsafe.rules.wording import call_words, capitalised, duration_words, ranks_words, short_location

# Up to so many ranks each has a lane of its own.
_FEW_RANKS = 8
_MOST_LANES = 16
_MOST_ACTIONS = 3
_MOST_WAITS = 3
# What happened before the standstill is shown for so much of its length.
_BEFORE = 0.4
_MARGIN = 1.03
_SHORTEST_S = 2.0
_STEPS_S = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_MOST_MARKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that lasts until now.

    Attributes:
        kind: ``"outer"`` for what goes on around the innermost action, else ``"works"`` or ``"waits"``.
        x: Where it begins, per cent of the width.
        width: How wide it is, per cent.
        words: What it is.
    """

    kind: str
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank, or several that are alike, of which the first is drawn.

    Attributes:
        ranks: The ranks, in words.
        does: What they do, and for how long they have made no progress.
        where: In which hook and batch.
        line: At which line.
        label: All of it in one sentence, for those who cannot see the picture.
        is_named: Whether the first finding names one of them.
        is_silent: Whether they did not answer.
        actions: What Lightning is doing there, outermost first.
        waits: Collectives that have not ended.
        calls: Where collectives were called that have ended.
        stop: Where it last made progress; None where that is not in the picture.
    """

    ranks: str
    does: str
    where: str = ""
    line: str = ""
    label: str = ""
    is_named: bool = False
    is_silent: bool = False
    actions: tuple[Bar, ...] = ()
    waits: tuple[Bar, ...] = ()
    calls: tuple[float, ...] = ()
    stop: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All lanes, and the axis of time below them.

    Attributes:
        lanes: From top to bottom.
        marks: Places on the axis with their words, ``"-10 s"``; the last is ``"now"``.
        left_out: Lanes for which there is no room.
    """

    lanes: tuple[Lane, ...]
    marks: tuple[tuple[float, str], ...]
    left_out: int = 0


def picture(diagnosis: Diagnosis, alike: Alike) -> Picture:
    """Draws the ranks of a job.

    Args:
        diagnosis: What was found.
        alike: The ranks of its job.
    """
    view = alike.view
    named = {rank for finding in diagnosis.findings[:1] for rank in finding.ranks}
    few = len(view.facts) <= _FEW_RANKS
    groups = _ordered([(rank,) for rank in view.facts] if few else alike.groups(waiting_anywhere=True), named)
    axis = _Axis.of([view.facts[ranks[0]] for ranks in groups])
    silent = list(_silent_lanes(view, named))
    lanes = [_lane(alike, axis, ranks, bool(named.intersection(ranks))) for ranks in groups[:_MOST_LANES]]
    lanes = [*silent, *lanes] if any(lane.is_named for lane in silent) else [*lanes[:1], *silent, *lanes[1:]]
    return Picture(lanes=tuple(lanes), marks=tuple(axis.marks()), left_out=max(len(groups) - _MOST_LANES, 0))


def _ordered(groups: Sequence[tuple[int, ...]], named: set[int]) -> list[tuple[int, ...]]:
    """Those that a finding names, then the few, then the many."""
    return sorted(groups, key=lambda ranks: (not named.intersection(ranks), len(ranks), ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """The time that is shown: nanoseconds since the epoch, by the clocks of the hosts."""

    begin_ns: int
    end_ns: int

    @classmethod
    def of(cls, shown: Sequence[RankFacts]) -> "_Axis":
        end_ns = max((facts.taken_ns for facts in shown), default=0)
        stopped_ns = min((_stopped_ns(facts, end_ns) for facts in shown), default=end_ns)
        recorded_ns = (call.created_ns for facts in shown for call in facts.collectives[:1] if call.created_ns)
        # No room for a time of which nothing is known.
        known_ns = end_ns - round((end_ns - min(recorded_ns, default=stopped_ns)) * _MARGIN)
        span_ns = max(round((end_ns - stopped_ns) * _MARGIN), round(_SHORTEST_S * 1e9))
        before_ns = end_ns - round((end_ns - stopped_ns) * (1 + _BEFORE))
        return cls(begin_ns=min(max(before_ns, known_ns), end_ns - span_ns), end_ns=end_ns)

    def place(self, ns: int) -> float:
        """Per cent of the width, unrounded ends cut off."""
        return round(min(max((ns - self.begin_ns) / (self.end_ns - self.begin_ns), 0.0), 1.0) * 100, 2)

    def shows(self, ns: int) -> bool:
        return self.begin_ns <= ns <= self.end_ns

    def bar(self, kind: str, begin_ns: int, end_ns: int, words: str) -> Bar:
        x = self.place(begin_ns)
        return Bar(kind=kind, x=x, width=round(max(self.place(end_ns) - x, 0.2), 2), words=words)

    def marks(self) -> Iterator[tuple[float, str]]:
        span_s = (self.end_ns - self.begin_ns) / 1e9
        step_s = next((step for step in _STEPS_S if span_s / step <= _MOST_MARKS), span_s)
        for number in range(int(span_s / step_s), 0, -1):
            before_s = number * step_s
            yield round((1 - before_s / span_s) * 100, 2), f"\u2212{_mark_words(before_s)}"
        yield 100.0, "now"


def _mark_words(seconds: float) -> str:
    for unit_s, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s or seconds == unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s"


def _taken_ns(facts: RankFacts, now_ns: int) -> int:
    return facts.taken_ns or now_ns


def _stopped_ns(facts: RankFacts, now_ns: int) -> int:
    return _taken_ns(facts, now_ns) - round(facts.progress.idle_s * 1e9)


def _lane(alike: Alike, axis: _Axis, ranks: tuple[int, ...], is_named: bool) -> Lane:
    view = alike.view
    facts, doing = view.facts[ranks[0]], view.activities[ranks[0]]
    idle = sorted(view.facts[rank].progress.idle_s for rank in ranks)
    does = f"{alike.states[ranks[0]]}, no progress for {_range_words(idle)}"
    where = ", ".join(filter(None, [doing.hook, batch_words(facts.progress)]))
    line = _line(view, ranks)
    stop_ns = _stopped_ns(facts, axis.end_ns)
    return Lane(
        ranks=capitalised(ranks_words(ranks)),
        does=does,
        where=where,
        line=line,
        label=f"{capitalised(ranks_words(ranks))} {does}; {', '.join(filter(None, [where, line]))}",
        is_named=is_named,
        actions=tuple(_actions(facts, axis, waits=doing.waits_for_peers)),
        waits=tuple(_waits(facts, axis)),
        calls=tuple(sorted(_calls(facts, axis))),
        stop=axis.place(stop_ns) if axis.shows(stop_ns) else None,
    )


def _line(view: Timeline, ranks: tuple[int, ...]) -> str:
    frames = {frame for rank in ranks if (frame := view.activities[rank].frame) is not None}
    return f"{len(frames)} different lines" if len(frames) > 1 else "".join(map(short_location, frames))


def _range_words(idle_s: list[float]) -> str:
    least, most = duration_words(idle_s[0]), duration_words(idle_s[-1])
    return least if least == most else f"{least} to {most}"


def _actions(facts: RankFacts, axis: _Axis, *, waits: bool) -> Iterator[Bar]:
    shown, taken_ns = facts.progress.actions[-_MOST_ACTIONS:], _taken_ns(facts, axis.end_ns)
    for number, action in enumerate(shown, 1):
        kind = ("waits" if waits else "works") if number == len(shown) else "outer"
        words = f"{hook_words(action.name)} for {duration_words(action.for_s)}"
        yield axis.bar(kind, taken_ns - round(action.for_s * 1e9), taken_ns, words)


def _waits(facts: RankFacts, axis: _Axis) -> Iterator[Bar]:
    taken_ns = _taken_ns(facts, axis.end_ns)
    outstanding = [call for call in facts.collectives if not call.completed and call.created_ns]
    for call in outstanding[:_MOST_WAITS]:
        since_s = (taken_ns - call.created_ns) / 1e9
        words = f"{call_words(call)}, sequence number {call.seq}, not completed after {duration_words(since_s)}"
        yield axis.bar("waits", call.created_ns, taken_ns, words)


def _calls(facts: RankFacts, axis: _Axis) -> set[float]:
    """Rounded, so that those that would share a pixel are drawn once."""
    calls = (call.created_ns for call in facts.collectives if call.completed)
    return {round(axis.place(ns), 1) for ns in calls if axis.shows(ns)}


def _silent_lanes(view: Timeline, named: set[int]) -> Iterator[Lane]:
    """What others saw of those that did not answer; alike ones together."""
    alike: dict[str, list[int]] = {}
    for rank in view.silent:
        process = view.witnesses.get(rank)
        seen = f"its process is {process.state}" if process else "nobody saw its process"
        alike.setdefault(f"did not answer; {seen}", []).append(rank)
    for does, ranks in list(alike.items())[:_MOST_LANES]:
        title = capitalised(ranks_words(ranks))
        is_named = bool(named.intersection(ranks))
        yield Lane(ranks=title, does=does, label=f"{title} {does}", is_silent=True, is_named=is_named)
