"""The picture on the page, ranks against time: a lane for each rank or for equal ones, outliers first.

Places on the axis of time are percentages of its width, so the picture fits any screen and its text keeps its size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.facts.wording import call_words, capitalised, duration_words, ranks_words, short_location
from lightning_ncclsafe.report.ranks import RankStates
from lightning_ncclsafe.rules.kit.activity import hook_words

# The time shown before the stall, as a share of its length.
_BEFORE = 0.4
_MARGIN = 1.03
# In a record, the share for what has not ended.
_AFTER = 0.2
_SHORTEST_S = 2.0
_STEPS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
_MOST_MARKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that still lasts.

    Attributes:
        kind: ``"outer"`` for the actions around the innermost one, else ``"works"`` or ``"waits"``.
        x: Where it begins, per cent of the width.
        width: How wide it is, per cent.
        words: What it is.
    """

    kind: str
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The time shown: nanoseconds since the epoch, by the clocks of the hosts.

    Attributes:
        begin_ns: Its left end.
        end_ns: Its right end.
        zero_ns: What marks count from.
        zero: The name of that moment.
    """

    begin_ns: int
    end_ns: int
    zero_ns: int
    zero: str = "now"

    @classmethod
    def of_record(cls, shown: Sequence[RankFacts]) -> "Axis":
        """A bit more than from the first to the last call, as the time of the record is unknown."""
        called_ns = [call.created_ns for facts in shown for call in facts.collectives if call.created_ns]
        first_ns, last_ns = min(called_ns, default=0), max(called_ns, default=0)
        room_ns = max(round((last_ns - first_ns) * _AFTER), 1_000_000)
        return cls(begin_ns=first_ns - room_ns // 4, end_ns=last_ns + room_ns, zero_ns=last_ns, zero="last call")

    @classmethod
    def of(cls, shown: Sequence[RankFacts]) -> "Axis":
        """From some time before the first of these ranks stopped until now."""
        end_ns = max((facts.taken_ns for facts in shown), default=0)
        stopped_ns = min((last_progress_ns(facts, end_ns) for facts in shown), default=end_ns)
        recorded_ns = (call.created_ns for facts in shown for call in facts.collectives[:1] if call.created_ns)
        # No room for a time without any calls.
        known_ns = end_ns - round((end_ns - min(recorded_ns, default=stopped_ns)) * _MARGIN)
        span_ns = max(round((end_ns - stopped_ns) * _MARGIN), round(_SHORTEST_S * 1e9))
        before_ns = end_ns - round((end_ns - stopped_ns) * (1 + _BEFORE))
        return cls(begin_ns=min(max(before_ns, known_ns), end_ns - span_ns), end_ns=end_ns, zero_ns=end_ns)

    def place(self, ns: int) -> float:
        """Per cent of the width; times outside are at its ends."""
        return round(min(max((ns - self.begin_ns) / (self.end_ns - self.begin_ns), 0.0), 1.0) * 100, 2)

    def shows(self, ns: int) -> bool:
        """Whether this time is shown."""
        return self.begin_ns <= ns <= self.end_ns

    def bar(self, kind: str, begin_ns: int, end_ns: int, words: str) -> Bar:
        """A bar between two times, wide enough to be seen."""
        x = self.place(begin_ns)
        return Bar(kind=kind, x=x, width=round(max(self.place(end_ns) - x, 0.2), 2), words=words)

    def marks(self) -> Iterator[tuple[float, str]]:
        """Places in even steps with their words, ``"-10 s"``, the last of them zero; empty if no time is known."""
        if self.zero_ns <= 0 and self.zero != "now":
            return
        span_s = (self.zero_ns - self.begin_ns) / 1e9
        step_s = next((step for step in _STEPS_S if span_s / step <= _MOST_MARKS), span_s)
        for number in range(int(span_s / step_s), 0, -1):
            before_s = number * step_s
            yield self.place(self.zero_ns - round(before_s * 1e9)), f"\u2212{_mark_words(before_s)}"
        yield self.place(self.zero_ns), self.zero


def _mark_words(seconds: float) -> str:
    for unit_s, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s or seconds == unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s" if seconds >= 0.5 else f"{seconds * 1e3:.3g} ms"


def last_progress_ns(facts: RankFacts, now_ns: int) -> int:
    """When a rank last made progress; if it is not known when its facts were taken, that was now."""
    return (facts.taken_ns or now_ns) - round(facts.progress.idle_s * 1e9)


# Up to this many ranks, each has its own lane.
_FEW_RANKS = 8
_MOST_LANES = 16
_MOST_ACTIONS = 3
_MOST_WAITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank, or several equal ones, of which the first is drawn.

    Attributes:
        ranks: The ranks, in words.
        does: What they do, and for how long they have made no progress.
        where: In which hook and batch.
        line: At which line.
        label: The lane in one sentence, for screen readers.
        is_named: Whether the first finding names one of them.
        is_silent: Whether they did not answer.
        actions: What Lightning is doing there, outermost first.
        waits: Collectives that have not ended.
        calls: Places of calls of collectives that have ended.
        stop: Where it last made progress; None if outside the picture.
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
        left_out: Number of lanes that are left out.
    """

    lanes: tuple[Lane, ...]
    marks: tuple[tuple[float, str], ...]
    left_out: int = 0


def picture(diagnosis: Diagnosis, alike: RankStates) -> Picture:
    """Draws the ranks of a job."""
    view = alike.view
    named = {rank for finding in diagnosis.findings[:1] for rank in finding.ranks}
    few = len(view.facts) <= _FEW_RANKS
    groups = [(rank,) for rank in view.facts] if few else alike.groups(waiting_anywhere=True)
    # The lanes of ranks that a finding names, then small groups, then large ones.
    groups.sort(key=lambda ranks: (not named.intersection(ranks), len(ranks), ranks))
    shown = [view.facts[ranks[0]] for ranks in groups]
    axis = Axis.of_record(shown) if view.job.is_recorded else Axis.of(shown)
    silent = list(_silent_lanes(alike, named))
    lanes = [_lane(alike, axis, ranks, bool(named.intersection(ranks))) for ranks in groups[:_MOST_LANES]]
    lanes = [*silent, *lanes] if any(lane.is_named for lane in silent) else [*lanes[:1], *silent, *lanes[1:]]
    return Picture(lanes=tuple(lanes), marks=tuple(axis.marks()), left_out=max(len(groups) - _MOST_LANES, 0))


def _lane(alike: RankStates, axis: Axis, ranks: tuple[int, ...], is_named: bool) -> Lane:
    view = alike.view
    facts, doing = view.facts[ranks[0]], view.activities[ranks[0]]
    is_seen = not view.job.is_recorded
    does = ", ".join(filter(None, [alike.state(ranks), alike.stall(ranks) if is_seen else ""]))
    where = ", ".join(filter(None, [doing.hook, alike.batch(ranks[0]), alike.hosts(ranks)])) if is_seen else ""
    frames = {frame for rank in ranks if (frame := alike.place(rank)) is not None}
    line = f"{len(frames)} different lines" if len(frames) > 1 else "".join(map(short_location, frames))
    stop_ns = last_progress_ns(facts, axis.end_ns)
    called_ns = (call.created_ns for call in facts.collectives if call.completed)
    return Lane(
        ranks=capitalised(ranks_words(ranks)),
        does=does,
        where=where,
        line=line,
        label="; ".join(filter(None, [f"{capitalised(ranks_words(ranks))} {does}".rstrip(), where, line])),
        is_named=is_named,
        actions=tuple(_actions(facts, axis, waits=doing.waits_for_peers)),
        waits=tuple(_waits(facts, axis)),
        # Rounded, so that those in the same pixel are drawn once.
        calls=tuple(sorted({round(axis.place(ns), 1) for ns in called_ns if axis.shows(ns)})),
        stop=axis.place(stop_ns) if is_seen and axis.shows(stop_ns) else None,
    )


def _actions(facts: RankFacts, axis: Axis, *, waits: bool) -> Iterator[Bar]:
    shown, now_ns = facts.progress.actions[-_MOST_ACTIONS:], facts.taken_ns or axis.end_ns
    for number, action in enumerate(shown, 1):
        kind = ("waits" if waits else "works") if number == len(shown) else "outer"
        words = f"{hook_words(action.name)} for {duration_words(action.for_s)}"
        yield axis.bar(kind, now_ns - round(action.for_s * 1e9), now_ns, words)


def _waits(facts: RankFacts, axis: Axis) -> Iterator[Bar]:
    now_ns = facts.taken_ns or axis.end_ns
    outstanding = [call for call in facts.collectives if not call.completed and call.created_ns]
    for call in outstanding[:_MOST_WAITS]:
        since = f", not completed after {duration_words((now_ns - call.created_ns) / 1e9)}" if facts.taken_ns else ""
        yield axis.bar("waits", call.created_ns, now_ns, f"{call_words(call)}, sequence number {call.seq}{since}")


def _silent_lanes(alike: RankStates, named: set[int]) -> Iterator[Lane]:
    """Lanes of ranks that did not answer, with what others saw of them; equal ones together."""
    for ranks, does in islice(alike.silences(), _MOST_LANES):
        title = capitalised(ranks_words(ranks))
        is_named = bool(named.intersection(ranks))
        yield Lane(ranks=title, does=does, label=f"{title} {does}", is_silent=True, is_named=is_named)
