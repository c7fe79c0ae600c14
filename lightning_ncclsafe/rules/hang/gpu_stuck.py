"""The cause gpu-stuck: a rank has called the same collective as all others, and its GPU does not complete it."""

from collections.abc import Iterator
from enum import Enum

from lightning_ncclsafe.facts import RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Pending,
    Plan,
    Reason,
    Timeline,
    Wait,
    ailment,
    batch_words,
    collective_words,
    condition_around,
    copying_words,
    finding,
    gpu_evidence,
    hang_rule,
    how_we_know,
    looks_like_device_sync,
    pending_on_nccl,
    ranks_words,
    silent_finding,
    silent_processes,
    verb,
    wait_of,
    where_words,
    while_others_wait,
)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart-without-host`` if the driver hangs or reports a fault of the GPU; ``unknown`` otherwise."""
    copying = {rank for rank, _ in silent_processes(view, Reason.DEVICE)}
    answering = [view.facts[rank] for rank in finding.ranks if rank in view.facts]
    # Any other rank in this finding that does not answer waits in the driver.
    is_of_host = copying.isdisjoint(finding.ranks) and all(map(ailment, answering))
    return Plan.RESTART_WITHOUT_HOST if is_of_host else Plan.UNKNOWN


@hang_rule(
    after="diverged-collectives",
    remedy=(
        "Look at this GPU on its host: nvidia-smi -q, the kernel's log for Xid errors (dmesg | grep -i xid), its power "
        "and temperature. If the same GPU stands out in several jobs, take its host out (--exclude) and have it "
        "checked (dcgmi diag -r 3). If it moves to another GPU with the code, the cause is one of your kernels: find "
        "it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer."
    ),
    plan=_plan,
)
def gpu_stuck(view: Timeline) -> Iterator[Finding]:
    """One rank's GPU does not start, or does not complete, a collective that the other GPUs have started.

    Symptom:
        All ranks report the same collective in the timeout; on one of them it has not started, or has not completed,
        although it has on the others.

    Cause:
        A GPU or driver that hangs (Xid, ECC, fallen off the bus), or a kernel before the collective that never ends, or
        takes very long, on this rank's data.

    Remedy:
        Check that GPU and the kernel's log; take the host out.

    Cannot see:
        Which kernel runs on the GPU. Whether a collective has started is recorded only with TORCH_NCCL_ENABLE_TIMING or
        a newer NCCL back end; without it, all ranks look alike (all-joined).
    """
    yield from _in_driver(view)
    yield from _in_copy(view)
    if view.raised:
        return
    behind = tuple(_behind_on_device(view))
    yield from behind
    if not behind:
        yield from _in_device_sync(view)


def _in_driver(view: Timeline) -> Iterator[Finding]:
    for rank, process in silent_processes(view, Reason.BLOCKED):
        if wait_of(process.wait_channel) is Wait.DRIVER:
            yield silent_finding(
                view, rank, process, f"in uninterruptible sleep in {process.wait_channel}, in the GPU's driver"
            )


def _in_copy(view: Timeline) -> Iterator[Finding]:
    for rank, process in silent_processes(view, Reason.DEVICE):
        # Alone under a condition while others wait, it is rank-zero-only-work.
        if not (condition_around(process.stack)[0] and view.waiting):
            yield silent_finding(view, rank, process, copying_words(process), confidence=Confidence.POSSIBLE)


def _behind_on_device(view: Timeline) -> Iterator[Finding]:
    for pending in pending_on_nccl(view):
        ranks, odd = _odd_ones(view, pending)
        if ranks:
            yield _finding(view, pending, ranks, odd)


class _Odd(Enum):
    """What the collective does on the few GPUs that differ, and on the others."""

    NOT_STARTED = ("has not started", "has started")
    NOT_ENDED = ("has not ended", "has ended")
    UNWELL = ("does not get through", "waits")


def _odd_ones(view: Timeline, pending: Pending) -> tuple[tuple[int, ...], _Odd]:
    """The minority whose GPUs differ from the others, and how; empty if there is none."""
    few = len(pending.calls) // 2
    if pending.not_started and len(pending.not_started) <= few and not _waits_elsewhere(view, pending):
        return pending.not_started, _Odd.NOT_STARTED
    if pending.completed and not pending.is_rooted and len(pending.pending) <= few:
        return pending.pending, _Odd.NOT_ENDED
    unwell = tuple(rank for rank in pending.pending if ailment(view.facts[rank]))
    return unwell if len(unwell) <= few else (), _Odd.UNWELL


def _waits_elsewhere(view: Timeline, pending: Pending) -> bool:
    """Whether these devices may wait in an earlier call, in another group or with one peer."""
    for rank in pending.not_started:
        called_ns = pending.calls[rank].created_ns
        for entry in view.facts[rank].collectives:
            is_other = entry.is_p2p or entry.group != pending.group.name
            if is_other and not entry.completed and entry.created_ns <= called_ns:
                return True
    return False


def _finding(view: Timeline, pending: Pending, ranks: tuple[int, ...], odd: _Odd) -> Finding:
    others = tuple(rank for rank in pending.calls if rank not in ranks)
    here, there = odd.value
    what = collective_words(pending.first)
    text = (
        f"All ranks of the group have called {what}; on the {verb(ranks, 'GPU', 'GPUs')} of {ranks_words(ranks)} it "
        f"{here}, on {verb(others, 'that', 'those')} of {ranks_words(others)} it {there}, "
        f"{batch_words(view.facts[ranks[0]].progress)}."
    )
    return finding(view, ranks, text, evidence=_evidence(view, pending, ranks))


def _evidence(view: Timeline, pending: Pending, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    started = tuple(rank for rank in pending.pending if pending.calls[rank].started)
    states = (
        (pending.not_started, "Called and not started on the device"),
        (started, "Started on the device and not ended"),
        (pending.completed, "Ended on the device"),
    )
    for who, what in states:
        if who:
            yield Evidence(
                source="flight recorder", text=f"{what} of {ranks_words(who)}: {collective_words(pending.first)}."
            )
    for rank in ranks[:LISTED]:
        yield from gpu_evidence(view.facts[rank])


def _waits_for_device(facts: RankFacts) -> bool:
    thread = facts.machine.main_thread
    wait = wait_of(thread.wait_channel) if thread is not None else Wait.UNKNOWN
    # CUDA waits by polling. A thread that sleeps for a fixed time polls something else, for instance a store.
    if wait is Wait.CLOCK:
        return False
    return wait is Wait.DRIVER or (bool(facts.stack) and looks_like_device_sync(facts.stack[-1]))


def _in_device_sync(view: Timeline) -> Iterator[Finding]:
    """Ranks that others wait for and that wait for their own GPU, without an outstanding collective."""
    if not view.waiting or not _uses_gpus(view):
        return
    for rank in view.working(view.stragglers):
        facts = view.facts[rank]
        if _waits_for_device(facts):
            text = (
                f"Rank {rank} waits for its own GPU, {where_words(view, rank)}: what was queued on it before has not "
                f"ended{while_others_wait(view, (rank,))}."
            )
            yield finding(
                view,
                (rank,),
                text,
                confidence=Confidence.LIKELY if ailment(facts) else Confidence.POSSIBLE,
                evidence=(*gpu_evidence(facts), *how_we_know(view, (rank,))),
            )


def _uses_gpus(view: Timeline) -> bool:
    """Whether the job has groups on NCCL."""
    return any(entry.backend.startswith("nccl") for facts in view.facts.values() for entry in facts.collectives[-8:])
