"""The cause late-at-init: a rank has not reached the place where the others wait before the first batch."""

from collections.abc import Iterable, Iterator, Sequence

from lightning_ncclsafe.facts import HostFacts, ProcessFacts
from lightning_ncclsafe.facts.wording import duration_words, size_words
from lightning_ncclsafe.rules.kit import (
    GROWS_BYTES_PER_S,
    LISTED,
    TOO_LITTLE_MEMORY,
    Confidence,
    Evidence,
    Finding,
    Kind,
    Timeline,
    alone_in_trainer,
    capitalised,
    clause,
    deepest_user_frame,
    finding,
    first_user_frame,
    growth_bytes_per_s,
    hang_rule,
    how_we_know,
    is_before_first_batch,
    is_before_trainer,
    is_in_action,
    line_words,
    location_of,
    memory_evidence,
    place_words,
    ranks_words,
    swaps,
    verb,
    waiting_outside_trainer,
    waits_in_init,
    where_words,
    while_others_wait,
)

# Python, torch and its libraries alone: a process with less may still be importing them.
_IMPORTED_BYTES = 1_000_000_000
# Ranks wait for each other this long at a start, unless the program sets another limit: later is irrelevant.
_SOON_S = 1800.0

_REMEDY_NOT_STARTED = "Also check that every rank's process was started, and read its output."
_OTHER_RULES = (Kind.LOCK, Kind.LOADER, Kind.LOGGER, Kind.CHECKPOINT, Kind.FINISHED)
_REMEDY = (
    "Do this work once and ahead of the job (a separate script that leaves its result on disk), or in prepare_data, "
    "for which Lightning lets the other ranks wait without limit."
)
_REMEDY_PREPARING = (
    "Do this work once and ahead of the job, in a separate script that leaves its result on disk. Lightning lets the "
    "other ranks wait for prepare_data without limit, but every start of the job waits as long."
)
_REMEDY_GROWS = (
    "It is still filling its memory, and every rank of the host that loads the same takes as much again: load the "
    "dataset lazily or memory-mapped, or prepare it once and ahead of the job (a script that leaves its result "
    "on disk), or in prepare_data."
)
_REMEDY_OUTSIDE = (
    "Look at the code before this call of the Trainer, above all under a condition on the rank: work there takes time, "
    "and trainer.save_checkpoint, barriers and gathers must be called by all ranks."
)


@hang_rule(after="slow-name-server")
def late_at_init(view: Timeline) -> Iterator[Finding]:
    """A rank has not reached the first collective or barrier while the others wait there.

    Symptom:
        "Timed out initializing process group in store based barrier", "Socket Timeout", or nothing at all after the
        start; the others wait in a barrier of setup.

    Cause:
        One rank prepares data, downloads, compiles or swaps for longer than the others wait.

    Remedy:
        Prepare ahead of the job or in prepare_data; if the host swaps, use less memory per rank.

    Cannot see:
        What a process does before it imports this package, beyond its state and memory; a process on a host where no
        rank waits.
    """
    late = tuple(rank for rank in view.working(view.stragglers) if _is_late(view, rank))
    if late and view.waiting:
        yield _finding(view, late)
    waiting = waiting_outside_trainer(view)
    outside = tuple(rank for rank in view.silent if is_before_trainer(view, rank) and rank not in waiting)
    if outside and view.awaits_joining:
        yield _not_joined(view, outside)
    elif outside and view.waiting and not alone_in_trainer(view):
        yield _outside(view, outside)


def _is_late(view: Timeline, rank: int) -> bool:
    return is_before_first_batch(view.facts[rank].progress) and view.activities[rank].kind not in _OTHER_RULES


def _outside(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """Ranks without a guard that could answer; if their stacks are unknown, they may wait for the others as well."""
    seen = [process for rank in ranks if (process := view.witnesses.get(rank)) is not None]
    frame = first_user_frame(process.stack for process in seen)
    does = place_words(frame) if frame else "at work or in a collective that the others do not call"
    text = (
        f"{clause(ranks, 'has|have not reached this call of the Trainer')}: "
        f"{verb(ranks, 'it is', 'they are')} still in the program's own code before it, {does}"
        f"{while_others_wait(view, ranks)}."
    )
    known = f"The process group exists, but {clause(ranks, 'has|have not started the guard')}."
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if frame else Confidence.POSSIBLE,
        evidence=(Evidence(source="process", text=known), *how_we_know(view, ())),
        remedy=_REMEDY_OUTSIDE,
        location=location_of(frame),
    )


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    swapping = any(swaps(view.facts[rank].host_facts) for rank in ranks)
    processes = [other.host_facts for other in view.facts.values() if other.host == facts.host]
    memory = _memory_clause(
        memory_words(facts.host_facts),
        "its host is swapping" if swapping else "",
        used_up_words(facts.host_facts, processes),
    )
    summary = f"{clause(ranks, 'is|are late: still')} {where_words(view, ranks[0])}{memory}"
    amounts = (item for rank in ranks[:LISTED] for item in memory_evidence(view.facts[rank]))
    is_preparing = all(is_in_action(view.facts[rank].progress, ".prepare_data") for rank in ranks)
    remedy = _memory_remedy(swapping, [view.facts[rank].host_facts for rank in ranks])
    return finding(
        view,
        ranks,
        f"{summary}{while_others_wait(view, ranks)}.",
        evidence=(*amounts, *how_we_know(view, ranks)),
        remedy=remedy or (_REMEDY_PREPARING if is_preparing else _REMEDY),
    )


def _not_joined(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """Ranks that have not joined the process group, as the ranks that wait for them see their processes."""
    seen = [process for rank in ranks if (process := view.witnesses.get(rank))]
    frame = first_user_frame(process.stack for process in seen)
    swapping = any(process.swap_bytes or process.state == "disk-sleep" for process in seen)
    at = f", and {verb(ranks, 'is', 'are')} {place_words(frame)}" if frame else ""
    memory = _memory_clause(memory_words(seen[0]), _used_up_before_joining(view, seen)) if seen else ""
    text = f"{clause(ranks, 'has|have not joined the process group')}{at}{memory}"
    remedy = _memory_remedy(swapping, seen) or _REMEDY
    return finding(
        view,
        ranks,
        f"{text}, while {_waiting_words(view, verb(ranks, 'it', 'them'))}.",
        confidence=Confidence.LIKELY if seen else Confidence.POSSIBLE,
        location=location_of(frame),
        evidence=_processes_evidence(view, ranks, seen),
        remedy=remedy if frame else f"{remedy} {_REMEDY_NOT_STARTED}",
    )


def _used_up_before_joining(view: Timeline, seen: Sequence[ProcessFacts]) -> str:
    host = view.hosts.get(seen[0].rank)
    answering = [facts.host_facts for facts in view.facts.values() if facts.host == host]
    silent = [process for process in seen if view.hosts.get(process.rank) == host]
    return used_up_words(answering[0], [*answering, *silent]) if host and answering else ""


def _memory_clause(*parts: str) -> str:
    """Words about memory for the middle of a sentence: the first part after a comma, the others after semicolons."""
    first, *others = parts
    return (f", {first}" if first else "") + "".join(f"; {part}" for part in others if part)


def _memory_remedy(swapping: bool, processes: Iterable[HostFacts | ProcessFacts]) -> str:
    """What to do about the memory of processes that swap or still grow; empty if they do neither."""
    if swapping:
        return TOO_LITTLE_MEMORY
    return _REMEDY_GROWS if any(map(_fills_memory, processes)) else ""


def _waiting_words(view: Timeline, whom: str) -> str:
    waiting = tuple(rank for rank, facts in view.facts.items() if waits_in_init(facts))
    return f"{clause(waiting, 'waits|wait for')} {whom} in init_process_group"


def _processes_evidence(view: Timeline, ranks: Sequence[int], processes: Sequence[ProcessFacts]) -> Iterator[Evidence]:
    for process in processes[:LISTED]:
        words = [f"Process {process.pid} is {process.state}"]
        words += [f"waits in {process.wait_channel}"] if process.wait_channel else []
        memory = memory_words(process).removeprefix("with ")
        yield Evidence(source="process", rank=process.rank, text=", ".join([*words, *filter(None, [memory])]) + ".")
        frame = deepest_user_frame(process.stack)
        if frame is not None:
            yield Evidence(source="stack", rank=process.rank, text=f"Is at {line_words(frame)}")
    unseen = tuple(sorted(set(ranks) - {process.rank for process in processes}))
    if unseen:
        text = (
            f"No process of {ranks_words(unseen)} could be seen from where the others wait: it has not been started, "
            "has ended, or is on a host on which no rank waits."
        )
        yield Evidence(source="process", text=text)
    yield Evidence(source="phase", text=capitalised(_waiting_words(view, ranks_words(ranks))) + ".")


def _fills_memory(facts: HostFacts | ProcessFacts) -> bool:
    """Whether a process grows, and is larger than imports alone make it."""
    return bool(growth_bytes_per_s(facts)) and (facts.rss_bytes or 0) + _swapped_bytes(facts) >= _IMPORTED_BYTES


def _swapped_bytes(facts: HostFacts | ProcessFacts) -> int:
    return (facts.process_swap_bytes if isinstance(facts, HostFacts) else facts.swap_bytes) or 0


def memory_words(facts: HostFacts | ProcessFacts) -> str:
    """``"with 3.4 GB resident, growing by 210.0 MB/s, 1.1 GB swapped out (+60.0 MB/s)"``; empty if unknown."""
    swapped = _swapped_bytes(facts)
    grows, swaps_out = facts.memory_growth_bytes_per_s or 0, facts.swap_growth_bytes_per_s or 0
    words = [f"{size_words(facts.rss_bytes)} resident"] if facts.rss_bytes is not None else []
    words += [f"growing by {size_words(grows)}/s"] if words and grows >= GROWS_BYTES_PER_S else []
    if swapped:
        words.append(f"{size_words(swapped)} swapped out")
        words[-1] += f" (+{size_words(swaps_out)}/s)" if swaps_out >= GROWS_BYTES_PER_S else ""
    return f"with {', '.join(words)}" if words else ""


def used_up_words(host: HostFacts, ranks: Sequence[HostFacts | ProcessFacts]) -> str:
    """``"the host's last 2.1 GB are used up in about 10 s"``; empty unless a rank fills them, in half an hour or less.

    Args:
        host: The host's memory, as a rank on it sees it.
        ranks: All known ranks on it.
    """
    grows_bytes_per_s = sum(growth_bytes_per_s(facts) for facts in ranks if _fills_memory(facts))
    left = list(_left(host, sum(facts.rss_bytes or 0 for facts in ranks)))
    if not left or not grows_bytes_per_s:
        return ""
    left_bytes, whose = min(left)
    left_s = left_bytes / grows_bytes_per_s
    text = f"{whose} last {size_words(left_bytes)} are used up in about {duration_words(left_s)}"
    return text if left_s < _SOON_S else ""


def _left(host: HostFacts, resident_bytes: int) -> Iterator[tuple[int, str]]:
    if host.memory_available_bytes is not None:
        yield host.memory_available_bytes, "the host's"
    # If the ranks together exceed the limit, each has a limit of its own, and not all of these are known.
    if host.memory_limit_bytes is not None and host.memory_limit_bytes > resident_bytes:
        yield host.memory_limit_bytes - resident_bytes, "the control group's"
