"""The cause at-breakpoint: a rank stands in a debugger, and nobody is there to let it go on."""

import itertools
from collections.abc import Iterable

from lightning_ncclsafe.code.libraries import DEBUGGERS
from lightning_ncclsafe.facts import Frame, JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.rules.kit.sentences import how_we_know, location, severity, standing, while_others_wait
from lightning_ncclsafe.rules.kit.timeline import timeline
from lightning_ncclsafe.rules.kit.wording import capitalised, ranks_words, verb


def at_breakpoint(job: JobFacts) -> Iterable[Finding]:
    """A rank stands in a debugger while the others wait for it.

    Symptom:
        A prompt, "(Pdb)" or "ipdb>", among the output of all ranks; with a launcher that gives ranks no terminal, not
        even that.

    Cause:
        A breakpoint() that was left in the code, or a debugger that is attached to one rank.

    Remedy:
        Remove it; or debug with devices=1, or with on_timeout="report" and a longer timeout.

    Cannot see:
        Debuggers that stop the process from outside (gdb): that is stopped-process.
    """
    view = timeline(job)
    ranks = tuple(rank for rank in view.working(view.stragglers) if _stands_in_debugger(view.facts[rank].stack))
    if not ranks or not view.waiting:
        return
    text = f"{ranks_words(ranks)} {verb(ranks, 'stands', 'stand')} in a debugger, {standing(view, ranks[0])}"
    yield Finding(
        rule="at-breakpoint",
        severity=severity(job),
        confidence=Confidence.CERTAIN,
        summary=capitalised(f"{text}{while_others_wait(view, ranks)}."),
        ranks=ranks,
        location=location(view, ranks),
        evidence=how_we_know(view, ranks),
        remedy='Remove the breakpoint; or debug with devices=1, or with on_timeout="report" and a longer timeout.',
    )


def _stands_in_debugger(stack: tuple[Frame, ...]) -> bool:
    """Below the user's deepest line: above it are those with which the whole program was started."""
    inner = itertools.takewhile(lambda frame: not frame.user, reversed(stack))
    return any(map(_is_debugger, inner))


def _is_debugger(frame: Frame) -> bool:
    return not frame.user and DEBUGGERS.has(frame.file, frame.function)
