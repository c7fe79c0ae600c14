"""Python frames of dumps and logs, which were made on another machine: whose code a line is, its path must tell."""

import re
from collections.abc import Sequence
from functools import lru_cache

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.reading.values import items, mapping, text, whole

_MOST = 60
_MOST_GIVEN = 1000
_NOT_USERS = re.compile(
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python3|[/\\]bin[/\\][\w.-]+$|^<(?!ipython-input)|^\?\?"
)
# C++ frames, with TORCH_FR_CPP_STACK.
_SOURCES = (".py", ">")


@lru_cache(maxsize=65_536)
def frame(file: str, line: int, function: str) -> Frame:
    """A frame; equal ones are the same object."""
    return Frame(file=file, line=line, function=function, user=_NOT_USERS.search(file) is None)


@lru_cache(maxsize=16_384)
def _same(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Ranks call alike: one copy of a stack is enough."""
    return stack


class Stacks:
    """The stacks of one dump, whose entries share their frames: each is read once. The dump must outlive this."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[Frame, ...]] = {}

    def read(self, value: object) -> tuple[Frame, ...]:
        """The stack of an entry, outermost frame first: in a dump the innermost is."""
        given = items(value)[:_MOST_GIVEN]
        same = tuple(map(id, given))
        if same not in self._known:
            self._known[same] = _read(given)
        return self._known[same]


def _read(given: Sequence[object]) -> tuple[Frame, ...]:
    found = []
    for item in given:
        fields = mapping(item)
        file = text(fields.get("filename"))
        if file.endswith(_SOURCES):
            found.append(frame(file, whole(fields.get("line")), text(fields.get("name"))))
    return stack(found[:_MOST][::-1])


def stack(frames: list[Frame]) -> tuple[Frame, ...]:
    """Frames, outermost first, as a stack; equal ones are the same object."""
    return _same(tuple(frames[-_MOST:]))
