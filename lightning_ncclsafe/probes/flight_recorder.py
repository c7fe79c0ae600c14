"""Collectives and groups as PyTorch's Flight Recorder has recorded them on this rank."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lightning_ncclsafe import _torch
from lightning_ncclsafe.facts import Collective, Group

# Enough to see the last steps of DDP; a hang's cause lies in the last few entries of each group.
KEPT_PER_GROUP = 48

Position = tuple[tuple[str, str, str], ...]


def position() -> Position:
    """Where each group of this rank stands, comparable for equality only: it changes when a collective is called,
    starts or completes. Takes about 0.05 ms."""
    return tuple(
        (group, status["last_enqueued_collective"], status["last_completed_collective"])
        for dump in _torch.recorder_dumps(collectives=False)
        for group, status in dump.get("pg_status", {}).items()
    )


def read() -> tuple[tuple[Group, ...], tuple[Collective, ...]]:
    """The groups of this rank, and the last entries of each, oldest first; all that are outstanding are among them."""
    members = {group.name: group for group in _torch.process_groups()}
    groups: dict[str, Group] = {}
    collectives: list[Collective] = []
    for dump in _torch.recorder_dumps(collectives=True):
        found_groups, found_collectives = parse(dump)
        groups |= {group.name: group for group in found_groups}
        collectives += found_collectives
    known = [
        Group(
            name=name,
            description=members[name].description if name in members else group.description,
            ranks=members[name].ranks if name in members else group.ranks,
            last_enqueued=group.last_enqueued,
            last_started=group.last_started,
            last_completed=group.last_completed,
        )
        for name, group in groups.items()
    ]
    unused = [
        Group(name=g.name, description=g.description, ranks=g.ranks) for g in members.values() if g.name not in groups
    ]
    return tuple(known + unused), tuple(_newest(collectives))


def parse(dump: dict[str, Any]) -> tuple[list[Group], list[Collective]]:
    """Groups and collectives of one dump, as the JSON of ``_dump_fr_trace_json`` or ``_dump_nccl_trace_json``.

    Positions are kept per ``pg_id``, a number of this process; the name that ranks share is in the entries.
    """
    entries = dump.get("entries", [])
    names = {str(entry["pg_id"]): tuple(entry["process_group"]) for entry in entries}
    groups = []
    for pg_id, status in dump.get("pg_status", {}).items():
        name, description = names.get(pg_id, (pg_id, ""))
        groups.append(
            Group(
                name=str(name),
                description=str(description),
                last_enqueued=max(int(status["last_enqueued_collective"]), 0),
                last_started=int(status["last_started_collective"]),
                last_completed=max(int(status["last_completed_collective"]), 0),
            )
        )
    return groups, [_collective(entry) for entry in entries]


def _collective(entry: dict[str, Any]) -> Collective:
    backend, _, op = str(entry["profiling_name"]).partition(":")
    is_p2p = bool(entry.get("is_p2p"))
    return Collective(
        group=str(entry["process_group"][0]),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        op=op or backend,
        backend=backend if op else "",
        # Gloo's entries keep the state "scheduled" for ever; "retired" is what turns true at their end.
        completed=entry.get("state") == "completed" or bool(entry.get("retired")),
        started=entry.get("state") in ("started", "completed"),
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(map(str, entry.get("input_dtypes") or ())),
        created_ns=int(entry.get("time_created_ns") or 0),
        duration_ms=float(entry["duration_ms"]) if entry.get("duration_ms") is not None else None,
        timeout_ms=int(entry.get("timeout_ms") or 0),
        is_p2p=is_p2p,
    )


def _sizes(sizes: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, size)) for size in sizes or ())


def _newest(collectives: list[Collective]) -> list[Collective]:
    kept: dict[str, int] = defaultdict(int)
    newest = []
    for collective in sorted(collectives, key=lambda c: c.created_ns, reverse=True):
        kept[collective.group] += 1
        if kept[collective.group] <= KEPT_PER_GROUP or not collective.completed:
            newest.append(collective)
    return newest[::-1]
