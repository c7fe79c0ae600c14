"""The form of a message that a line of a log holds: a pattern, and what its words come to. A new one is one entry."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Message(Generic[_Kind]):
    """Messages of one form.

    Attributes:
        kind: What is said.
        word: What they all have in them; it is looked for before the pattern is tried.
        pattern: Names its groups, after what they say.
        words: The rest of it, with the groups in it: ``"rank {rank} has {count}"``.
        code: The exit code that they stand for; None where a group has it, or nothing says it.
    """

    kind: _Kind
    word: str
    pattern: re.Pattern[str]
    words: str = ""
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Found(Generic[_Kind]):
    """A message in a line: what it says in words, and its groups; of those that are not there, nothing."""

    message: Message[_Kind]
    words: str
    groups: dict[str, str]

    def of(self, *names: str) -> list[str]:
        """What the groups of these names say, as far as they are there."""
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
