"""The offset of a host's wall clock from rank 0's: what an exchange of messages proves, and for how long it holds."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_ncclsafe.timing.windows import Clock

# Two disciplined clocks drift apart by 30 ppm at most, as NTP assumes 15 ppm for each (PHI of RFC 5905, section 7.3);
# undisciplined quartz is usually specified within 50 ppm.
DRIFT = 50e-6
# Between a wall clock and its host's oscillator: less than the 500 ppm by which ntpd and the kernel slew (MAXFREQ in
# linux/timex.h), more than an oscillator is off.
_SLEW = 200e-6
_STEP_NS = 200_000
# Reading two clocks takes less than a microsecond, unless the thread is interrupted between them.
_CLOSE_NS = 20_000
_READINGS = 5

NowNs = Callable[[], int]
Monotonic = Callable[[], float]


def oscillator_s() -> float:
    """Seconds of the host's oscillator, where the system gives it; unlike ``time.monotonic`` NTP cannot slew it."""
    raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
    return time.monotonic() if raw is None else time.clock_gettime(raw)


@dataclass(frozen=True, slots=True)
class Reading:
    """A host's wall clock and its monotonic clock at the same moment, nanoseconds."""

    wall_ns: int
    steady_ns: int

    def drift_ns(self, earlier: "Reading") -> int:
        """How much the wall clock has gained on the monotonic clock since then, nanoseconds."""
        return (self.wall_ns - earlier.wall_ns) - (self.steady_ns - earlier.steady_ns)

    def has_stepped(self, earlier: "Reading") -> bool:
        """Whether the wall clock was set since then, or is being slewed."""
        passed_ns = self.steady_ns - earlier.steady_ns
        return abs(self.drift_ns(earlier)) > _STEP_NS + _SLEW * passed_ns


def read_clocks(now_ns: NowNs, monotonic: Monotonic) -> Reading:
    """Reads both clocks, again if the thread was interrupted between them."""
    found: list[tuple[int, Reading]] = []
    for _ in range(_READINGS):
        before_ns, wall_ns, after_ns = int(monotonic() * 1e9), now_ns(), int(monotonic() * 1e9)
        found.append((after_ns - before_ns, Reading(wall_ns, (before_ns + after_ns) // 2)))
        if after_ns - before_ns <= _CLOSE_NS:
            break
    return min(found, key=lambda reading: reading[0])[1]


@dataclass(frozen=True, slots=True)
class Round:
    """A message to rank 0 and its answer.

    Attributes:
        sent_ns: Before the message was sent, on the own wall clock.
        seen_ns: After rank 0 had read it, on rank 0's clock.
        answered_ns: Before rank 0 sent its answer, on rank 0's clock.
        got_ns: After the answer was read, on the own wall clock.
    """

    sent_ns: int
    seen_ns: int
    answered_ns: int
    got_ns: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """A host's wall clock against rank 0's at one moment.

    Attributes:
        offset_ns: How much it was ahead.
        uncertainty_ns: Bound of its error.
        at: The host's clocks at that moment; all ranks on it share them.
        epoch: Identifies the time since rank 0's clock was last set.
    """

    offset_ns: int
    uncertainty_ns: int
    at: Reading
    epoch: int

    def clock(self, now: Reading) -> Clock:
        """The offset now, with its bound; unknown if the wall clock was set in the meantime.

        Clocks drift apart, and the own wall clock may have been corrected by less than drift explains.
        """
        if now.has_stepped(self.at):
            return Clock()
        drifted_ns = DRIFT * abs(now.steady_ns - self.at.steady_ns) + abs(now.drift_ns(self.at))
        return Clock(offset_ns=self.offset_ns, uncertainty_ns=self.uncertainty_ns + int(drifted_ns) + 1)


def aligned(rounds: Iterable[Round], began: Reading, ended: Reading, epoch: int) -> Alignment | None:
    """The offset that all rounds allow; None if there is none because a clock was set meanwhile.

    A message is read after it was sent: the own clock is ahead by ``sent - seen`` at least, and by ``got - answered``
    at most. Each round bounds it from both sides, however unequal the delays are, and the true offset is within the
    bounds of all of them; these are NTP's times (RFC 5905, section 8), used as an interval as Marzullo proposed.
    """
    all_rounds = list(rounds)
    if not all_rounds or ended.has_stepped(began):
        return None
    least_ns = max(round.sent_ns - round.seen_ns for round in all_rounds)
    most_ns = min(round.got_ns - round.answered_ns for round in all_rounds)
    # The clocks have drifted between the first round and the last.
    drifted_ns = int(DRIFT * (ended.steady_ns - began.steady_ns)) + abs(ended.drift_ns(began)) + 1
    if least_ns > most_ns + 2 * drifted_ns:
        return None
    return Alignment(
        offset_ns=(least_ns + most_ns) // 2,
        uncertainty_ns=max(most_ns - least_ns, 0) // 2 + 1 + drifted_ns,
        at=ended,
        epoch=epoch,
    )
