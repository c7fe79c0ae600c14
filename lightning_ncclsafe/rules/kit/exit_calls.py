"""Which statement of the user's may have ended a process that is gone, among all that end one."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import ExitCall
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.facts.wording import short_place
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline

_FEW = 4
# Nobody else sends these but timers, and the kernel to a process that has used up its CPU time.
_CPU_TIME = "SIGXCPU"
_OF_TIMERS = ("SIGALRM", "SIGVTALRM", "SIGPROF", _CPU_TIME)

_REMEDY_TIMER = (
    "A timer ({call}) went off where nothing handled its signal. Cancel it on every way out of what it limits "
    "(finally: signal.alarm(0)), and only then restore the handler before it; or wait with a timeout instead."
)


class ExitCalls(NamedTuple):
    """Statements of the user's that agree with how a process has ended.

    Attributes:
        only: The one that has ended it, if none of its libraries has; None if that is not known.
        possible: All that may have.
    """

    only: ExitCall | None
    possible: tuple[ExitCall, ...]

    @property
    def words(self) -> str:
        """``"signal.alarm(5) at data.py:18 in limit"``, and where that is left set; empty without an only one."""
        if self.only is None:
            return ""
        left = f", which may be left set at {short_place(self.only.left_at)}" if self.only.left_at else ""
        return f"{self.only.code} at {short_place(self.only.place)}{left}"

    @property
    def location(self) -> str:
        """Where to look for the only one: where it is left set, or else its own line; empty without one."""
        return "" if self.only is None else self.only.left_at or self.only.place

    @property
    def is_short(self) -> bool:
        """Whether there are some, and few enough to list."""
        return 0 < len(self.possible) <= _FEW

    @property
    def timer_remedy(self) -> str:
        """What to do if the only one is a timer that sends a signal; empty if it is not."""
        if self.only is None or self.only.signal in ("", _CPU_TIME):
            return ""
        return _REMEDY_TIMER.format(call=f"{self.only.code} at {short_place(self.only.place)}")

    def evidence(self, rank: int) -> Iterator[Evidence]:
        """Each of them, if they are few."""
        if self.only is not None:
            at = short_place(self.only.place)
            does = f"sets a timer that sends {self.only.signal}" if self.timer_remedy else "exits with this status"
            does = "limits CPU time" if self.only.signal == _CPU_TIME else does
            text = f"Of all code of yours that is loaded, only {self.only.code} at {at} {does}."
            yield Evidence(source="source code", rank=rank, text=text)
            if self.only.left_at:
                at = short_place(self.only.left_at)
                text = f"The timer is cancelled after the `return` at {at}, not before it, as far as the source shows."
                yield Evidence(source="source code", rank=rank, text=text)
            return
        for call in self.possible if self.is_short else ():
            text = f"{call.code} at {short_place(call.place)} may end a process in this way."
            yield Evidence(source="source code", rank=rank, text=text)


def exit_calls(view: Timeline, *, status: int | None, signal: str, may_raise: bool) -> ExitCalls:
    """The statements in the user's source that agree with the end of a process.

    Args:
        view: The job; a rank that has searched has found all of those that it has loaded.
        status: The status with which the process has exited; None if that is unknown.
        signal: The signal that ended it; empty if none is known.
        may_raise: Whether it may have raised SystemExit: that of a rank in its Trainer is reported.
    """
    able = [call for call in _known(view) if may_raise or not call.raises]
    if signal:
        sending = tuple(call for call in able if call.signal == signal)
        # What sends a signal from outside, or fails in native code, is more frequent: no line is named.
        return ExitCalls(sending[0] if len(sending) == 1 and signal in _OF_TIMERS else None, sending)
    able = [call for call in able if not call.signal and (status is None or call.status in (status, None))]
    # Those with this very status come first.
    able.sort(key=lambda call: call.status is None)
    is_known = len(able) == 1 and status is not None and able[0].status == status
    return ExitCalls(able[0] if is_known else None, tuple(able))


@once
def _known(view: Timeline) -> tuple[ExitCall, ...]:
    """What any rank has found: not all ranks load the same modules, and hosts may have the code at other paths."""
    found: dict[tuple[str, str, int], ExitCall] = {}
    for calls in dict.fromkeys(facts.exit_calls for facts in view.facts.values()):
        often = Counter[tuple[str, str]]()
        for call in calls:
            alike = call.code, short_place(call.place)
            # Two files of one rank may be copies of each other.
            often[alike] += 1
            key = (*alike, often[alike])
            # A rank without time to look for it, or of an older version, does not know where it is left set.
            if key not in found or (call.left_at and not found[key].left_at):
                found[key] = call
    return tuple(found.values())
