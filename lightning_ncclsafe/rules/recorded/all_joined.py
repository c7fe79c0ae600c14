"""The cause all-joined, as recorded: every rank has called the same collective, and it did not complete."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts import Collective, JobFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    GroupView,
    Timeline,
    duration_words,
    finding,
    group_words,
    has_one_size,
    outstanding_p2p,
    ranks_words,
    recorded_rule,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_dumps, record_of
from lightning_ncclsafe.rules.recorded.kit.divergences import conflict
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    consequence_evidence,
    counters_evidence,
    described,
    log_evidence,
)
from lightning_ncclsafe.rules.recorded.kit.roots import Root, RootCause, roots_of

_REMEDY = (
    "The code agrees, so look at devices and links: nvidia-smi and the kernel's log (Xid errors) on every host, error "
    "counters of the network cards, then a run with NCCL_DEBUG=INFO to see which interfaces and transports are chosen. "
    "One with NCCL_P2P_DISABLE=1 shows whether peer-to-peer access is broken; as a fix it only slows everything else "
    "down."
)
_REMEDY_LATE = (
    "Look at what this rank did before that call: work that it does alone, its data, a checkpoint, a compilation. "
    "Share that work, or make it short. If it was not that, look at devices and links (nvidia-smi, dmesg)."
)
_MOST_OF_IT = 0.8


class _Late(NamedTuple):
    """The ranks that came late, how long after the first the last of them did, and their timeout, seconds."""

    ranks: tuple[int, ...]
    by_s: float
    timeout_s: float


@recorded_rule(after="silent-rank")
def all_joined(view: Timeline) -> Iterator[Finding]:
    """All ranks called the same collective, by their dumps or logs, and it did not complete on all of them.

    Symptom:
        "Watchdog caught collective operation timeout" of every rank with the same SeqNum, OpType and NumelIn, and no
        rank is missing.

    Cause:
        A faulty link, network card, GPU or driver; the wrong interface; broken peer-to-peer access.

    Remedy:
        Check devices and links, NCCL_DEBUG=INFO, the interface.

    Cannot see:
        Which link or device it is. A rank that arrived just before the others gave up looks the same in a log; dumps
        have the times of all calls.
    """
    if failed(view) or conflict(view) is not None:
        return
    if has_dumps(view.job):
        yield from _of_dumps(view)
        return
    if view.stragglers:
        return
    for group in view.groups:
        calls = view.joined(group)
        is_excluded = 0 < len(view.job.silent) < len(view.waiting) and not _is_complete(view.job, group)
        if len(group.members) > 1 and calls and not is_excluded and not any(call.completed for call in calls.values()):
            yield _finding(view, group, calls)
            return


def _of_dumps(view: Timeline) -> Iterator[Finding]:
    for root in roots_of(view, RootCause.JOINED)[:1]:
        if not root.ops:
            yield _of_two(view, root)
            continue
        name, seq = root.ops[0]
        calls = {
            call_rank: call
            for call_rank in root.ranks
            for call in view.facts[call_rank].collectives
            if (call.group, call.seq, call.is_p2p) == (name, seq, False)
        }
        if len(view.groups_by_name[name].members) == len(calls) > 1:
            yield _finding(view, view.groups_by_name[name], calls, known=root.is_sure)


def _of_two(view: Timeline, root: Root) -> Finding:
    """A send and its receive."""
    calls = {rank: call for rank in root.ranks if (call := outstanding_p2p(view.facts[rank])) is not None}
    words = " and ".join(f"rank {rank} waits in {described(call)}" for rank, call in calls.items())
    seen = "both sides have started on their devices" if root.is_sure else "both sides have been called"
    return finding(
        view,
        root.ranks,
        f"{words}: {seen}, and if they had waited there for long, a link or one of the two devices is at fault.",
        confidence=Confidence.LIKELY if root.is_sure else Confidence.POSSIBLE,
        evidence=consequence_evidence([root]),
        remedy=_REMEDY,
    )


def _finding(view: Timeline, group: GroupView, calls: dict[int, Collective], *, known: bool = True) -> Finding:
    ranks = tuple(sorted(calls))
    late = _late(calls)
    is_sure = known and _is_complete(view.job, group) and late is None and has_one_size(calls[ranks[0]])
    fault = "a link or a device is at fault, not the training code"
    if not has_one_size(calls[ranks[0]]):
        fault = "a link or a device is at fault, or what ranks send each other differs in size, which is not recorded"
    if not any(record_of(facts).waited_ms for facts in view.facts.values()):
        fault = f"if they had waited there for long, {fault}"
    if not known or not _is_complete(view.job, group):
        fault = f"if there are no other ranks, {fault}"
    text = (
        f"All {len(ranks):,} ranks of {group_words(group.name)} have called {described(calls[ranks[0]])}, and it did "
        f"not complete: {fault}."
    )
    if late is not None:
        text = _late_words(group, calls, late)
    return finding(
        view,
        ranks if late is None else late.ranks,
        text,
        confidence=Confidence.LIKELY if is_sure else Confidence.POSSIBLE,
        evidence=_evidence(view, group, calls),
        remedy=_REMEDY if late is None else _REMEDY_LATE,
    )


def _late(calls: dict[int, Collective]) -> _Late | None:
    """Who called it last, if the others had then waited for most of their timeout, and so gave up soon after."""
    last = {rank: call.created_ns for rank, call in calls.items() if call.created_ns}
    timeout_s = max(call.timeout_ms for call in calls.values()) / 1e3
    if len(last) < len(calls) or not timeout_s:
        return None
    first_ns = min(last.values())
    ranks = tuple(rank for rank in sorted(last) if last[rank] - first_ns > _MOST_OF_IT * timeout_s * 1e9)
    return _Late(ranks, (max(last.values()) - first_ns) / 1e9, timeout_s) if ranks else None


def _late_words(group: GroupView, calls: dict[int, Collective], late: _Late) -> str:
    who = f"{ranks_words(late.ranks)} called {described(calls[late.ranks[0]])}"
    after = f"{duration_words(late.by_s)} after the first of the {len(calls):,} ranks of {group_words(group.name)}"
    came = f"{verb(late.ranks, 'it', 'they')} arrived, but probably too late for those that had waited"
    return f"{who} {after}, with a timeout of {duration_words(late.timeout_s)}: {came}."


def _is_complete(job: JobFacts, group: GroupView) -> bool:
    """Whether no member is missing: of a group without all ranks, logs show only the members that print something."""
    return job.is_sized and (has_dumps(job) or len(group.members) == job.world_size)


def _evidence(view: Timeline, group: GroupView, calls: dict[int, Collective]) -> Iterator[Evidence]:
    yield from counters_evidence(view, group)
    if has_dumps(view.job) and all(call.backend.startswith("nccl") for call in calls.values()):
        waiting = tuple(rank for rank, call in sorted(calls.items()) if not call.started)
        text = f"Not started on the device of {ranks_words(waiting)}." if waiting else "Started on every device."
        yield Evidence(source="flight recorder", text=text)
    last = {rank: call.created_ns for rank, call in calls.items() if call.created_ns}
    if len(last) == len(calls) and len(last) > 1:
        late = max(last, key=lambda rank: last[rank])
        span_s = (last[late] - min(last.values())) / 1e9
        yield Evidence(source="flight recorder", text=f"Rank {late} called it last, {span_s:,.1f} s after the first.")
    yield from log_evidence(view, sorted(calls)[:2])
