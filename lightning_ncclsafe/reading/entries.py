"""Groups and collectives in a Flight Recorder's dump, whatever version of PyTorch wrote it.

Read by what is there, not by the version: 2.3 (torch 2.5) to 2.10 (torch 2.13) differ in keys that were added. JSON has
numbers as text where a pickle has numbers, and a single process group whose name is not known yet under ``""``.
"""

from collections import defaultdict
from typing import Any

from lightning_ncclsafe.facts import Collective, Group
from lightning_ncclsafe.reading.frames import Stacks
from lightning_ncclsafe.reading.groups import MOST_GROUPS, groups_of
from lightning_ncclsafe.reading.values import items, mapping, shapes, text, texts, whole
from lightning_ncclsafe.recorder_entries import Entry, has_ended, without_parts

# A hang's cause lies in the last few entries of a group; ahead of it, a device's queue may be long.
_NEWEST = 64
_BEFORE = 32
_BEHIND = 32
_MOST_ENTRIES = 1_000_000
_KEYS = ("entries", "pg_status", "pg_config")


def is_dump(plain: object) -> bool:
    """Whether plain data is what a Flight Recorder dumps."""
    return isinstance(plain, dict) and any(key in plain for key in _KEYS)


def parsed(dump: dict[Any, Any]) -> tuple[tuple[Group, ...], tuple[Collective, ...]]:
    """Groups, and the last collectives of each, oldest first.

    Args:
        dump: The dump; see :func:`is_dump`.
    """
    by_group: dict[str, list[Entry]] = defaultdict(list)
    names: dict[str, tuple[str, str]] = {}
    for item in items(dump.get("entries"))[-_MOST_ENTRIES:]:
        entry = mapping(item)
        name, description = _name(entry)
        if name or entry:
            by_group[name].append(entry)
            names[str(whole(entry.get("pg_id"), -1))] = (name, description)
    called = {
        name: max((seq_of(entry) for entry in entries if not entry.get("is_p2p")), default=0)
        for name, entries in by_group.items()
    }
    groups = groups_of(dump, names, called)
    last_completed = {group.name: group.last_completed for group in groups}
    stacks = Stacks()
    calls = [
        _collective(entry, name, last_completed.get(name, 0), stacks)
        for name, entries in list(by_group.items())[:MOST_GROUPS]
        for entry in _kept(without_parts(entries, seq_of), last_completed.get(name, 0))
    ]
    return groups, tuple(sorted(calls, key=lambda call: call.created_ns))


def _name(entry: dict[Any, Any]) -> tuple[str, str]:
    """Name and description of the entry's group; before torch 2.3 there was the name alone."""
    group = entry.get("process_group")
    if isinstance(group, str):
        return text(group), ""
    pair = (*items(group)[:2], "", "")
    return text(pair[0]), text(pair[1])


def seq_of(entry: Entry) -> int:
    """The entry's sequence number, in the numbering that it belongs to."""
    key = "p2p_seq_id" if entry.get("is_p2p") is True else "collective_seq_id"
    return max(whole(entry.get(key, entry.get("seq_id"))), 0)


def _kept(entries: list[Entry], last_completed: int) -> list[Entry]:
    """The newest, and those around the oldest one that has not completed: that is where a group stands."""
    older = entries[:-_NEWEST]
    outstanding = (
        index
        for index, entry in enumerate(older)
        if not entry.get("is_p2p") and not has_ended(entry, seq_of(entry), last_completed)
    )
    stands_at = next(outstanding, None)
    around = [] if stands_at is None else older[max(stands_at - _BEFORE, 0) : stands_at + _BEHIND]
    return around + entries[-_NEWEST:]


def _collective(entry: Entry, group: str, last_completed: int, stacks: Stacks) -> Collective:
    backend, _, op = text(entry.get("profiling_name")).partition(":")
    is_p2p, seq = entry.get("is_p2p") is True, seq_of(entry)
    duration = entry.get("duration_ms")
    return Collective(
        group=group,
        seq=seq,
        op=op or backend,
        backend=backend if op else "",
        completed=has_ended(entry, seq, last_completed),
        started=entry.get("state") in ("started", "completed"),
        input_sizes=shapes(entry.get("input_sizes")),
        output_sizes=shapes(entry.get("output_sizes")),
        dtypes=texts(entry.get("input_dtypes")),
        created_ns=max(whole(entry.get("time_created_ns")), 0),
        duration_ms=float(duration) if isinstance(duration, float) and abs(duration) < 1e12 else None,
        timeout_ms=max(whole(entry.get("timeout_ms")), 0),
        is_p2p=is_p2p,
        stack=stacks.read(entry.get("frames")),
    )
