"""A rank's memory and swap in words."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import HostFacts, RankFacts
from lightning_ncclsafe.findings import Evidence
from lightning_ncclsafe.rules.wording import size_words

# A host that has read back less than this since the start is not held up by swapping.
_SWAPPED_IN = 100_000_000
_SCARCE = 0.05


def swaps(host: HostFacts) -> bool:
    """Whether swapping slows this rank: it has been swapped out in part, or the host reads much back from swap."""
    return bool(host.process_swap_bytes) and (host.process_swap_bytes or 0) + (host.swapped_in_bytes or 0) > _SWAPPED_IN


def short_of_memory(host: HostFacts) -> bool:
    """Whether less than a twentieth of the host's memory, or of the control group's limit, is left."""
    available, total = host.memory_available_bytes, host.memory_total_bytes
    if available is not None and total and available < _SCARCE * total:
        return True
    rss, limit = host.rss_bytes, host.memory_limit_bytes
    return rss is not None and bool(limit) and rss > (1 - _SCARCE) * (limit or 0)


def memory_words(host: HostFacts) -> str:
    """``"with 312 MB resident and 0 B swapped out"``; empty where the host does not say."""
    words = [f"{size_words(host.rss_bytes)} resident"] if host.rss_bytes is not None else []
    words += [f"{size_words(host.process_swap_bytes)} swapped out"] if host.process_swap_bytes is not None else []
    return f"with {' and '.join(words)}" if words else ""


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
    if words:
        yield Evidence(source="host", rank=facts.rank, text=", ".join(words) + ".")
