"""Collectives and groups that PyTorch's Flight Recorder has recorded on this rank."""

import time
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Any

from lightning_ncclsafe._torch import process_groups, recorders
from lightning_ncclsafe.facts import Collective, Frame, Group, NotRecorded, UnrecordedGroup
from lightning_ncclsafe.probes.process.stacks import call_site, frames_to_show
from lightning_ncclsafe.recorder.model import HOOK, Entry, Recorder, State, Work, WorkKind, backend_of

# Per group. One rank reads the entries of all ranks, so in larger jobs, each rank reports fewer. NCCL compares no
# calls: ranks may only wait in vain many steps after one of them has skipped a call.
_MOST_KEPT, _KEPT_OF_SMALL_JOBS = 256, 256 * 32
_USUALLY_KEPT, _KEPT_OF_JOB, _LEAST_KEPT = 48, 48 * 1024, 8

# Begins the site of a call that was not made from Python.
NATIVE = "native"

Position = tuple[object, ...]
Names = dict[str, tuple[str, str]]


def position() -> Position:
    """The counters of this rank's groups, comparable for equality only: they change when a collective, a send or a
    receive is called, starts or completes; in an unrecorded group, when one is called. Takes about 0.05 ms.
    """
    statuses = tuple(
        (group, status["last_enqueued_collective"], status["last_completed_collective"])
        for dump in recorders.dumps(collectives=False)
        for group, status in dump.get("pg_status", {}).items()
    )
    return *process_groups.counts(), *statuses


class FlightRecorder:
    """Reads the recorders of this process, and remembers the names of groups after their entries are overwritten.

    Attributes:
        unrecorded: Groups that were in use, but not in the recorders, at the last read.
    """

    def __init__(self) -> None:
        self._names: list[Names] = []
        self.unrecorded: tuple[UnrecordedGroup, ...] = ()

    def read(self) -> tuple[tuple[Group, ...], tuple[Collective, ...]]:
        """The groups of this rank, and the last entries of each, oldest first, including all outstanding ones."""
        members = {group.name: group for group in process_groups.own_groups()}
        # Before the dumps: calls made meanwhile are recorded, too.
        calls = process_groups.group_calls()
        groups: dict[str, Group] = {}
        collectives: list[Collective] = []
        can_be_read = recorders.driver_answers()
        for index, dump in enumerate(recorders.dumps(collectives=True) if can_be_read else ()):
            if index == len(self._names):
                self._names.append({})
            found_groups, found_collectives = parse(dump, self._names[index])
            # A hook on NCCL's groups writes to the other recorder, with less detail than NCCL's own.
            hooked = groups.keys() & {call.group for call in found_collectives if call.backend == HOOK}
            groups |= {group.name: group for group in found_groups if group.name not in hooked}
            collectives += [collective for collective in found_collectives if collective.group not in hooked]
        kept = kept_per_group(max((len(group.ranks) for group in members.values()), default=0))
        known = [
            replace(group, description=members[name].description, ranks=members[name].ranks)
            if name in members
            else group
            for name, group in groups.items()
        ]
        recorded = {collective.backend for collective in collectives}
        self.unrecorded = tuple(
            UnrecordedGroup(
                name=call.name,
                why=_why_not_recorded(call, recorded) if can_be_read else NotRecorded.DRIVER_SILENT,
                description=members[call.name].description if call.name in members else "",
                backend=call.backend,
                calls=-1 if call.called is None else call.called,
            )
            for call in calls
            if call.name not in groups and call.called != 0
        )
        used = groups.keys() | {group.name for group in self.unrecorded}
        unused = (Group(name=m.name, description=m.description, ranks=m.ranks) for m in members.values())
        return (*known, *(group for group in unused if group.name not in used)), tuple(_telling(collectives, kept))


def with_call_sites(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """The same collectives with their call sites, if the recorders of this process still have them.

    Takes some 10 µs for each entry of the recorders; reads no file.
    """
    recorded = (entry for entries in recorders.entries(stacks=True) for entry in entries)
    frames = {entry.get("time_created_ns"): entry.get("frames") or () for entry in recorded}
    sites: dict[tuple[int, ...], tuple[str, tuple[Frame, ...]]] = {}

    def located(collective: Collective) -> Collective:
        own = frames.get(collective.created_ns)
        if own is None:
            return collective
        if not own:
            # Autograd's threads, which run the backward pass on a GPU, have no Python stack.
            is_exchange = collective.op.startswith(("all_to_all", "alltoall"))
            sizes = "" if is_exchange else collective.input_sizes  # these depend on a rank's data
            return replace(collective, site=f"{NATIVE}:{collective.op}:{sizes}")
        # The dump contains each frame once.
        key = tuple(map(id, own))
        if key not in sites:
            sites[key] = call_site((frame["filename"], frame["line"], frame["name"]) for frame in own)
        site, stack = sites[key]
        return replace(collective, site=site, stack=stack)

    return tuple(map(located, collectives))


def with_source(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """The same collectives with the source lines of their call sites, each call site once.

    Reads source files, which may be slow on slow storage.
    """
    every = tuple(collectives)
    newest = {collective.site: index for index, collective in enumerate(every)}
    stacks = dict(zip(newest.values(), frames_to_show(every[index].stack for index in newest.values()), strict=True))
    return tuple(replace(collective, stack=stacks.get(index, ())) for index, collective in enumerate(every))


def _why_not_recorded(call: process_groups.GroupCalls, recorded: Set[str]) -> NotRecorded:
    """Why a group that was used, or may have been, is not in the recorders."""
    if not recorders.is_known(call.backend):
        return NotRecorded.UNKNOWN_BACKEND
    if not recorders.can_be_read(call.backend):
        return NotRecorded.NO_DUMP
    return NotRecorded.LOST if call.backend in recorded else NotRecorded.NO_ENTRY


def parse(dump: dict[str, Any], names: Names) -> tuple[list[Group], list[Collective]]:
    """Groups and collectives of one dump, as the JSON of ``_dump_fr_trace_json`` or ``_dump_nccl_trace_json``.

    Args:
        names: Known names and descriptions by ``pg_id``; those in the dump are added. A ``pg_id`` is a number of this
            process, and may mean another group on another rank.
    """
    recorder = Recorder(dump.get("entries", []), dump.get("pg_status", {}), time.time_ns())
    names.update(recorder.names)
    groups = [
        Group(
            name=names[number][0],
            description=names[number][1],
            last_enqueued=position.called,
            last_started=position.started,
            last_completed=position.completed,
            is_mixed=position.is_mixed,
        )
        for number, position in recorder.positions.items()
        if number in names and number in dump.get("pg_status", {})
    ]
    return groups, [_collective(entry, work) for work in recorder.works for entry in work.parts or (work.entry,)]


def _collective(entry: Entry, work: Work[Any]) -> Collective:
    backend, op = backend_of(entry)
    return Collective(
        group=work.group,
        seq=work.seq,
        op=op,
        backend=backend,
        completed=not work.is_open,
        started=work.entry.get("state") in ("started", "completed"),
        launching=work.state is State.LAUNCHING,
        gave_up=work.gave_up,
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(map(str, entry.get("input_dtypes") or ())),
        created_ns=int(entry.get("time_created_ns") or 0),
        duration_ms=float(entry["duration_ms"]) if entry.get("duration_ms") is not None else None,
        timeout_ms=int(entry.get("timeout_ms") or 0),
        is_p2p=work.kind is not WorkKind.COLLECTIVE,
    )


def _sizes(sizes: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, size)) for size in sizes or ())


def kept_per_group(world_size: int) -> int:
    """How many completed entries of each group are reported; of outstanding ones, up to three times as many."""
    ranks = max(world_size, 1)
    few, many = min(_KEPT_OF_SMALL_JOBS // ranks, _MOST_KEPT), min(_KEPT_OF_JOB // ranks, _USUALLY_KEPT)
    return max(few, many, _LEAST_KEPT)


def _telling(collectives: list[Collective], most: int) -> list[Collective]:
    """The newest completed and the outstanding entries of each group, oldest first; of many, the oldest and the newest.

    A host may be hundreds of calls ahead of its device. The calls around the oldest outstanding one show where ranks
    diverged, and the newest ones where the host is.
    """
    ended: dict[str, list[Collective]] = defaultdict(list)
    outstanding: dict[str, list[Collective]] = defaultdict(list)
    for collective in sorted(collectives, key=lambda c: c.created_ns):
        (ended if collective.completed else outstanding)[collective.group].append(collective)
    kept = [one for own in ended.values() for one in own[-most:]]
    for own in outstanding.values():
        kept += own if len(own) <= 3 * most else [*own[: 2 * most], *own[-most:]]
    return sorted(kept, key=lambda c: c.created_ns)
