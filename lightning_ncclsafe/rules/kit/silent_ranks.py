"""Ranks that do not answer: what keeps their process from answering, or how it ended."""

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum

from lightning_ncclsafe.code.libraries import STORAGE_COPIES
from lightning_ncclsafe.facts import COLLECTOR, STOPPED, EndedProcess, Frame, ProcessFacts
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding
from lightning_ncclsafe.facts.wording import location_of, place_words, size_words
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame
from lightning_ncclsafe.rules.kit.landmarks import is_in_wait
from lightning_ncclsafe.rules.kit.machine import Wait, wait_of
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.sentences import finding, while_others_wait
from lightning_ncclsafe.rules.kit.timeline import Timeline

_DEAD = ("gone", "zombie")
_ALIVE = ("running", "sleeping", "disk-sleep")
# A guard needs some 0.1 s of CPU time to answer; with a larger share of a core than this, it can in time.
_STARVED = 0.08
_SWAPPED = 100_000_000


class Reason(Enum):
    """What keeps a process from answering."""

    STOPPED = "stopped"
    COLLECTING = "collecting garbage"
    STARVED = "starved"
    BLOCKED = "blocked"
    GIL = "gil"
    DEVICE = "device"
    """It waits for its device, as it copies a tensor from there with the GIL held, for instance in ``torch.save``."""
    UNKNOWN = "unknown"


def silent_processes(view: Timeline, reason: Reason) -> Iterator[tuple[int, ProcessFacts]]:
    """Silent ranks whose process exists and does not answer for this reason, each with its process.

    Ranks that have not reached their Trainer have no guard that could answer; they are left out if they may be working.
    """
    for rank in view.silent:
        process = view.witnesses.get(rank)
        if process is None or process.state in _DEAD or is_before_trainer(view, rank) or rank in view.raised_outside:
            continue
        if reason_of(process) is reason:
            yield rank, process


def reason_of(process: ProcessFacts) -> Reason:
    """What keeps this process from answering, as far as visible from outside."""
    if process.state in STOPPED or wait_of(process.wait_channel) is Wait.FREEZER:
        return Reason.STOPPED
    if process.stack and process.stack[-1].file == COLLECTOR:
        return Reason.COLLECTING
    if process.state == "disk-sleep":
        # A process waits for swapped-out pages in the kernel's memory management, not in a network file system.
        on_network = wait_of(process.wait_channel) is Wait.NETWORK_STORAGE
        return Reason.STARVED if is_swapped_out(process) and not on_network else Reason.BLOCKED
    if is_starved(process):
        return Reason.STARVED
    if not process.gil_held:
        return Reason.UNKNOWN
    deepest = process.stack[-1] if process.stack else None
    is_copy = deepest is not None and STORAGE_COPIES.has(deepest.file, deepest.function)
    return Reason.DEVICE if is_copy else Reason.GIL


def is_swapped_out(process: ProcessFacts) -> bool:
    """Whether enough of it is swapped out to delay it."""
    return (process.swap_bytes or 0) > _SWAPPED


def is_starved(process: ProcessFacts) -> bool:
    """Whether it was ready to run, but did not get a core."""
    ran, queued = process.ran_share, process.queued_share
    if ran is None or ran >= _STARVED:
        return False
    return process.state == "running" or (queued is not None and queued > 0.5)


def silent_finding(
    view: Timeline,
    rank: int,
    process: ProcessFacts,
    words: str,
    *,
    confidence: Confidence = Confidence.LIKELY,
    remedy: str = "",
) -> Finding:
    """The finding about one silent rank.

    Args:
        words: What it is, following "Rank 3 is".
        confidence: How sure this is.
        remedy: What to do, if that depends on the facts.
    """
    return finding(
        view,
        (rank,),
        f"Rank {rank} is {words}{while_others_wait(view, (rank,))}.",
        confidence=confidence,
        location=location_of(deepest_user_frame(process.stack)),
        evidence=(_process_evidence(rank, process),),
        remedy=remedy,
    )


def copying_words(process: ProcessFacts) -> str:
    """What a process does that copies a tensor from its device, following "Rank 3 is"."""
    return (
        f"copying a tensor from its GPU {place_words(deepest_user_frame(process.stack))}, with Python's global "
        "interpreter lock held, and waits for what was queued on the GPU before, which has not ended"
    )


def _process_evidence(rank: int, process: ProcessFacts) -> Evidence:
    """State, kernel function, CPU time and memory of a process, as another process sees it."""
    observed = [f"Process {process.pid} is {process.state or 'alive'}"]
    observed += [f"kernel function {process.wait_channel}"] if process.wait_channel else []
    observed += [f"{process.cpu_s:.1f} s of CPU time used"] if process.cpu_s is not None else []
    observed += [f"got {process.ran_share:.0%} of a core while observed"] if process.ran_share is not None else []
    observed += [f"{size_words(process.swap_bytes)} swapped out"] if process.swap_bytes else []
    return Evidence(source="process", rank=rank, text=", ".join(observed) + ".")


def is_gone(view: Timeline, rank: int) -> bool:
    """Whether another process has seen that a silent rank's process is gone."""
    return rank in view.witnesses and view.witnesses[rank].state in _DEAD


def signal_of(view: Timeline, rank: int) -> str:
    """The signal that ended a rank's process, by its own last output or its parent; empty if unknown."""
    process = view.witnesses[rank]
    if process.ended_by:
        return process.ended_by
    child = _as_child(view, rank)
    return child.signal if child is not None else ""


def status_of(view: Timeline, rank: int) -> int | None:
    """The status with which a rank's process exited, seen from outside or by its parent; None if unknown."""
    process = view.witnesses[rank]
    if process.exit_code is not None:
        return process.exit_code
    child = _as_child(view, rank)
    return child.exit_code if child is not None else None


def _as_child(view: Timeline, rank: int) -> EndedProcess | None:
    """A silent rank's process as the rank that had started it saw it end; hosts have the same process ids."""
    hosts = _hosts(view).get(rank) or {facts.host for facts in view.facts.values()}
    # Where it ran is unknown if nobody on its host has answered.
    host = next(iter(hosts)) if len(hosts) == 1 else None
    return None if host is None else _ended_children(view).get((host, view.witnesses[rank].pid))


@once
def _hosts(view: Timeline) -> dict[int, set[str]]:
    """The hosts on which other ranks see a rank's process."""
    hosts: dict[int, set[str]] = defaultdict(set)
    for facts in view.facts.values():
        for peer in facts.peers:
            hosts[peer.rank].add(facts.host)
    return hosts


@once
def _ended_children(view: Timeline) -> dict[tuple[str, int], EndedProcess]:
    """The ended children of all ranks, by host and process id."""
    return {(facts.host, child.pid): child for facts in view.facts.values() for child in facts.machine.ended}


def left_in_order(process: ProcessFacts) -> bool:
    """Whether a process that is gone may have exited normally: no signal and no status other than 0 is known."""
    return not process.ended_by and not process.exit_code


def is_before_trainer(view: Timeline, rank: int) -> bool:
    """Whether a silent rank has not reached its Trainer, as far as known, and may be working.

    The others wait in ``init_process_group``, which no rank leaves before all have joined; or they have called the
    Trainer once more, and this rank has not.
    """
    if rank in view.raised_outside or not (view.awaits_joining or rank in view.job.absent):
        return False
    process = view.witnesses.get(rank)
    return process is None or (process.state in _ALIVE and not process.gil_held and not _is_blocked(process))


def waiting_outside_trainer(view: Timeline) -> dict[int, tuple[Frame, ...]]:
    """Ranks that wait in a collective of the program's own before this call of the Trainer, with their stacks."""
    stacks = {rank: view.witnesses[rank].stack for rank in view.job.absent if rank in view.witnesses}
    return {rank: stack for rank, stack in stacks.items() if is_before_trainer(view, rank) and is_in_wait(stack)}


def _is_blocked(process: ProcessFacts) -> bool:
    """Whether its control group is frozen, or it waits for network storage other than swap space."""
    wait = wait_of(process.wait_channel)
    return wait is Wait.FREEZER or (wait is Wait.NETWORK_STORAGE and not process.swap_bytes)
