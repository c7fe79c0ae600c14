"""Ranks, durations, sizes and locations in words, for all findings and reports."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from pathlib import PurePath

from lightning_ncclsafe.facts import PAST, Collective, Frame, group_and_backend

LISTED = 8
"""How many of a kind a finding lists at most: ranks, calls, places."""

_UNITS = ((1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB"))
_MAX_RUNS = 12
_LISTED_TENSORS = 6
# "is|are": singular and plural.
_FORMS = re.compile(r"([\w']+)\|([\w']+)")


def ranks_words(ranks: Iterable[int]) -> str:
    """``"rank 3"``, ``"ranks 1-3, 7"``; long lists are cut and counted."""
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    runs = _runs(numbers)
    text = ", ".join(runs[:_MAX_RUNS])
    if len(runs) > _MAX_RUNS:
        text += f", … ({len(numbers)} ranks)"
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {text}"


def _runs(numbers: Sequence[int]) -> list[str]:
    runs = []
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return runs


def verb(ranks: Sequence[int], one: str, many: str) -> str:
    """The form of a verb for this number of ranks."""
    return one if len(ranks) == 1 else many


def clause(ranks: Sequence[int], words: str) -> str:
    """A clause with these ranks as its subject: ``clause((3,), "is|are late")`` is ``"rank 3 is late"``."""
    form = r"\1" if len(ranks) == 1 else r"\2"
    return f"{ranks_words(ranks)} {_FORMS.sub(form, words)}"


def capitalised(text: str) -> str:
    """The text with its first letter in upper case, otherwise unchanged."""
    return text[:1].upper() + text[1:]


def duration_words(seconds: float) -> str:
    """``"0.4 s"``, ``"23 s"``, ``"4 min 12 s"``, ``"30 min"``, ``"2 h 5 min"``, ``"2 h"``."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 >= 60 else "")


def size_words(count: int) -> str:
    """``"512 bytes"``, ``"12.3 GB"`` (decimal units)."""
    for unit, name in _UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def counted(count: int, unit: str) -> str:
    """``"1 batch"``, ``"1,250 batches"``."""
    return f"{count:,} {unit if count == 1 else plural(unit)}"


def plural(unit: str) -> str:
    """``"batches"``, ``"entries"``, ``"ranks"``."""
    return f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}es" if unit.endswith("h") else f"{unit}s"


def condition_words(condition: str) -> str:
    """A condition with its line number, on one line and marked as code: ``"`if rank == 0:` (line 41)"``."""
    code, mark, line = " ".join(condition.split()).rpartition(" (line ")
    return f"`{code}` (line {line}" if mark else f"`{line}`"


def under_words(condition: str) -> str:
    """``"under `if rank == 0:` (line 41)"``, or ``"past the `return` under `if rank != 0:` (line 41)"``."""
    jump, test = _jump_of(condition)
    return f"past the `{jump}` under {condition_words(test)}" if jump else f"under {condition_words(condition)}"


def encloses_words(condition: str, frame: Frame | None) -> str:
    """How a condition on the rank decides who reaches a frame; a sentence."""
    jump, test = _jump_of(condition)
    if jump:
        return f"The `{jump}` under {condition_words(test)} keeps other ranks from {location_of(frame)}."
    return f"{condition_words(condition)} encloses {location_of(frame)}."


def condition_place(condition: str, frame: Frame | None) -> str:
    """``"path:line in function"`` of a condition on the rank around a frame; empty for a decorator, and without one."""
    _, is_numbered, line = condition.rpartition("(line ")
    return f"{frame.file}:{line[:-1]} in {frame.function}" if frame is not None and is_numbered else ""


def _jump_of(condition: str) -> tuple[str, str]:
    """The jump past which a line is, and the condition of that jump; empty if it is not past one."""
    if not condition.startswith(PAST):
        return "", ""
    jump, _, test = condition.removeprefix(PAST).partition(" under ")
    return jump, test


def location_of(frame: Frame | None) -> str:
    """``"path:line in function"`` with the path as Python has it; empty without a frame."""
    return "" if frame is None else f"{frame.file}:{frame.line} in {frame.function}"


def line_words(frame: Frame) -> str:
    """The same with the code of the line, if it is known: ``"path:line in function: loss.backward()"``."""
    return location_of(frame) + (f": {frame.code}" if frame.code else "")


def short_location(frame: Frame) -> str:
    """``"train.py:42 in evaluate"``: for sentences, if the full path is given elsewhere."""
    return short_place(location_of(frame))


def place_words(frame: Frame | None) -> str:
    """``"at train.py:42 in evaluate"``; empty without a frame."""
    return f"at {short_location(frame)}" if frame is not None else ""


def at_words(frame: Frame | None) -> str:
    """The same behind other words: ``" at train.py:42 in evaluate"``."""
    return f" {place_words(frame)}" if frame is not None else ""


def short_place(place: str) -> str:
    """The same of ``"path:line in function"``, as facts have it."""
    path, colon, rest = place.rpartition(":")
    return f"{PurePath(path).name}{colon}{rest}"


def numel(collective: Collective) -> int:
    """Number of elements of this collective's inputs, or of its outputs if it has no inputs."""
    return elements(collective.input_sizes) or elements(collective.output_sizes)


def elements(shapes: Iterable[tuple[int, ...]]) -> int:
    """Number of elements of tensors with these shapes."""
    return sum(map(prod, shapes))


def collective_words(collective: Collective, meaning: str = "") -> str:
    """``"all_reduce (sequence number 345, 1,024 elements of float32)"``; names the group unless it is the default.

    The collective's purpose comes first if it is given: ``"DDP's gradient all-reduce (all_reduce, …)"``.
    """
    parts = [*([collective.op] if meaning else ()), f"sequence number {collective.seq}", *_amount(collective)]
    if collective.group not in ("", "0"):
        parts.append(group_words(collective.group))
    return f"{meaning or collective.op} ({', '.join(parts)})"


def call_words(collective: Collective) -> str:
    """Only the operation and its size, ``"all_reduce (1,024 elements of float32)"``."""
    return " ".join([collective.op, *(f"({amount})" for amount in _amount(collective))])


def _amount(collective: Collective) -> list[str]:
    count = numel(collective)
    kind = f" of {collective.dtypes[0]}" if collective.dtypes else ""
    sizes = tuple(map(prod, collective.input_sizes))
    if collective.op.endswith("_coalesced") and 1 < len(sizes) <= _LISTED_TENSORS:
        # Ranks may have the same tensors in different orders.
        return [f"{' + '.join(f'{size:,}' for size in sizes)} elements{kind}"]
    if count:
        return [f"{counted(count, 'element')}{kind}"]
    # A barrier has no shapes.
    is_empty = any(0 in shape for shape in (*collective.input_sizes, *collective.output_sizes))
    return ["an empty tensor"] if is_empty else []


def apart_words(parts: Iterable[str]) -> str:
    """``"3 on ranks 0, 2 but 4 on rank 1"``: no comma of a list of ranks is taken for one between what differs."""
    listed = [*parts]
    if len(listed) == 2:
        return " but ".join(listed)
    return ("; " if any(", " in part for part in listed) else ", ").join(listed)


def group_words(name: str, description: str = "") -> str:
    """``"the default group"``, ``"group '7' (tensor_parallel)"``, ``"the default group (gloo)"``."""
    group, backend = group_and_backend(name)
    described = description.removesuffix(f":{backend}") if backend else description
    about = [described] if described not in ("", "undefined", "default_pg") else []
    about += [backend] if backend else []
    words = "the default group" if group == "0" else f"group {group!r}"
    return f"{words} ({', '.join(about)})" if about else words


def joined(sentences: Iterable[str]) -> str:
    """Sentences in one paragraph, without the empty ones."""
    return " ".join(sentence for sentence in sentences if sentence)
