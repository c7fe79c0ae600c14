"""Processes that gloo has aborted: it aborts a process that receives more bytes than it has room for."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import (
    BACKWARD,
    C10D,
    DDP,
    DDP_BUFFERS,
    EARLY_STOPPING,
    FSDP,
    HELPERS,
    LENGTH_CHECK,
    LOGGED_VALUES,
    MODEL_CHECKPOINT,
    SHARDING,
    SIGTERM_BROADCAST,
)
from lightning_ncclsafe.facts import Collective, Frame, RankFacts, element_bytes
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.facts.wording import numel, ranks_words, verb
from lightning_ncclsafe.rules.kit.frames import below_user, deepest_user_frame, inside_trainer, is_in
from lightning_ncclsafe.rules.kit.landmarks import condition_around
from lightning_ncclsafe.rules.kit.parts import minority, ranks_by
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.silent_ranks import is_gone, signal_of
from lightning_ncclsafe.rules.kit.timeline import Timeline, stack_of

# torch's frames between the caller's line and the collective.
_NEAR = 8
_LISTED = 4
# Calls that a rank may have made before gloo aborts another.
_RECENT = 8
_MOST_OF_SEGMENT = 1 << 20
# This many calls from one line show what is usual there.
_OFTEN = 2
# Of two ranks, none is in the majority.
_PAIR = 2
# Code whose C++ part also waits for collectives.
_COLLECTIVES = C10D | BACKWARD | DDP | SHARDING
# Code of Lightning and DDP that calls collectives by itself.
_CALLING_CODE = (
    MODEL_CHECKPOINT,
    EARLY_STOPPING,
    LOGGED_VALUES,
    LENGTH_CHECK,
    SIGTERM_BROADCAST,
    DDP_BUFFERS,
    BACKWARD,
)
# gloo's message: the bytes received, and the bytes that there is room for.
_OVERRUN = re.compile(r"op\.preamble\.length <= op\.nbytes\D+(\d+) vs (\d+)")


@once
def aborted_by_gloo(view: Timeline) -> tuple[int, ...]:
    """Ranks that gloo has aborted, by their stderr, or may have aborted, as the others were in a call that sends data.

    If several that are gone write to one file, each of them may be the one whose message it is.
    """
    gone = tuple(rank for rank in view.silent if is_gone(view, rank) and _may_have_aborted(view, rank))
    if any(overrun_bytes(view, rank) for rank in gone):
        return gone
    # The others may have moved on before it is aborted; its own last traceback shows what it was in.
    known = tuple(rank for rank in gone if view.witnesses[rank].stack)
    in_collective = tuple(rank for rank in known if _ended_in_collective(view, rank))
    is_sent = any(map(last_gloo_call, view.facts.values()))
    may_be = tuple(rank for rank in gone if rank in in_collective or (is_sent and rank not in known))
    return () if any(facts.host_facts.oom_kills for facts in view.facts.values()) else may_be


def overrun_bytes(view: Timeline, rank: int) -> tuple[int, int] | None:
    """Bytes that a rank received at once, and bytes that it had room for, by gloo's message on its stderr."""
    match = _OVERRUN.search(view.witnesses[rank].said) if rank in view.witnesses else None
    return (int(match[1]), int(match[2])) if match else None


def _may_have_aborted(view: Timeline, rank: int) -> bool:
    process, signal = view.witnesses[rank], signal_of(view, rank)
    # While one thread aborts, another may crash in what the first has begun to free.
    may_be_abort = signal in ("", "SIGABRT") or (signal == "SIGSEGV" and overrun_bytes(view, rank) is not None)
    # A known line shows better what it was in than a file to which others may write, too.
    is_other = bool(process.said) and overrun_bytes(view, rank) is None and not process.stack
    return process.exit_code is None and process.raised is None and may_be_abort and not is_other


def _ended_in_collective(view: Timeline, rank: int) -> bool:
    """Whether one of its threads was in a collective on gloo, below the user's deepest line."""
    process = view.witnesses[rank]
    called = _is_in_collective(process.stack) or _is_in_collective(process.thread_stack)
    return called and is_on_gloo(view)


def is_on_gloo(view: Timeline) -> bool:
    """Whether the last call of a rank is on gloo."""
    return any(call.backend == "gloo" for facts in view.facts.values() for call in facts.collectives[-1:])


def _is_in_collective(stack: tuple[Frame, ...]) -> bool:
    return is_in(_COLLECTIVES, below_user(stack)[-_NEAR:])


@once
def aborted_elsewhere(view: Timeline) -> tuple[int, ...]:
    """Ranks that gloo has aborted in a different call from the one that the others were in, by the lines of both.

    The others may have moved on from the same user line to a call of Lightning's, unless the size received is of that
    call. No rank moves on from a call of Lightning's to a user line in which others still wait.
    """
    ended = aborted_by_gloo(view)
    if not view.facts or not all(map(view.waits, view.facts)):
        return ()
    if not ended or not all(view.witnesses[rank].stack for rank in ended):
        return ()
    own = {_site(view.witnesses[rank].stack) for rank in ended}
    others = {_site(stack_of(view, rank)) for rank in view.facts}
    may_have_moved_on = any(site.is_users for site in own) and not all(site.is_users for site in others)
    sizes = _overrun_of_any(view, ended)
    received = sizes[0] if sizes is not None else None
    last = (call for facts in view.facts.values() for call in facts.collectives[-1:])
    if any(received in at_once(view, call) for call in last):
        may_have_moved_on = False
    if received is not None and _sent_from_there(view, ended, received):
        return ()
    return ended if own.isdisjoint(others) and not may_have_moved_on else ()


def _sent_from_there(view: Timeline, ended: tuple[int, ...], size: int) -> bool:
    """Whether others have sent this many bytes in a recent call from a function that an aborted rank was in.

    Calls of which only a generic helper of Lightning's or PyTorch's is known do not count.
    """
    stacks = [view.witnesses[rank].stack for rank in ended]
    below = {(frame.file, frame.function) for stack in stacks for frame in below_user(stack)}
    deepest = {(frame.file, frame.function) for stack in stacks if (frame := deepest_user_frame(stack)) is not None}
    recent = (view.with_stack(call) for facts in view.facts.values() for call in facts.collectives[-_RECENT:])
    for call in recent:
        if size not in at_once(view, call):
            continue
        frame = deepest_user_frame(call.stack)
        if frame is not None and (frame.file, frame.function) in deepest:
            return True
        callers = {(one.file, one.function) for one in call.stack if not is_in(HELPERS, (one,))}
        if frame is None and callers and callers <= below:
            return True
    return False


class CallBySize(NamedTuple):
    """The call that an aborted rank was in, as its buffer's size shows, if it differs from what the rank received.

    Attributes:
        call: An earlier call from that line, with a buffer of the same size.
        frame: The line.
        sent: The last call of the others, which sends as many bytes at once as were received.
        senders: The ranks that made it, ascending.
    """

    call: Collective
    frame: Frame
    sent: Collective
    senders: tuple[int, ...]


@once
def call_by_size(view: Timeline) -> CallBySize | None:
    """The only user line with a call of as much room as an aborted rank had, if the sending line is another one.

    Calls from one line may have different sizes, so both lines have to be known.
    """
    ended = aborted_by_gloo(view)
    sizes = _overrun_of_any(view, ended)
    last = {rank: view.with_stack(facts.collectives[-1]) for rank, facts in view.facts.items() if facts.collectives}
    if sizes is None or len(ended) > 1:
        return None
    received, room = sizes
    sent = {rank: call for rank, call in sorted(last.items()) if call.site and received in at_once(view, call)}
    sites = {call.site for call in sent.values()}
    recent = (call for facts in view.facts.values() for call in facts.collectives[-_RECENT:] if call.site)
    fitting = {call.site: view.with_stack(call) for call in recent if room in at_once(view, call)}
    own = deepest_user_frame(inside_trainer(view.witnesses[ended[0]].stack))
    # It may have moved on to a call of Lightning's while the call is in flight.
    there = [call for call in fitting.values() if own is None or _is_at(deepest_user_frame(call.stack), own)]
    if len(sites) != 1 or len(there) != 1 or not sites.isdisjoint(fitting):
        return None
    frame = deepest_user_frame(there[0].stack)
    return CallBySize(there[0], frame, next(iter(sent.values())), tuple(sent)) if frame is not None else None


def _is_at(frame: Frame | None, own: Frame) -> bool:
    return frame is None or (frame.file, frame.line) == (own.file, own.line)


class UnusualCall(NamedTuple):
    """A call that a rank has made with another size or type than all its earlier ones from the same line.

    Attributes:
        call: The call.
        before: The last of the earlier ones.
    """

    call: Collective
    before: Collective


@once
def unusual_calls(view: Timeline) -> dict[int, UnusualCall]:
    """By rank, the call that sent an aborted rank more than it had room for, although earlier calls had fitted."""
    sizes = _overrun_of_any(view, aborted_by_gloo(view))
    if sizes is None:
        return {}
    received, room = sizes
    found: dict[int, UnusualCall] = {}
    for rank, facts in sorted(view.facts.items()):
        sent = (call for call in reversed(facts.collectives) if call.site and received in at_once(view, call))
        call = next(sent, None)
        earlier = [one for one in facts.collectives if call and one.site == call.site and one.seq < call.seq]
        if call is not None and len(earlier) >= _OFTEN and all(room in at_once(view, one) for one in earlier):
            found[rank] = UnusualCall(call, earlier[-1])
    # If most ranks call it otherwise now, the others have missed a change.
    members = len(view.facts) + len(aborted_by_gloo(view))
    return found if 2 * len(found) < members or members == _PAIR else {}


def at_once(view: Timeline, call: Collective) -> tuple[int, ...]:
    """See :func:`bytes_at_once`."""
    return bytes_at_once(call, view.job.world_size)


def minority_by_site(view: Timeline, ranks: Iterable[int]) -> tuple[int, ...]:
    """The ranks that were not in the call that most of these were in, by their lines; empty if there is no majority."""
    sites = {rank: _site(stack) for rank in ranks if (stack := stack_of(view, rank))}
    return minority(ranks_by(sites).values())


def bytes_at_once(call: Collective, world_size: int) -> tuple[int, ...]:
    """The numbers of bytes that gloo may send at once for a collective: a whole tensor, or a segment of its ring.

    A broadcast is a tree, and has no segments (gloo/broadcast.cc); an all-gather sends each rank's input in two halves
    (gloo/allgather.cc).
    """
    if call.backend != "gloo":
        return ()
    size = size_bytes(call)
    if call.op == "broadcast":
        return (size,)
    if call.op == "all_gather":
        return size // 2, size - size // 2
    item = size // max(numel(call), 1)
    segment = min(-(-size // (2 * world_size)), _MOST_OF_SEGMENT)
    return size, -(-segment // max(item, 1)) * item


def size_bytes(call: Collective) -> int:
    """The bytes of a rank's input to a collective."""
    return numel(call) * max((element_bytes(dtype) for dtype in call.dtypes), default=4)


class _Site(NamedTuple):
    """Where a rank has called a collective: a function of the user's code, or a part of Lightning or DDP.

    Two lines of one function may be branches with the same call, unless one is under a condition on the rank.
    """

    is_users: bool
    place: tuple[object, ...]


def _site(stack: tuple[Frame, ...]) -> _Site:
    inside = inside_trainer(stack)
    frame = deepest_user_frame(inside)
    if frame is not None:
        return _Site(True, (frame.file, frame.function, condition_around(stack)[0]))
    return _Site(False, tuple(is_in(code, inside) for code in _CALLING_CODE))


def last_gloo_call(facts: RankFacts) -> Collective | None:
    """The collective that a rank waited in, if it sends data and was called by the user's code or by FSDP; else None.

    DDP compares the model between ranks before it sends any of it.
    """
    last = next(reversed(facts.collectives), None)
    if last is None or last.backend != "gloo" or not numel(last) or (last.completed and facts.exception is None):
        return None
    return last if is_of_fsdp(facts) or any(frame.user for frame in _near(facts)) else None


def is_of_fsdp(facts: RankFacts) -> bool:
    """Whether FSDP called the collective that a rank waits in, or waited in until the connection broke."""
    return is_in(FSDP, _near(facts))


def _near(facts: RankFacts) -> tuple[Frame, ...]:
    return facts.last_stack[-_NEAR:]


def aborted_words(view: Timeline, ended: Iterable[int]) -> str:
    """``"the process of rank 2 aborted itself (SIGABRT)"``, or ``"… has ended"`` if that is not how it ended."""
    ranks = tuple(ended)
    have_aborted = all(signal_of(view, rank) == "SIGABRT" for rank in ranks)
    one, many = ("aborted itself", "aborted themselves") if have_aborted else ("has ended", "have ended")
    process = verb(ranks, "the process", "the processes")
    return f"{process} of {ranks_words(ranks)} {verb(ranks, one, many)}{' (SIGABRT)' if have_aborted else ''}"


def gloo_abort_words(view: Timeline, ended: Iterable[int]) -> str:
    """``"as gloo ended it: it was sent 9,612 bytes at once and had room for 8"``, with the sizes if they are known."""
    sizes = _overrun_of_any(view, ended)
    if sizes is None:
        return "as gloo ends a process that is sent more than it has room for"
    return f"as gloo ended it: it was sent {sizes[0]:,} bytes at once and had room for {sizes[1]:,}"


def _overrun_of_any(view: Timeline, ended: Iterable[int]) -> tuple[int, int] | None:
    return next((sizes for rank in ended if (sizes := overrun_bytes(view, rank))), None)


def ended_process_evidence(view: Timeline, ended: Iterable[int]) -> Iterator[Evidence]:
    """How the processes of these ranks have ended, and their last output on stderr."""
    for rank in [*ended][:_LISTED]:
        yield end_evidence(view, rank)
        if said := view.witnesses[rank].said:
            yield Evidence(source="stderr", rank=rank, text=f"Last output on stderr: {said}")


def end_evidence(view: Timeline, rank: int) -> Evidence:
    """How the process of a rank has ended, as another process sees it."""
    process, signal = view.witnesses[rank], signal_of(view, rank)
    text = f"Process {process.pid} is {process.state}{f', by {signal}' if signal else ''}."
    return Evidence(source="process", rank=rank, text=text)
