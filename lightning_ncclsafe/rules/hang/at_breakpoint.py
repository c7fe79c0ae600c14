"""The cause at-breakpoint: a rank is paused in a debugger, and nobody is there to continue it."""

from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import DEBUGGERS
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Plan,
    Timeline,
    below_user,
    deepest_user_frame,
    hang_rule,
    is_in,
    location_of,
    straggler_finding,
)


@hang_rule(
    after="own-code",
    remedy='Remove the breakpoint; or debug with devices=1, or with on_timeout="report" and a longer timeout.',
    plan=Plan.STOP,
)
def at_breakpoint(view: Timeline) -> Iterator[Finding]:
    """A rank is paused in a debugger while the others wait for it.

    Symptom:
        A "(Pdb)" or "ipdb>" prompt among the output of all ranks; not even that if the launcher gives ranks no
        terminal.

    Cause:
        A breakpoint() left in the code, or a debugger attached to one rank.

    Remedy:
        Remove it; or debug with devices=1, or with on_timeout="report" and a longer timeout.

    Cannot see:
        Debuggers that stop the process from outside, such as gdb: see stopped-process.
    """
    # A debugger above the user's deepest line has started the whole program.
    ranks = tuple(rank for rank in view.awaited if is_in(DEBUGGERS, below_user(view.facts[rank].stack)))
    if ranks:
        # What has to go is the call; pdb pauses at the line after it.
        call, paused = view.facts[ranks[0]].breakpoint_at, deepest_user_frame(view.facts[ranks[0]].stack)
        is_elsewhere = call is not None and paused is not None and call.line != paused.line
        yield straggler_finding(
            view,
            ranks,
            "is|are paused in a debugger",
            f", called in line {call.line}" if call is not None and is_elsewhere else "",
            confidence=Confidence.CERTAIN,
            location=location_of(call) or None,
        )
