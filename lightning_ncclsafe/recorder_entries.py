"""What an entry of PyTorch's Flight Recorder means, here or in a dump: whether it has ended, what is a whole."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

Entry = Mapping[Any, Any]
_Entry = TypeVar("_Entry", bound=Entry)


def has_ended(entry: Entry, seq: int, last_completed: int) -> bool:
    """Whether what an entry records has completed.

    Gloo's entries stay "scheduled" and are "retired" at their end. NCCL's have a state, and are retired when they time
    out as well; they end one after the other, so that a later one that has completed tells of those before it.

    Args:
        entry: The entry.
        seq: Its sequence number.
        last_completed: The last number of its group that has completed, by the group's counters; 0 where unknown.
    """
    if entry.get("state") == "completed":
        return True
    if not _is_of(entry, "nccl"):
        return entry.get("retired") is True
    return entry.get("is_p2p") is not True and 0 < seq <= last_completed


def _is_of(entry: Entry, backend: str) -> bool:
    name = entry.get("profiling_name")
    return isinstance(name, str) and name.startswith(backend)


def without_parts(entries: Sequence[_Entry], place: Callable[[_Entry], Hashable]) -> list[_Entry]:
    """What is coalesced is recorded one by one, and then as a whole; NCCL's back end tells the end of the whole only.

    Args:
        entries: Entries as a recorder gives them.
        place: Group and sequence number of an entry, in whatever form.

    Returns:
        The same without those of which a whole at the same place is among them.
    """
    wholes = {place(entry) for entry in entries if _is_whole(entry)}
    if not wholes:
        return list(entries)
    return [entry for entry in entries if entry.get("is_p2p") is True or _is_whole(entry) or place(entry) not in wholes]


def _is_whole(entry: Entry) -> bool:
    name = entry.get("profiling_name")
    return isinstance(name, str) and name.endswith("coalesced") and entry.get("is_p2p") is not True
