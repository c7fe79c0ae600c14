"""The cause blocked-on-disk: a rank's main thread waits for storage that does not answer."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import ALL_OF_TORCH, PROCESSES
from lightning_ncclsafe.facts import MainThreadFacts, ProcessFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Kind,
    Plan,
    Reason,
    Timeline,
    Wait,
    at_words,
    deepest_user_frame,
    finding,
    hang_rule,
    how_we_know,
    is_swapped_out,
    silent_finding,
    silent_processes,
    storage_evidence,
    swaps,
    wait_of,
    waits_for_memory,
    where_words,
    while_others_wait,
)

_STORAGE = (Wait.NETWORK_STORAGE, Wait.STORAGE)
_BESIDE_DISK = (Wait.DRIVER, Wait.FREEZER)
# A rank that reads many files is blocked in some samples; one that hangs is blocked in most.
_LOOKS = 3
_MOSTLY = 0.6
# Where a process waits until a FIFO is opened at its other end, too.
_OF_FIFO = ("wait_for_partner", "fifo_open")
# Calls on files; a thread that sleeps in one waits for storage, or for the other end of a pipe.
_ON_FILES = re.compile(
    r"\b(?:open|fsync|fdatasync|stat|listdir|scandir|glob|exists|mkdir|makedirs|replace|rename|unlink|remove|copy\w*"
    r"|load|save\w*|dump|p?read\w*|p?write\w*|flush|to_csv|to_parquet|savez?\w*|memmap)\("
)
_OF_PROCESSES = PROCESSES | ALL_OF_TORCH
_REMEDY_PIPE = (
    "Look at the other end of that pipe or FIFO: the process that reads or writes it has ended, is late or is stuck "
    "(lsof shows both ends). Open it with os.O_NONBLOCK, or start that process first."
)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``restart`` if the kernel shows that it waits for storage; ``unknown`` otherwise, as it may wait for a pipe."""
    threads = (
        view.facts[rank].machine.main_thread if rank in view.facts else view.witnesses[rank] for rank in finding.ranks
    )
    known = all(thread is not None and wait_of(thread.wait_channel) in _STORAGE for thread in threads)
    return Plan.RESTART if known else Plan.UNKNOWN


@hang_rule(
    after="data-stall",
    remedy=(
        "Look at the storage behind that line: ls and df on its mount, the kernel's log (dmesg) for a server that does "
        "not answer, quotas and snapshots that freeze it. Write to a local disk, and copy from there in the background."
    ),
    is_of_machine=True,
    plan=_plan,
)
def blocked_on_disk(view: Timeline) -> Iterator[Finding]:
    """A rank's main thread is in uninterruptible sleep, or in a call on a file, and does not return.

    Symptom:
        All other ranks wait; the process of one is in state D, which not even SIGKILL ends, or is in open, write or
        fsync.

    Cause:
        A network mount whose server does not answer, a full or failing disk, a frozen file system, a FIFO that nobody
        reads. During a page fault (a memory-mapped file) the rank does not even answer.

    Remedy:
        Check that storage; write to a local disk.

    Cannot see:
        Which file it is if the rank does not answer. Who has the other end of a pipe, unless it is a program that the
        rank has started: then the rank waits for that, and not for a disk.
    """
    for rank, process in silent_processes(view, Reason.BLOCKED):
        if wait_of(process.wait_channel) is not Wait.DRIVER:
            yield _silent(view, rank, process)
    for rank in view.working(view.suspects if view.waiting else ()):
        confidence = _confidence(view, view.facts[rank])
        if confidence is not None:
            yield _answering(view, rank, confidence)


def _silent(view: Timeline, rank: int, process: ProcessFacts) -> Finding:
    frame = deepest_user_frame(process.stack)
    # Waiting for a page of a file that was evicted for lack of memory looks the same as waiting for a disk.
    is_certain = wait_of(process.wait_channel) is Wait.NETWORK_STORAGE and not is_swapped_out(process)
    return silent_finding(
        view,
        rank,
        process,
        f"in uninterruptible sleep{_channel_words(process.wait_channel)}{at_words(frame)}",
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
    )


def _channel_words(channel: str) -> str:
    waits = wait_of(channel)
    what = f", waiting for {waits.value}" if waits.value else ""
    return f" in {channel}{what}" if channel else ""


def _confidence(view: Timeline, facts: RankFacts) -> Confidence | None:
    """How sure it is that this rank waits for storage; None if there is no sign of it."""
    thread = facts.machine.main_thread
    if thread is None:
        return None
    if _may_lack_memory(facts, thread) and wait_of(thread.wait_channel) is not Wait.NETWORK_STORAGE:
        # A lack of memory, which host-starved reports if it shows, looks the same.
        return Confidence.POSSIBLE if _is_blocked(thread) and not waits_for_memory(facts) else None
    if _is_blocked(thread):
        known = wait_of(thread.wait_channel) in _STORAGE
        named = view.activities[facts.rank].kind in (Kind.USER, Kind.LIGHTNING)
        return Confidence.CERTAIN if known and named and thread.looks >= _LOOKS else Confidence.LIKELY
    return _confidence_in_call(view, facts, thread)


def _may_lack_memory(facts: RankFacts, thread: MainThreadFacts) -> bool:
    """Whether it may wait for memory: its host stalls on memory, or it is partly swapped out and has page faults."""
    faults = thread.major_faults
    return waits_for_memory(facts) or (swaps(facts.host_facts) and (faults is None or faults >= thread.over_s))


def _is_blocked(thread: MainThreadFacts) -> bool:
    is_so = thread.state == "disk-sleep" and wait_of(thread.wait_channel) not in _BESIDE_DISK
    return is_so and thread.blocked_looks >= max(_MOSTLY * thread.looks, 2)


def _confidence_in_call(view: Timeline, facts: RankFacts, thread: MainThreadFacts) -> Confidence | None:
    """How sure it is that a rank that sleeps in a user line with a call on files waits for storage; or None."""
    frame = facts.stack[-1] if facts.stack else None
    is_call = frame is not None and view.activities[facts.rank].kind is Kind.USER and _ON_FILES.search(frame.code)
    # A rank that reads many files is blocked now and then.
    is_asleep = thread.state == "sleeping" or (thread.state == "disk-sleep" and thread.looks < _LOOKS)
    if not is_call or not is_asleep:
        return None
    waits = wait_of(thread.wait_channel)
    # The pipe of a queue is not one of the user's files.
    is_queue = frame is not None and _OF_PROCESSES.has(frame.file, frame.function)
    if waits is Wait.PIPE and not is_queue:
        return _confidence_in_pipe(facts, thread)
    if waits in _STORAGE:
        return Confidence.LIKELY
    # If the kernel function is unknown, only the line is evidence; sockets and locks have their own functions.
    return Confidence.POSSIBLE if not thread.wait_channel else None


def _confidence_in_pipe(facts: RankFacts, thread: MainThreadFacts) -> Confidence | None:
    """How sure it is that a pipe is a file, and not the input or output of a program that the rank has started."""
    if facts.awaited_processes:
        return None
    # The kernel's functions of reading and writing are the same for a FIFO and for a pipe without a name.
    is_file = facts.awaited_file.startswith("/") or thread.wait_channel.startswith(_OF_FIFO)
    return Confidence.LIKELY if is_file else Confidence.POSSIBLE


def _answering(view: Timeline, rank: int, confidence: Confidence) -> Finding:
    facts = view.facts[rank]
    thread = facts.machine.main_thread
    channel = thread.wait_channel if thread else ""
    is_pipe = wait_of(channel) is Wait.PIPE
    waits = f"{Wait.PIPE.value} (kernel function {channel})" if is_pipe else f"storage{_channel_words(channel)}"
    text = f"Rank {rank} waits for {waits}: it is {where_words(view, rank)}"
    checkpoints = view.activities[rank].kind is Kind.CHECKPOINT
    return finding(
        view,
        (rank,),
        f"{text}{while_others_wait(view, (rank,))}.",
        confidence=confidence,
        evidence=(
            *([_evidence(rank, thread)] if thread else ()),
            *how_we_know(view, (rank,)),
            *(() if is_pipe else storage_evidence(facts, of_checkpoints=checkpoints)),
        ),
        remedy=_REMEDY_PIPE if is_pipe else "",
    )


def _evidence(rank: int, thread: MainThreadFacts) -> Evidence:
    channel = f" (kernel function {thread.wait_channel})" if thread.wait_channel else ""
    text = f"Its main thread is in state {thread.state or 'unknown'}{channel}"
    text += (
        f", in uninterruptible sleep in {thread.blocked_looks} of {thread.looks} samples over {thread.over_s:.0f} s."
    )
    return Evidence(source="process", rank=rank, text=text)
