"""Processes that gloo has ended, as it does with one to which more is sent than it has room for."""

from lightning_ncclsafe.facts import Collective, Frame, RankFacts
from lightning_ncclsafe.known_code import C10D, FSDP
from lightning_ncclsafe.rules.timeline import Timeline
from lightning_ncclsafe.rules.wording import numel

# Frames of torch's between the caller's line and the collective.
_NEAR = 8


def aborted(view: Timeline) -> tuple[int, ...]:
    """Ranks that may have been ended by gloo, while what the others were in sends something of the user's own."""
    gone = tuple(rank for rank in view.silent if is_gone(view, rank) and _has_aborted(view, rank))
    # The others may have gone on by the time that it is ended; what it was in itself is known by what it wrote.
    sent = any(map(last_of_gloo, view.facts.values())) or any(_ended_in_collective(view, rank) for rank in gone)
    return gone if sent and not any(facts.host_facts.oom_kills for facts in view.facts.values()) else ()


def _has_aborted(view: Timeline, rank: int) -> bool:
    """As far as is known."""
    return view.witnesses[rank].exit_code is None and signal_of(view, rank) in ("", "SIGABRT")


def _ended_in_collective(view: Timeline, rank: int) -> bool:
    process = view.witnesses[rank]
    near = process.stack[-_NEAR:]
    called = any(C10D.has(frame.file, frame.function) for frame in near)
    on_gloo = any(call.backend == "gloo" for facts in view.facts.values() for call in facts.collectives[-1:])
    return process.ended_by == "SIGABRT" and on_gloo and called and any(frame.user for frame in near)


def is_gone(view: Timeline, rank: int) -> bool:
    """Whether a silent rank's process has been seen to be gone."""
    return rank in view.witnesses and view.witnesses[rank].state in ("gone", "zombie")


def signal_of(view: Timeline, rank: int) -> str:
    """The signal that has ended a rank's process, as it has written itself, or as its parent knows."""
    process = view.witnesses[rank]
    children = (child for facts in view.facts.values() for child in facts.machine.ended)
    return process.ended_by or next((child.signal for child in children if child.pid == process.pid), "")


def last_of_gloo(facts: RankFacts) -> Collective | None:
    """What a rank waited in, if that sends something and was called by the user's own code or by FSDP.

    DDP has compared the model before it sends any of it.
    """
    last = next(reversed(facts.collectives), None)
    if last is None or last.backend != "gloo" or not numel(last) or (last.completed and facts.exception is None):
        return None
    return last if is_of_fsdp(facts) or any(frame.user for frame in _near(facts)) else None


def is_of_fsdp(facts: RankFacts) -> bool:
    """Whether FSDP has called what a rank waits in, or waited in until the connection broke."""
    return any(FSDP.has(frame.file, frame.function) for frame in _near(facts))


def _near(facts: RankFacts) -> tuple[Frame, ...]:
    return (facts.exception.stack if facts.exception else facts.stack)[-_NEAR:]
