"""A file with a Flight Recorder's dump, as pickle or as JSON, and the rank that wrote it, which its name tells."""

import json
import os
import re
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import Phase, Progress, RankFacts, RecordFacts
from lightning_ncclsafe.reading.entries import Parsed, is_dump, parsed
from lightning_ncclsafe.reading.errors import ReadingError
from lightning_ncclsafe.reading.unpickling import MOST_BYTES, MOST_CONTAINERS, unpickled
from lightning_ncclsafe.reading.values import MOST_RANKS

__all__ = ["MOST_BYTES", "MOST_CONTAINERS", "Dump", "from_json", "from_pickle", "rank_of", "read_dump"]

_SUFFIXES = re.compile(r"(?:\.(?:gz|json|pkl|pickle|pt|bin|dump|trace|txt|log))+$", re.IGNORECASE)
_RANK = re.compile(r"rank[-_=.]?(\d{1,7})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,7})(?!.*\d)")


def rank_of(path: str) -> int | None:
    """The rank that a file's name ends with, ``3`` of ``nccl_trace_rank_3``; None if there is no number in it."""
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
        raise ReadingError("it is a pickle, but no dump of PyTorch's Flight Recorder")
    found: dict[Any, Any] = plain
    return found


def from_json(data: bytes, most: int = MOST_CONTAINERS) -> object:
    """Plain data of JSON text, whatever it is.

    Args:
        data: The text.
        most: How many lists and dictionaries it may hold.

    Raises:
        ReadingError: If it is damaged, or would need much memory.
    """
    if data.count(b"[") + data.count(b"{") > most:
        raise ReadingError(f"it holds more than {most:,} lists or dictionaries")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReadingError(f"it is no whole JSON ({str(error)[:100]})") from error


class Dump(NamedTuple):
    """What a dump says of the rank that wrote it, and what other dumps may complete."""

    facts: RankFacts
    parsed: Parsed


def read_dump(dump: dict[Any, Any], rank: int) -> Dump:
    """What a dump says of the rank that wrote it."""
    found = parsed(dump)
    facts = RankFacts(
        rank=rank,
        progress=Progress(phase=Phase.UNKNOWN),
        groups=found.groups,
        collectives=found.collectives,
        record=RecordFacts(has_dump=True, is_idle=found.is_idle, is_empty=found.is_empty),
    )
    return Dump(facts, found)
