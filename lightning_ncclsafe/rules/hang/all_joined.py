"""The cause all-joined: every rank has called the same collective and it does not complete."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.code.libraries import BACKWARD, C10D, GROUP_CREATION, SEND_OR_RECV
from lightning_ncclsafe.facts import Collective
from lightning_ncclsafe.rules.hang.diverged_collectives import diverged_collectives
from lightning_ncclsafe.rules.kit import (
    ROOTED,
    Confidence,
    Evidence,
    Finding,
    GroupView,
    Plan,
    Timeline,
    batch_words,
    collective_words,
    different_roots,
    different_waits,
    duration_words,
    finding,
    gathering_alone,
    group_words,
    hang_rule,
    has_just_called,
    is_in,
    purpose_words,
    ranks_words,
    wait_words,
    where_evidence,
)

_NOT_OF_ALL = SEND_OR_RECV | GROUP_CREATION
_REMEDY_NCCL = (
    "The code agrees, so look at devices and links: nvidia-smi and the kernel's log (Xid errors) on every host, then a "
    "run with NCCL_DEBUG=INFO to see the interfaces and transports chosen, one with NCCL_P2P_DISABLE=1 (if it passes, "
    "peer-to-peer access is broken), and NCCL_SOCKET_IFNAME set to the right interface."
)
_REMEDY_OTHER = (
    "The code agrees, so look at the network: that all hosts reach each other on the interface in GLOO_SOCKET_IFNAME, "
    "and that no firewall drops long-lived connections."
)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart``; ``unknown`` if a GPU has not started the collective: a kernel of the code may keep it busy."""
    calls = [call for group in view.groups for call in view.joined(group).values()]
    may_be_busy = any(call.backend.startswith("nccl") and not (call.started or call.completed) for call in calls)
    return Plan.UNKNOWN if may_be_busy else Plan.RESTART


@hang_rule(after="p2p-blocked", unless=(gathering_alone, diverged_collectives, different_roots), plan=_plan)
def all_joined(view: Timeline) -> Iterator[Finding]:
    """All ranks called the same collective, and it completes on none of them.

    Symptom:
        "Watchdog caught collective operation timeout" on every rank, with the same SeqNum, OpType and NumelIn
        everywhere.

    Cause:
        A faulty link, NIC, GPU or driver; the wrong network interface; broken peer-to-peer access.

    Remedy:
        Check devices and links; run with NCCL_DEBUG=INFO and once with NCCL_P2P_DISABLE=1; check the interface.

    Cannot see:
        Which link or device it is.
    """
    if not view.waiting or view.raised or view.stragglers:
        return
    for group in view.groups:
        calls = view.joined(group)
        if len(group.members) > 1 and calls and not has_just_called(view, calls):
            yield _finding(view, group, calls)
    if _wait_in_one_call(view):
        yield _inspected_finding(view)


def _wait_in_one_call(view: Timeline) -> bool:
    """Whether all inspected ranks wait at the same place of the same batch, so that none is behind."""
    every = [*view.facts.values()]
    inspections = [facts.inspection for facts in every]
    all_wait = len(every) == view.job.world_size > 1 and len(view.waiting) == len(every) and not view.groups
    if not all_wait or any(one is None or one.moved is not False for one in inspections):
        return False
    if different_waits(view) is not None:
        return False
    places = {(facts.progress.phase, facts.progress.epoch, facts.progress.batch_idx) for facts in every}
    groups = {one.group.name for one in inspections if one is not None and one.group is not None}
    # A send may wait for a receive elsewhere, and groups are created one after the other.
    are_alike = all(is_in(BACKWARD | C10D, one.stack) and not is_in(_NOT_OF_ALL, one.stack) for one in every)
    return len(places) == 1 and len(groups) <= 1 and are_alike


def _inspected_finding(view: Timeline) -> Finding:
    ranks, facts = tuple(sorted(view.facts)), next(iter(view.facts.values()))
    text = (
        f"All {len(ranks)} ranks wait in {wait_words(view, ranks[0])}, {batch_words(facts.progress)}, for "
        f"{duration_words(facts.progress.idle_s)}, and none works: if all have called it equally often, a link or "
        "a device is at fault, not the training code."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.POSSIBLE,
        evidence=where_evidence(view, ranks),
        remedy=f"{_REMEDY_OTHER} With NCCL: {_REMEDY_NCCL[:1].lower()}{_REMEDY_NCCL[1:]}",
    )


def _finding(view: Timeline, group: GroupView, calls: dict[int, Collective]) -> Finding:
    ranks = tuple(sorted(calls))
    first = calls[next(iter(group.oldest))]
    facts = view.facts[ranks[0]]
    what = collective_words(first, purpose_words(first, facts))
    # The recorder does not have their source or destination.
    may_differ = first.op in ROOTED and any(view.facts[rank].steps.root < 0 for rank in ranks)
    text = (
        f"All {len(ranks)} ranks of {group_words(group.name)} have called {what} and it does not complete on "
        f"{ranks_words(group.oldest)}, {batch_words(facts.progress)}, for {duration_words(facts.progress.idle_s)}: "
        "a link or a device is at fault, not the training code"
        f"{', unless ranks have named different sources or destinations' if may_differ else ''}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.POSSIBLE if may_differ else Confidence.LIKELY,
        evidence=_evidence(group, calls),
        remedy=_REMEDY_NCCL if first.backend.startswith("nccl") else _REMEDY_OTHER,
    )


def _evidence(group: GroupView, calls: dict[int, Collective]) -> Iterable[Evidence]:
    first = calls[next(iter(group.oldest))]
    yield Evidence(
        source="flight recorder", text=f"Called identically on {ranks_words(calls)}: {collective_words(first)}."
    )
    if first.backend.startswith("nccl"):
        waiting = tuple(rank for rank, call in sorted(calls.items()) if not call.started and not call.completed)
        text = f"Not started on the device of {ranks_words(waiting)}." if waiting else "Started on every device."
        yield Evidence(source="flight recorder", text=text)
