"""A Flight Recorder's dump, as pickle or as JSON, and what it means. The file's name has the rank that wrote it.

Only instructions that make plain data are followed in a pickle. The newest entries of each group are kept, and those
around the oldest one that has not ended.
"""

import io
import json
import operator
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import Collective, Phase, Progress, RankFacts, RecordFacts
from lightning_ncclsafe.reading.groups import MOST_GROUPS, Places, groups_of
from lightning_ncclsafe.reading.values import (
    MOST_RANKS,
    DumpStacks,
    ReadingError,
    items,
    mapping,
    shapes,
    text,
    texts,
    whole,
)
from lightning_ncclsafe.recorder.model import (
    MOST_ENTRIES,
    Entry,
    Recorder,
    State,
    Work,
    WorkKind,
    backend_of,
    is_known,
    number_of,
    seq_of,
)

MOST_BYTES = 64 * 1024 * 1024
"""The largest dump that is read. An entry has about 200 bytes, as has its stack; PyTorch keeps 2,000 by default."""
MOST_CONTAINERS = 5_000_000

# Instructions for plain data whose length is fixed, the frequent ones first, because they take most of the time; times
# are whole numbers of eight bytes. A memo's number of four bytes must be below 2 to the power of 24.
_FIXED = re.compile(
    rb"(?:h.|[N\x88\x89\])}(teaus\x85-\x87\x94]|r...\x00|J....|[Kq\x80].|M..|\x8a\x08........|j...\x00|[G\x95]........)"
    rb"{1,4096}",
    re.DOTALL,
)
# Instructions with a length field, and the size of that field: text, bytes, whole numbers.
_COUNTED = {**dict.fromkeys(b"U\x8cC\x8a", 1), **dict.fromkeys(b"TXB\x8b", 4), **dict.fromkeys(b"\x8d\x8e", 8)}
_LENGTHS = {**dict.fromkeys(b"Kqh\x80", 2), ord("M"): 3, **dict.fromkeys(b"Jjr", 5), **dict.fromkeys(b"G\x95", 9)}
_STOP = ord(".")
# For these, Python's unpickler calls find_class, which names what was to be imported.
_NAMES = b"c\x93i"

# The cause of a hang is in the last few entries of a group, but a device's queue behind it may be long.
_NEWEST = 64
_NEWEST_OF_ALL_GROUPS = 256
_LEAST_NEWEST = 8
_BEFORE = 32
_BEHIND = 32
_STATES = ("scheduled", "started", "completed")
_KEYS = ("entries", "pg_status", "pg_config")

_SUFFIXES = re.compile(r"(?:\.(?:gz|json|pkl|pickle|pt|bin|dump|trace|txt|log))+$", re.IGNORECASE)
_RANK = re.compile(r"rank[-_=.]?(\d{1,7})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,7})(?!.*\d)")


class _RefusingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ReadingError(f"refused: it would call {module[:80]}.{name[:80]}, and a dump is plain data")


def unpickled(data: bytes) -> Any:
    """The plain data in a pickle: lists, tuples, dictionaries, numbers, text.

    Raises:
        ReadingError: If it is damaged, asks for anything to be imported, or would need much memory.
    """
    # These take about sixty times as much memory as their instructions have bytes. Text may contain these bytes, too.
    if sum(map(data.count, (b"]", b"}", b"\x85"))) > MOST_CONTAINERS:
        raise ReadingError(f"it holds more than {MOST_CONTAINERS:,} lists or dictionaries")
    _look_over(data)
    try:
        # Buffered: reading each instruction's bytes by itself takes three times as long.
        return _RefusingUnpickler(io.BufferedReader(io.BytesIO(data))).load()
    except ReadingError:
        raise
    # Python's unpickler may raise anything for a damaged pickle.
    except Exception as error:
        raise ReadingError(f"it is a damaged pickle ({type(error).__name__}: {str(error)[:100]})") from error


def _look_over(data: bytes) -> None:
    """Checks the instructions without executing any, up to the first one that would import something."""
    position, end = 0, len(data)
    while position < end:
        fixed = _FIXED.match(data, position)
        if fixed:
            position = fixed.end()
            continue
        code = data[position]
        if code == _STOP or code in _NAMES:
            return
        if code not in _COUNTED:
            if end - position < _LENGTHS.get(code, 0):
                break
            raise ReadingError(f"it is not plain data: it has the instruction {bytes([code])!r} at byte {position:,}")
        start = position + 1 + _COUNTED[code]
        position = start + int.from_bytes(data[position + 1 : start], "little")
    raise ReadingError("it is a truncated pickle")


class Dump(NamedTuple):
    """What a dump says.

    Attributes:
        facts: About the rank that wrote it. Its collectives are the last of each group, oldest first; all around the
            oldest outstanding one are among them.
        left_out: How many older entries were not read.
        unknown_backends: Back ends whose way of recording the end of a work is not known.
        places: Numbers, names and positions of groups; other dumps may complete the names.
    """

    facts: RankFacts
    left_out: int
    unknown_backends: tuple[str, ...]
    places: Places


def is_dump(plain: object) -> bool:
    """Whether plain data is what a Flight Recorder dumps."""
    return isinstance(plain, dict) and any(key in plain for key in _KEYS)


def read_dump(dump: dict[Any, Any], rank: int) -> Dump:
    """What a dump says.

    Args:
        dump: The dump; see :func:`is_dump`.
        rank: The rank that wrote it.

    Raises:
        ReadingError: If entries lack what every version writes.
    """
    given = items(dump.get("entries"))
    entries = _in_order([entry for item in given[-MOST_ENTRIES:] if (entry := mapping(item))])
    lacks_some = _lacks_some(entries)
    entries = _of_use(entries)
    if not all(map(_is_whole, entries)):
        raise ReadingError("it is damaged: some of its entries have no sequence number or no state")
    status = {str(key): mapping(value) for key, value in mapping(dump.get("pg_status")).items()}
    recorder = Recorder(entries, status)
    places = Places.of(dump, recorder)
    has_called = bool(entries or status)
    is_blank = not has_called and bool(places.members)
    kept = _kept(recorder)
    stacks, numbers = DumpStacks(), {} if recorder.only_open or lacks_some else _pair_numbers(entries)
    # As recorded: a clock that is set back does not change the order of calls.
    places_of = {id(entry): place for place, entry in enumerate(entries)}
    in_order = sorted(
        ((places_of[id(entry)], entry, work) for work in kept for entry in work.parts or (work.entry,)),
        key=operator.itemgetter(0),
    )
    backends = {backend_of(work.entry)[0] for work in kept}
    facts = RankFacts(
        rank=rank,
        progress=Progress(phase=Phase.UNKNOWN),
        groups=groups_of(places),
        collectives=tuple(_collective(entry, work, stacks, numbers.get(id(entry))) for _, entry, work in in_order),
        record=RecordFacts(
            has_dump=True,
            is_idle=recorder.is_idle or is_blank,
            is_empty=not has_called and not is_blank,
            is_blank=is_blank,
            is_moving=recorder.is_moving,
            has_lost=recorder.has_lost or lacks_some,
        ),
    )
    unknown = sorted(name[:40] for name in backends if not is_known(name))
    return Dump(facts, max(len(given) - MOST_ENTRIES, 0), tuple(unknown), places)


def _in_order(entries: list[Entry]) -> list[Entry]:
    """The entries in the order of recording."""
    numbers: list[Any] = [entry.get("record_id") for entry in entries]
    if not all(type(number) is int for number in numbers) or numbers == sorted(numbers):
        return entries
    return sorted(entries, key=operator.itemgetter("record_id"))


def _lacks_some(entries: list[Entry]) -> bool:
    """Whether entries are missing between others. A ring never loses these: a dump has all, or the open ones alone."""
    if not any(entry.get("state") == "completed" for entry in entries):
        return False
    first, last = entries[0].get("record_id"), entries[-1].get("record_id")
    return type(first) is int and type(last) is int and last - first >= len(entries)


def _is_whole(entry: Entry) -> bool:
    """Whether it has the fields that every version writes."""
    key = "p2p_seq_id" if entry.get("is_p2p") is True else "collective_seq_id"
    return whole(entry.get(key, entry.get("seq_id")), -1) >= 0 and entry.get("state") in _STATES


def _of_use(entries: list[Entry]) -> list[Entry]:
    """The entries without the oldest collectives of each group, which have all ended: most of a full ring.

    Groups that also send and receive keep all, to find out which entries belong together.
    """
    by_group: dict[Any, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        number = entry.get("pg_id")
        by_group[number if type(number) is int else number_of(entry)].append(index)
    left_out: set[int] = set()
    for indices in by_group.values():
        ended = next(
            (place for place, index in enumerate(indices) if not _has_surely_ended(entries[index])), len(indices)
        )
        older = min(ended, len(indices) - _NEWEST) - _BEFORE
        if older > 0 and not any(_sends_or_receives(entries[index]) for index in indices):
            # The first one stays, as groups are listed in the order of their first use.
            left_out.update(indices[1:older])
    return [entry for index, entry in enumerate(entries) if index not in left_out] if left_out else entries


def _has_surely_ended(entry: Entry) -> bool:
    return entry.get("state") == "completed" and entry.get("retired", True) is True


def _sends_or_receives(entry: Entry) -> bool:
    if entry.get("is_p2p") is True:
        return True
    name = entry.get("profiling_name")
    return type(name) is str and name.endswith("coalesced")


def _kept(recorder: Recorder[Any]) -> list[Work[Any]]:
    """The newest works of each group, and those around its oldest open one."""
    by_group: dict[str, list[Work[Any]]] = defaultdict(list)
    for work in recorder.works:
        by_group[work.group].append(work)
    newest = min(max(_NEWEST_OF_ALL_GROUPS // max(len(by_group), 1), _LEAST_NEWEST), _NEWEST)
    return [work for works in list(by_group.values())[:MOST_GROUPS] for work in _around(works, newest)]


def _around(works: Sequence[Work[Any]], newest: int) -> list[Work[Any]]:
    older = works[:-newest]
    stands_at = next(
        (index for index, work in enumerate(older) if work.is_open and work.kind is WorkKind.COLLECTIVE), None
    )
    first = len(older) if stands_at is None else max(stands_at - _BEFORE, 0)
    around = range(first, min(first + _BEFORE + _BEHIND, len(older)))
    between = [work for work in older if work.is_open and work.kind is not WorkKind.COLLECTIVE][:_BEHIND]
    kept = {id(work): work for work in (*between, *(older[index] for index in around), *works[-newest:])}
    return list(kept.values())


def _pair_numbers(entries: Sequence[Entry]) -> dict[int, int]:
    """By the identity of a send's or receive's entry: its number among those between the same two ranks. Only in groups
    whose first one is still in the ring."""
    found: dict[int, int] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    is_counted: dict[str, bool] = {}
    for place, entry in enumerate(entries):
        if entry.get("is_p2p") is not True:
            continue
        number = number_of(entry)
        is_first = seq_of(entry) == 1 and (place > 0 or entry.get("record_id") == 0)
        if is_counted.setdefault(number, is_first):
            end = (number, backend_of(entry)[1])
            counts[end] += 1
            found[id(entry)] = counts[end]
    return found


def _collective(entry: Entry, work: Work[Any], stacks: DumpStacks, pair_number: int | None) -> Collective:
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
        is_p2p=work.kind is not WorkKind.COLLECTIVE,
        pair_number=pair_number,
        stack=stacks.read(entry.get("frames")),
    )


def rank_of(path: str) -> int | None:
    """The rank at the end of a file's name, ``3`` in ``nccl_trace_rank_3``; None if it has no number."""
    stem = _SUFFIXES.sub("", os.path.basename(path))
    found = _RANK.findall(stem)[-1:] or _LAST_NUMBER.findall(stem)[-1:]
    return int(found[0]) if found and int(found[0]) < MOST_RANKS else None


def from_pickle(data: bytes) -> dict[Any, Any]:
    """The dump in a pickle.

    Raises:
        ReadingError: If it is damaged, no dump, or anything but plain data.
    """
    plain = unpickled(data)
    if not is_dump(plain):
        raise ReadingError("it is a pickle, but not a dump of PyTorch's Flight Recorder")
    found: dict[Any, Any] = plain
    return found


def from_json(data: bytes, most: int = MOST_CONTAINERS) -> object:
    """Plain data of JSON text, whatever it is.

    Args:
        most: How many lists and dictionaries it may hold.

    Raises:
        ReadingError: If it is damaged, or would need much memory.
    """
    if data.count(b"[") + data.count(b"{") > most:
        raise ReadingError(f"it holds more than {most:,} lists or dictionaries")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReadingError(f"it is JSON that is damaged or was cut off ({str(error)[:100]})") from error
