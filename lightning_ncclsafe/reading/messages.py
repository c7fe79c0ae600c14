"""The form of a message in a line of a log: a pattern, and what it means. A new message is one entry in a table."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Message(Generic[_Kind]):
    """Messages of one form.

    Attributes:
        kind: What it means.
        word: A word in all of them, which is searched for before the pattern is tried.
        pattern: The pattern, with named groups.
        words: The details, with the groups: ``"rank {rank} has {count}"``.
        code: The exit code that they stand for; None if a group gives it, or if it is unknown.
    """

    kind: _Kind
    word: str
    pattern: re.Pattern[str]
    words: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Found(Generic[_Kind]):
    """A message in a line: its details, and its groups, which are empty if absent."""

    message: Message[_Kind]
    words: str
    groups: dict[str, str]

    def of(self, *names: str) -> list[str]:
        """The values of the groups of these names that are present."""
        return [self.groups[name] for name in names if self.groups.get(name)]


def message(kind: _Kind, word: str, pattern: str, words: str = "", code: int | None = None) -> Message[_Kind]:
    """An entry of a table of messages."""
    return Message(kind, word, re.compile(pattern), words, code)


def found_in(text: str, messages: Iterable[Message[_Kind]]) -> Iterator[Found[_Kind]]:
    """The messages of a table that a line holds."""
    for one in messages:
        found = one.pattern.search(text) if one.word in text else None
        if found is not None:
            groups = {name: (said or "").strip() for name, said in found.groupdict().items()}
            yield Found(one, one.words.format(**groups), groups)
