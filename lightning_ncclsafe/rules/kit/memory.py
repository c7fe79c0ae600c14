"""A rank's memory and swap in words, how fast they grow, and when there is nothing left."""

from collections.abc import Iterable, Iterator, Sequence

from lightning_ncclsafe.facts import HostFacts, ProcessFacts, RankFacts
from lightning_ncclsafe.facts.findings import Evidence
from lightning_ncclsafe.rules.kit.wording import duration_words, size_words

# A host that has read back less than this since the start is not held up by swapping.
_SWAPPED_IN = 100_000_000
_SCARCE = 0.05
# Share of the time in which all tasks of the host wait for memory, and pages that a rank waits for.
_STALLED = 0.3
_FAULTS_PER_S = 100
# A process that does not load data allocates and frees less than this in a second.
_GROWS_BYTES_PER_S = 1_000_000
# What is that far off says nothing about this start.
_SOON_S = 3600.0
_REMEDY_SWAP = (
    "This host has too little memory: load the dataset lazily or memory-mapped instead of whole in every rank, use a "
    "smaller batch or fewer loader workers, and keep swap off network storage."
)
_REMEDY_GROWS = (
    "It is still filling its memory, and every rank of the host that loads the same takes as much again: load the "
    "dataset lazily or memory-mapped, or prepare it once and ahead of the job (a script that leaves its result "
    "on disk), or in prepare_data."
)


def swaps(host: HostFacts) -> bool:
    """Whether swapping slows this rank: it has been swapped out in part, or the host reads much back from swap."""
    return bool(host.process_swap_bytes) and (host.process_swap_bytes or 0) + (host.swapped_in_bytes or 0) > _SWAPPED_IN


def waits_for_memory(facts: RankFacts) -> bool:
    """Whether its host reads back from swap, or from files, what it had no memory for, for much of the time."""
    pressure, thread = facts.machine.pressure, facts.machine.main_thread
    if pressure is None or (pressure.memory_stalled or 0.0) < _STALLED:
        return False
    faults = (thread.major_faults or 0) if thread is not None else 0
    return swaps(facts.host_facts) or faults >= _FAULTS_PER_S * pressure.over_s


def short_of_memory(host: HostFacts) -> bool:
    """Whether less than a twentieth of the host's memory, or of the control group's limit, is left."""
    available, total = host.memory_available_bytes, host.memory_total_bytes
    if available is not None and total and available < _SCARCE * total:
        return True
    rss, limit = host.rss_bytes, host.memory_limit_bytes
    return rss is not None and bool(limit) and rss > (1 - _SCARCE) * (limit or 0)


def growth_bytes_per_s(facts: HostFacts | ProcessFacts) -> int:
    """How fast a process takes up memory, what is swapped out of it included; 0 where it does not, or nobody knows."""
    grows = (facts.memory_growth_bytes_per_s or 0) + (facts.swap_growth_bytes_per_s or 0)
    return grows if grows >= _GROWS_BYTES_PER_S else 0


def memory_words(facts: HostFacts | ProcessFacts) -> str:
    """``"with 3.4 GB resident, growing by 210.0 MB/s, 1.1 GB swapped out (+60.0 MB/s)"``; empty where nobody knows."""
    swapped = facts.process_swap_bytes if isinstance(facts, HostFacts) else facts.swap_bytes
    grows, swaps_out = facts.memory_growth_bytes_per_s or 0, facts.swap_growth_bytes_per_s or 0
    words = [f"{size_words(facts.rss_bytes)} resident"] if facts.rss_bytes is not None else []
    words += [f"growing by {size_words(grows)}/s"] if words and grows >= _GROWS_BYTES_PER_S else []
    if swapped is not None:
        words.append(f"{size_words(swapped)} swapped out")
        words[-1] += f" (+{size_words(swaps_out)}/s)" if swaps_out >= _GROWS_BYTES_PER_S else ""
    return f"with {', '.join(words)}" if words else ""


def used_up_words(host: HostFacts, ranks: Sequence[HostFacts | ProcessFacts]) -> str:
    """``"the host's last 2.1 GB are used up in about 10 s"``; empty where nothing grows, or it takes above an hour.

    Args:
        host: The host's memory, as a rank on it sees it.
        ranks: All ranks on it that anybody knows of.
    """
    grows_bytes_per_s = sum(map(growth_bytes_per_s, ranks))
    left = list(_left(host, sum(facts.rss_bytes or 0 for facts in ranks)))
    if not left or not grows_bytes_per_s:
        return ""
    left_bytes, whose = min(left)
    left_s = left_bytes / grows_bytes_per_s
    return (
        f"{whose} last {size_words(left_bytes)} are used up in about {duration_words(left_s)}"
        if left_s < _SOON_S
        else ""
    )


def _left(host: HostFacts, resident_bytes: int) -> Iterator[tuple[int, str]]:
    if host.memory_available_bytes is not None:
        yield host.memory_available_bytes, "the host's"
    # A limit that the ranks exceed together is that of each of them; what each has left is not known of all.
    if host.memory_limit_bytes is not None and host.memory_limit_bytes > resident_bytes:
        yield host.memory_limit_bytes - resident_bytes, "the control group's"


def memory_evidence(facts: RankFacts) -> Iterator[Evidence]:
    """Memory and swap of a rank's process and host; nothing where the host does not say."""
    host = facts.host_facts
    amounts = (
        (host.rss_bytes, "{} resident"),
        (host.process_swap_bytes, "{} of it swapped out"),
        (host.memory_available_bytes, "{} of memory available on the host"),
        (host.memory_limit_bytes, "{} is the limit of its control group"),
        (host.swap_used_bytes, "{} of swap in use on the host"),
        (host.swapped_in_bytes, "{} read back from swap since the start"),
    )
    words = [text.format(size_words(amount)) for amount, text in amounts if amount is not None]
    words[1:1] = [f"growing by {size_words(rate)}/s in all"] if words and (rate := growth_bytes_per_s(host)) else []
    if words:
        yield Evidence(source="host", rank=facts.rank, text=", ".join(words) + ".")


def memory_clause(*parts: str) -> str:
    """What is known of memory as the middle of a sentence: the first part after a comma, the others set off."""
    first, *others = parts
    return (f", {first}" if first else "") + "".join(f"; {part}" for part in others if part)


def memory_remedy(swapping: bool, processes: Iterable[HostFacts | ProcessFacts]) -> str:
    """What to do about the memory of processes that swap, or still grow; empty where they do neither."""
    if swapping:
        return _REMEDY_SWAP
    return _REMEDY_GROWS if any(map(growth_bytes_per_s, processes)) else ""
