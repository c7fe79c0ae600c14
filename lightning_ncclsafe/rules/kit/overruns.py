"""Processes that gloo has ended, as it does with one to which more is sent than it has room for."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import (
    ALL_OF_LIGHTNING,
    BACKWARD,
    C10D,
    DDP,
    DDP_BUFFERS,
    EARLY_STOPPING,
    FSDP,
    LENGTH_CHECK,
    LOGGED_VALUES,
    MODEL_CHECKPOINT,
    SHARDING,
    SIGTERM_BROADCAST,
)
from lightning_ncclsafe.facts import Collective, Frame, RankFacts
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.activity import condition_around, deepest_user_frame, is_in, trainer_start
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import numel

# Frames of torch's between the caller's line and the collective.
_NEAR = 8
_LISTED = 4
# Calls that a rank may have made by the time at which gloo ends another.
_RECENT = 8
_MOST_OF_SEGMENT = 1 << 20
# As torch's recorder names types.
_ITEM_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1} | {
    "Byte": 1,
    "Bool": 1,
}
# In whose C++ code, too, collectives are waited for.
_COLLECTIVES = C10D | BACKWARD | DDP | SHARDING
# What calls collectives on its own account.
_CALLERS = (MODEL_CHECKPOINT, EARLY_STOPPING, LOGGED_VALUES, LENGTH_CHECK, SIGTERM_BROADCAST, DDP_BUFFERS, BACKWARD)
# What gloo says then: the bytes that have come, and those that there is room for.
_OVERRUN = re.compile(r"op\.preamble\.length <= op\.nbytes\D+(\d+) vs (\d+)")


@once
def aborted(view: Timeline) -> tuple[int, ...]:
    """Ranks that gloo has ended, as they say, or may have, while what the others were in sends something of the user's.

    Of several that are gone and write to one file, each may be the one that has said it.
    """
    gone = tuple(rank for rank in view.silent if is_gone(view, rank) and _has_aborted(view, rank))
    if any(overrun_of(view, rank) for rank in gone):
        return gone
    # The others may have gone on by the time that it is ended; what it was in itself is known by what it wrote.
    known = tuple(rank for rank in gone if view.witnesses[rank].stack)
    in_collective = tuple(rank for rank in known if _ended_in_collective(view, rank))
    is_sent = any(map(last_of_gloo, view.facts.values()))
    may_be = tuple(rank for rank in gone if rank in in_collective or (is_sent and rank not in known))
    return () if any(facts.host_facts.oom_kills for facts in view.facts.values()) else may_be


def overrun_of(view: Timeline, rank: int) -> tuple[int, int] | None:
    """Bytes that were sent to a rank at once, and those that it had room for, by gloo's last word on its stderr."""
    found = _OVERRUN.search(view.witnesses[rank].said) if rank in view.witnesses else None
    return (int(found[1]), int(found[2])) if found else None


def _has_aborted(view: Timeline, rank: int) -> bool:
    """As far as is known."""
    process = view.witnesses[rank]
    return process.exit_code is None and process.raised is None and signal_of(view, rank) in ("", "SIGABRT")


def _ended_in_collective(view: Timeline, rank: int) -> bool:
    """Whether one of its threads was in a collective, below the last line of the user's own, on gloo."""
    process = view.witnesses[rank]
    called = _is_in_collective(process.stack) or _is_in_collective(process.thread_stack)
    return called and any(call.backend == "gloo" for facts in view.facts.values() for call in facts.collectives[-1:])


def _is_in_collective(stack: tuple[Frame, ...]) -> bool:
    last = max((depth for depth, frame in enumerate(stack) if frame.user), default=-1)
    return is_in(_COLLECTIVES, stack[last + 1 :][-_NEAR:])


@once
def broken_off(view: Timeline) -> tuple[int, ...]:
    """Ranks that gloo has ended in another call than the others were in, by the lines that both were at.

    Others may have gone on from the same line of the user's to what Lightning calls itself, unless it is just this that
    was sent; nobody comes from what Lightning calls itself to a line in which others still wait.
    """
    ended = aborted(view)
    if not view.facts or not all(map(view.waits, view.facts)):
        return ()
    if not ended or not all(view.witnesses[rank].stack for rank in ended):
        return ()
    own = {_site(view.witnesses[rank].stack) for rank in ended}
    others = {_site(_stack(facts)) for facts in view.facts.values()}
    may_have_gone_on = any(site.is_users for site in own) and not all(site.is_users for site in others)
    told = next((sizes for rank in ended if (sizes := overrun_of(view, rank))), None)
    if told is not None and any(told[0] in _sent_at_once(facts, view.job.world_size) for facts in view.facts.values()):
        may_have_gone_on = False
    if told is not None and _sent_from_there(view, ended, told[0]):
        return ()
    return ended if own.isdisjoint(others) and not may_have_gone_on else ()


def _sent_from_there(view: Timeline, ended: tuple[int, ...], size: int) -> bool:
    """Whether others have sent as many bytes at once in a recent call from where a rank has ended: in the same call.

    Not one of which only a helper of Lightning's is known, by which it reduces whatever there is.
    """
    places = {(frame.file, frame.function) for rank in ended for frame in view.witnesses[rank].stack}
    recent = (view.with_stack(call) for facts in view.facts.values() for call in facts.collectives[-_RECENT:])
    return any(
        size in bytes_at_once(call, view.job.world_size)
        and any(frame.user or not is_in(ALL_OF_LIGHTNING, (frame,)) for frame in call.stack)
        and all((frame.file, frame.function) in places for frame in call.stack)
        for call in recent
    )


class CallBySize(NamedTuple):
    """What a rank that gloo has ended was in, as the room shows that it had, where it is not what it was sent.

    Attributes:
        call: An earlier call from that line, with as much room.
        frame: The line.
        sent: What others called last, of which as much is sent at once as came.
        senders: These, ascending.
    """

    call: Collective
    frame: Frame
    sent: Collective
    senders: tuple[int, ...]


@once
def call_by_size(view: Timeline) -> CallBySize | None:
    """The only line of the user's from which a call has as much room as an ended rank had, and not what came.

    Calls from one line may have different sizes: that it is another one is seen only if the line that has sent what
    came is known as well.
    """
    ended, world_size = aborted(view), view.job.world_size
    told = next((sizes for rank in ended if (sizes := overrun_of(view, rank))), None)
    last = {rank: view.with_stack(facts.collectives[-1]) for rank, facts in view.facts.items() if facts.collectives}
    if told is None or len(ended) > 1:
        return None
    came, room = told
    sent = {rank: call for rank, call in sorted(last.items()) if call.site and came in bytes_at_once(call, world_size)}
    sites = {call.site for call in sent.values()}
    recent = (call for facts in view.facts.values() for call in facts.collectives[-_RECENT:] if call.site)
    fitting = {call.site: view.with_stack(call) for call in recent if room in bytes_at_once(call, world_size)}
    if len(sites) != 1 or len(fitting) != 1 or not sites.isdisjoint(fitting):
        return None
    call = next(iter(fitting.values()))
    stack = view.witnesses[ended[0]].stack
    frame, own = deepest_user_frame(call.stack), deepest_user_frame(stack[trainer_start(stack) :])
    # It may have gone on to what Lightning calls while the call is under way.
    is_there = own is None or frame is None or (own.file, own.line) == (frame.file, frame.line)
    return CallBySize(call, frame, next(iter(sent.values())), tuple(sent)) if frame and is_there else None


def few_by_site(view: Timeline, ranks: Iterable[int]) -> tuple[int, ...]:
    """Those of ranks that were not in the call that most of them were in, by their lines; none where none has most."""
    by_site: dict[_Site, list[int]] = {}
    for rank in ranks:
        stack = _stack(view.facts[rank]) if rank in view.facts else view.witnesses[rank].stack
        if stack:
            by_site.setdefault(_site(stack), []).append(rank)
    most, *others = sorted(by_site.values(), key=len, reverse=True) or [[]]
    is_most = bool(others) and len(others[0]) < len(most)
    return tuple(sorted(rank for few in others for rank in few)) if is_most else ()


def _sent_at_once(facts: RankFacts, world_size: int) -> tuple[int, ...]:
    """What `bytes_at_once` says of the last collective of a rank."""
    last = next(reversed(facts.collectives), None)
    return () if last is None else bytes_at_once(last, world_size)


def bytes_at_once(call: Collective, world_size: int) -> tuple[int, ...]:
    """Bytes that gloo sends at once for a collective: all of a tensor, or a segment of its ring."""
    if call.backend != "gloo":
        return ()
    size = size_bytes(call)
    item = size // max(numel(call), 1)
    segment = min(-(-size // (2 * world_size)), _MOST_OF_SEGMENT)
    return size, -(-segment // max(item, 1)) * item


def size_bytes(call: Collective) -> int:
    """Bytes that a rank gives to a collective."""
    return numel(call) * max((_ITEM_BYTES.get(kind, 4) for kind in call.dtypes), default=4)


class _Site(NamedTuple):
    """From where a rank has called a collective: a function of the user's own, or what of Lightning's and DDP's.

    Two lines of one function may be branches that call the same, unless one is under a condition on the rank.
    """

    is_users: bool
    place: tuple[object, ...]


def _site(stack: tuple[Frame, ...]) -> _Site:
    inside = stack[trainer_start(stack) :]
    frame = deepest_user_frame(inside)
    if frame is not None:
        return _Site(True, (frame.file, frame.function, condition_around(stack)[0]))
    return _Site(False, tuple(is_in(code, inside) for code in _CALLERS))


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
    return is_in(FSDP, _near(facts))


def _near(facts: RankFacts) -> tuple[Frame, ...]:
    return _stack(facts)[-_NEAR:]


def _stack(facts: RankFacts) -> tuple[Frame, ...]:
    return facts.exception.stack if facts.exception else facts.stack


def as_gloo_does(view: Timeline, ended: Iterable[int]) -> str:
    """``"as gloo ended it: it was sent 9,612 bytes at once and had room for 8"``; sizes if they are known."""
    told = next((sizes for rank in ended if (sizes := overrun_of(view, rank))), None)
    if told is None:
        return "as gloo ends a process that is sent more than it has room for"
    return f"as gloo ended it: it was sent {told[0]:,} bytes at once and had room for {told[1]:,}"


def gone_evidence(view: Timeline, ended: Iterable[int]) -> Iterator[Evidence]:
    """How the processes of these ranks have ended, and what was said last on their stderr."""
    for rank in [*ended][:_LISTED]:
        process, signal = view.witnesses[rank], signal_of(view, rank)
        text = f"Process {process.pid} is {process.state}{f', by {signal}' if signal else ''}."
        yield Evidence(source="process", rank=rank, text=text)
        if process.said:
            yield Evidence(source="stderr", rank=rank, text=f"Last output on stderr: {process.said}")
