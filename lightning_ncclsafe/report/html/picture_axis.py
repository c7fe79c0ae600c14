"""The axis of time below a picture of ranks: which time is shown, and where on it something is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.facts import RankFacts

# What happened before the standstill is shown for so much of its length.
_BEFORE = 0.4
_MARGIN = 1.03
# And of a record, for so much of it, what has not ended.
_AFTER = 0.2
_SHORTEST_S = 2.0
_STEPS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
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
class Axis:
    """The time that is shown: nanoseconds since the epoch, by the clocks of the hosts.

    Attributes:
        begin_ns: Its left end.
        end_ns: Its right end.
        zero_ns: What marks count from.
        zero: What that is.
    """

    begin_ns: int
    end_ns: int
    zero_ns: int
    zero: str = "now"

    @classmethod
    def of_record(cls, shown: Sequence[RankFacts]) -> "Axis":
        """When a record was made is not known: a bit more than from the first to the last call in it."""
        called_ns = [call.created_ns for facts in shown for call in facts.collectives if call.created_ns]
        first_ns, last_ns = min(called_ns, default=0), max(called_ns, default=0)
        room_ns = max(round((last_ns - first_ns) * _AFTER), 1_000_000)
        return cls(begin_ns=first_ns - room_ns // 4, end_ns=last_ns + room_ns, zero_ns=last_ns, zero="last call")

    @classmethod
    def of(cls, shown: Sequence[RankFacts]) -> "Axis":
        """From some time before the first of these ranks has come to a standstill until now."""
        end_ns = max((facts.taken_ns for facts in shown), default=0)
        stopped_ns = min((last_progress_ns(facts, end_ns) for facts in shown), default=end_ns)
        recorded_ns = (call.created_ns for facts in shown for call in facts.collectives[:1] if call.created_ns)
        # No room for a time of which nothing is known.
        known_ns = end_ns - round((end_ns - min(recorded_ns, default=stopped_ns)) * _MARGIN)
        span_ns = max(round((end_ns - stopped_ns) * _MARGIN), round(_SHORTEST_S * 1e9))
        before_ns = end_ns - round((end_ns - stopped_ns) * (1 + _BEFORE))
        return cls(begin_ns=min(max(before_ns, known_ns), end_ns - span_ns), end_ns=end_ns, zero_ns=end_ns)

    def place(self, ns: int) -> float:
        """Per cent of the width; what is outside is at its ends."""
        return round(min(max((ns - self.begin_ns) / (self.end_ns - self.begin_ns), 0.0), 1.0) * 100, 2)

    def shows(self, ns: int) -> bool:
        """Whether this time is shown."""
        return self.begin_ns <= ns <= self.end_ns

    def bar(self, kind: str, begin_ns: int, end_ns: int, words: str) -> Bar:
        """What lasts from then to then, so wide at least that it can be seen."""
        x = self.place(begin_ns)
        return Bar(kind=kind, x=x, width=round(max(self.place(end_ns) - x, 0.2), 2), words=words)

    def marks(self) -> Iterator[tuple[float, str]]:
        """Places in even steps with their words, ``"-10 s"``, the last of them zero; none where no time is known."""
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


def taken_at_ns(facts: RankFacts, now_ns: int) -> int:
    """When a rank's facts were taken, or ``now_ns`` where they do not say."""
    return facts.taken_ns or now_ns


def last_progress_ns(facts: RankFacts, now_ns: int) -> int:
    """When a rank last made progress, its facts having been taken ``now_ns`` where they do not say."""
    return taken_at_ns(facts, now_ns) - round(facts.progress.idle_s * 1e9)
