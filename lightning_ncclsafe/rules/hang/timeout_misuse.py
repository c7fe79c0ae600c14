"""The cause timeout-misuse: a wait ended by a shorter timeout than the one that was configured."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lightning_ncclsafe.facts import Limited, RankFacts, TimeoutLine
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Severity,
    Timeline,
    call_location,
    clause,
    duration_words,
    exception_evidence,
    finding,
    group_words,
    hang_rule,
    is_unenforced,
    message_of,
    own_timeouts,
    ranks_words,
    usual_timeouts_ms,
    waited_ms,
    while_others_wait,
)

# Messages of gloo, TCPStore, NCCL's watchdog, monitored_barrier and FileStore, in this order. TCPStore has two, as gloo
# waits there for the members of a new group, with the group's timeout.
_EXPIRED = re.compile(
    r"Timed out waiting (\d+)\s?ms|[Ww]ait timeout after (\d+)\s?ms, keys: \S{0,200}?//cpu//"
    r"|[Ww]ait timeout after (\d+)\s?ms|Timeout\(ms\)=(\d+)|monitoredBarrier in (\d+)\s?ms"
    r"|Timeout waiting for key: .{0,200}? after (\d+)\s?ms"
)
# A barrier that asks the store again and again and quotes the last answer, whose timeout nobody has set.
_ASKS_AGAIN = "in store based barrier"
# Variables that users set as timeouts and that nothing reads.
_UNREAD = ("NCCL_TIMEOUT", "NCCL_TIMEOUT_MS", "NCCL_COMM_TIMEOUT", "TORCH_NCCL_TIMEOUT", "GLOO_TIMEOUT")
# What the timeouts in these messages limit. A barrier without its own has that of its group.
_LIMITED = (
    (Limited.GROUP,),
    (Limited.GROUP,),
    (Limited.STORE,),
    (Limited.GROUP,),
    (Limited.GROUP, Limited.BARRIER),
    (Limited.STORE,),
)
# torch's own timeouts: a group without another one has such a timeout, and no line gives it that.
_DEFAULT_MS = (600_000, 1_800_000)
_REMEDY = (
    "Give this group the same timeout: torch.distributed.new_group(ranks, timeout=timedelta(...)), DeviceMesh and the "
    "store have their own, and timeout=timedelta(...) of the strategy applies to the groups that the strategy creates. "
    "Then find out why the wait was that long: a longer timeout alone makes it longer."
)
_REMEDY_UNREAD = " Nothing reads {name}: remove it, and pass timeout=timedelta(...) to the strategy."


class _Timeout(NamedTuple):
    """A timeout, milliseconds, and what it may have limited."""

    ms: int
    limited: tuple[Limited, ...]


@hang_rule(after="unused-parameters", reads_exceptions=True)
def timeout_misuse(view: Timeline) -> Iterator[Finding]:
    """A process group, the store or a barrier has a shorter timeout than the strategy, and gives up first.

    Symptom:
        The Timeout(ms) in the error message is not the one that was set; a run ends long before its timeout.

    Cause:
        A group created without timeout=, or with its own, or given one later; NCCL_TIMEOUT and the like, which nothing
        reads.

    Remedy:
        Use one timeout for all groups; then fix the cause of the wait itself.

    Cannot see:
        Why the wait took that long; another finding covers that.
    """
    if view.job.is_recorded or view.job.incident.timeout_s <= 0:
        return
    expired = {rank: found for rank, facts in sorted(view.facts.items()) if (found := _expired(facts)) is not None}
    usual = usual_timeouts_ms(view)
    limit_ms = view.job.incident.timeout_s * 1000
    short = {rank: found for rank, found in expired.items() if found.ms < limit_ms and found.ms not in usual}
    if short:
        yield _has_expired(view, short, Confidence.CERTAIN if usual else Confidence.LIKELY)
    elif pending := own_timeouts(view):
        yield _will_expire(view, pending)


def _expired(facts: RankFacts) -> _Timeout | None:
    """The timeout after which this rank's wait ended, by its exception; None if unknown."""
    message = message_of(facts)
    match = _EXPIRED.search(message) if _ASKS_AGAIN not in message else None
    numbers = match.groups() if match else ()
    found = (_Timeout(int(ms), limited) for ms, limited in zip(numbers, _LIMITED, strict=False) if ms)
    return next((timeout for timeout in found if timeout.ms), None)


def _set_at(view: Timeline, timeouts: Mapping[int, _Timeout]) -> TimeoutLine | None:
    """The only line of the user's that may have set one of these timeouts; None if unknown."""
    found: dict[str, TimeoutLine] = {}
    for rank, timeout in timeouts.items():
        for line in view.facts[rank].steps.timeouts_at:
            may_be_it = line.timeout_ms == timeout.ms or (not line.timeout_ms and timeout.ms not in _DEFAULT_MS)
            if may_be_it and not {*timeout.limited}.isdisjoint(line.limits):
                found[line.place] = line
    return found.popitem()[1] if len(found) == 1 else None


def _has_expired(view: Timeline, short: dict[int, _Timeout], confidence: Confidence) -> Finding:
    ranks, first = tuple(short), next(iter(short.values()))
    text = (
        f"{ranks_words(ranks)} gave up waiting after {duration_words(first.ms / 1000)}, although the strategy's "
        f"timeout is {duration_words(view.job.incident.timeout_s)}: {_owner(view, ranks[0], first)} has its own timeout"
        f"{while_others_wait(view, ranks)}."
    )
    return _finding(view, short, text, confidence, Severity.ERROR)


def _owner(view: Timeline, rank: int, timeout: _Timeout) -> str:
    """The store, or the group with this timeout among the rank's last collectives, in words."""
    if timeout.limited == (Limited.STORE,):
        return "the store"
    facts = view.facts[rank]
    calls = reversed(facts.collectives)
    name = next((call.group for call in calls if call.timeout_ms == timeout.ms), None)
    if name is None:
        return "what it waited in"
    described = next((group.description for group in facts.groups if group.name == name), "")
    return group_words(name, described)


def _will_expire(view: Timeline, pending: dict[int, tuple[str, int]]) -> Finding:
    ranks = tuple(sorted(pending))
    name, timeout_ms = pending[ranks[0]]
    has = "has a timeout of" if is_unenforced(view, ranks[0]) else "gives up after"
    text = (
        f"{group_words(name)}, in which {clause(ranks, 'waits|wait')}, {has} "
        f"{duration_words(timeout_ms / 1000)}, although the strategy's timeout is "
        f"{duration_words(view.job.incident.timeout_s)}."
    )
    timeouts = {rank: _Timeout(timeout_ms, (Limited.GROUP,)) for rank, (_, timeout_ms) in pending.items()}
    is_over = any(ms <= waited_ms(view, rank) and not is_unenforced(view, rank) for rank, (_, ms) in pending.items())
    return _finding(view, timeouts, text, Confidence.LIKELY if is_over else Confidence.POSSIBLE, None)


def _finding(
    view: Timeline, timeouts: Mapping[int, _Timeout], text: str, confidence: Confidence, severity: Severity | None
) -> Finding:
    ranks, unread, set_at = tuple(sorted(timeouts)), _unread(view), _set_at(view, timeouts)
    # A timeout that is not written out may be another one.
    if set_at is not None and not set_at.timeout_ms and confidence is Confidence.CERTAIN:
        confidence = Confidence.LIKELY
    return finding(
        view,
        ranks,
        text,
        severity=severity,
        confidence=confidence,
        location=set_at.place if set_at is not None else call_location(view, ranks),
        evidence=_evidence(view, ranks, unread, set_at),
        remedy=_REMEDY + (_REMEDY_UNREAD.format(name=unread.partition("=")[0]) if unread else ""),
    )


def _unread(view: Timeline) -> str:
    """``"NCCL_TIMEOUT=7200"`` if a rank has such a variable set; else empty."""
    set_here = (facts.machine.settings for facts in view.facts.values())
    unread = (f"{name}={settings[name]}" for settings in set_here for name in _UNREAD if name in settings)
    return next(unread, "")


def _evidence(view: Timeline, ranks: tuple[int, ...], unread: str, set_at: TimeoutLine | None) -> Iterator[Evidence]:
    applies = duration_words(view.job.incident.timeout_s)
    yield Evidence(source="settings", text=f"The timeout that applies is {applies}.")
    if set_at is not None and set_at.timeout_ms:
        text = f"{set_at.call} at {set_at.place} sets a timeout of {duration_words(set_at.timeout_ms / 1000)}."
        yield Evidence(source="source code", text=text)
    elif set_at is not None:
        text = f"Only {set_at.call} at {set_at.place} sets a timeout; how long it is is not written out there."
        yield Evidence(source="source code", text=text)
    for rank in ranks[:LISTED]:
        facts = view.facts[rank]
        yield from exception_evidence(facts)
        call = view.activities[rank].collective
        if call is not None and call.timeout_ms:
            text = f"Waits in {call.op} of {group_words(call.group)}, whose timeout is {call.timeout_ms / 1000:g} s."
            yield Evidence(source="flight recorder", rank=rank, text=text)
    if unread:
        yield Evidence(source="settings", text=f"{unread} is set, but neither NCCL nor torch reads it.")
