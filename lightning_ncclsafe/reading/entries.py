"""Groups and collectives in a Flight Recorder's dump, whatever version of PyTorch wrote it.

Read by what is there, not by the version: 2.1 (torch 2.4) to 2.10 (torch 2.13) differ in keys that were added. JSON has
numbers as text where a pickle has numbers, no entries where there are none, and a single process group whose name is
not known yet under ``""``.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import Collective, Group
from lightning_ncclsafe.reading.frames import Stacks
from lightning_ncclsafe.reading.groups import MOST_GROUPS, Places, groups_of
from lightning_ncclsafe.reading.values import items, mapping, shapes, text, texts, whole
from lightning_ncclsafe.recorder.model import MOST_ENTRIES, Entry, Kind, Recorder, State, Work, backend_of, is_known

# A hang's cause lies in the last few entries of a group; ahead of it, a device's queue may be long.
_NEWEST = 64
_NEWEST_OF_ALL_GROUPS = 256
_LEAST_NEWEST = 8
_BEFORE = 32
_BEHIND = 32
_KEYS = ("entries", "pg_status", "pg_config")


class Parsed(NamedTuple):
    """What a dump comes to.

    Attributes:
        groups: The groups of which the position is known.
        collectives: The last collectives of each, oldest first; all around the oldest outstanding one are among them.
        is_idle: Whether nothing is outstanding.
        is_empty: Whether the dump says nothing at all.
        left_out: How many older entries were not read.
        unknown_backends: Back ends of which it is not known how they tell that a work has ended.
        places: Numbers, names and positions, for groups whose names other dumps may tell.
    """

    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    is_idle: bool
    is_empty: bool
    left_out: int
    unknown_backends: tuple[str, ...]
    places: Places


def is_dump(plain: object) -> bool:
    """Whether plain data is what a Flight Recorder dumps."""
    return isinstance(plain, dict) and any(key in plain for key in _KEYS)


def parsed(dump: dict[Any, Any]) -> Parsed:
    """What a dump says.

    Args:
        dump: The dump; see :func:`is_dump`.
    """
    given = items(dump.get("entries"))
    entries = [entry for item in given[-MOST_ENTRIES:] if (entry := mapping(item))]
    status = {str(key): mapping(value) for key, value in mapping(dump.get("pg_status")).items()}
    recorder = Recorder(entries, status)
    places = Places.of(dump, recorder)
    kept = _kept(recorder)
    stacks = Stacks()
    calls = [call for work in kept for call in _collectives(work, stacks)]
    backends = {backend_of(work.entry)[0] for work in kept}
    return Parsed(
        groups=groups_of(places),
        collectives=tuple(sorted(calls, key=lambda call: call.created_ns)),
        is_idle=recorder.is_idle,
        is_empty=not entries and not status,
        left_out=max(len(given) - MOST_ENTRIES, 0),
        unknown_backends=tuple(sorted(name[:40] for name in backends if not is_known(name))),
        places=places,
    )


def _kept(recorder: Recorder[Any]) -> list[Work[Any]]:
    """Of each group the newest, and those around the oldest one that has not ended: that is where a group stands."""
    by_group: dict[str, list[Work[Any]]] = defaultdict(list)
    for work in recorder.works:
        by_group[work.group].append(work)
    newest = min(max(_NEWEST_OF_ALL_GROUPS // max(len(by_group), 1), _LEAST_NEWEST), _NEWEST)
    return [work for works in list(by_group.values())[:MOST_GROUPS] for work in _around(works, newest)]


def _around(works: Sequence[Work[Any]], newest: int) -> list[Work[Any]]:
    older = works[:-newest]
    stands_at = next((index for index, work in enumerate(older) if work.is_open and work.kind is Kind.COLLECTIVE), None)
    first = len(older) if stands_at is None else max(stands_at - _BEFORE, 0)
    around = range(first, min(first + _BEFORE + _BEHIND, len(older)))
    between = [work for work in older if work.is_open and work.kind is not Kind.COLLECTIVE][:_BEHIND]
    kept = {id(work): work for work in (*between, *(older[index] for index in around), *works[-newest:])}
    return list(kept.values())


def _collectives(work: Work[Any], stacks: Stacks) -> list[Collective]:
    """Of a batch, each send and receive: its whole says what became of them."""
    return [_collective(entry, work, stacks) for entry in work.parts or (work.entry,)]


def _collective(entry: Entry, work: Work[Any], stacks: Stacks) -> Collective:
    backend, op = backend_of(entry)
    duration = entry.get("duration_ms")
    return Collective(
        group=text(work.group),
        seq=work.seq,
        op=text(op),
        backend=text(backend),
        completed=not work.is_open,
        started=work.entry.get("state") in ("started", "completed"),
        launching=work.state in (State.LAUNCHING, State.UNKNOWN),
        gave_up=work.gave_up,
        input_sizes=shapes(entry.get("input_sizes")),
        output_sizes=shapes(entry.get("output_sizes")),
        dtypes=texts(entry.get("input_dtypes")),
        created_ns=max(whole(entry.get("time_created_ns")), 0),
        duration_ms=float(duration) if isinstance(duration, float) and abs(duration) < 1e12 else None,
        timeout_ms=max(whole(entry.get("timeout_ms")), 0),
        is_p2p=work.kind is not Kind.COLLECTIVE,
        stack=stacks.read(entry.get("frames")),
    )
