"""Reads Python objects from the memory of another process, as py-spy reads stacks, without stopping or changing it.

The process runs meanwhile, so anything that is read may be nonsense; nonsense is left out.
"""

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType

from lightning_ncclsafe.inspecting.layouts import HIGHEST, PAGE, TAGS, WORD, Memory, layout, own_runtime, runtime_of
from lightning_ncclsafe.probes.absent import or_none

# In words: the largest head of a dictionary, and one of its entries with its place in the table of hashes.
_OF_HEAD, _OF_ENTRY = 64, 5
_MOST_NAMES, _MOST_ENTRIES = 2000, 20_000
_MOST_THREADS, _MOST_STACK, _MOST_CHAIN, _MOST_ITEMS = 4096, 120, 8, 4
_MOST_CHARACTERS = 2000
_MOST_TABLE = 1 << 16

Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadException:
    """An exception of another process.

    Attributes:
        type: Class name.
        message: Its message, as far as that consists of texts and numbers.
        places: File, line and function of each frame in its traceback, outermost first.
    """

    type: str
    message: str = ""
    places: tuple[tuple[str, int, str], ...] = ()


class Interpreter:
    """The Python interpreter of another process.

    Attributes:
        is_same: Whether it is the same Python as this process's; if not, nothing can be read.
    """

    def __init__(self, pid: int) -> None:
        self._runtime = runtime_of(pid)
        self.is_same = self._runtime is not None
        self._at, self._memory = layout(), Memory(pid)
        self._shift = (self._runtime or 0) - own_runtime()
        self._kinds: dict[int, str] = {}
        self._known: dict[int, dict[str, tuple[int, int]]] = {}

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(self, *raised: object) -> None:
        self._memory.__exit__()

    @property
    def _state(self) -> int:
        return self._memory.word((self._runtime or 0) + self._at.interpreter)

    def handled(self) -> tuple[ReadException, ...]:
        """The exceptions that its main thread handles, in ``except``, ``finally`` or at the end of a ``with`` block.

        The latest one first, then its cause or context, and so on.
        """
        item = self._memory.word(self._main_thread() + self._at.handling)
        for _ in range(_MOST_CHAIN):
            error = self._memory.word(item + self._at.handled)
            if error and self._is_exception(error):
                return tuple(self._chain(error))
            # A generator has its own entry, which links to its caller's.
            item = self._memory.word(item + self._at.previous)
            if not item:
                break
        return ()

    def printed(self) -> tuple[ReadException, ...]:
        """The exceptions that have left its program, in the same order, if its process still runs."""
        error = self._named(self._memory.word(self._state + self._at.modules_of_sys), "last_value")
        return tuple(self._chain(error)) if error and self._is_exception(error) else ()

    def value(self, address: int, *names: str) -> Plain:
        """An attribute of an attribute of … an object: a number, a text, or None.

        Raises:
            LookupError: There is no such attribute, or it has another type.
        """
        found = self._attribute(address, names)
        if self._is(found, str):
            return self._text(found)
        if self._is(found, int):
            return self._number(found)
        if self._is(found, bool):
            return bool(self._number(found))
        if self._is(found, float):
            return self._memory.real(found + self._at.real)
        if self._is(found, type(None)):
            return None
        raise LookupError(f"a {self._kind(found)}")

    def kinds(self, address: int, *names: str) -> tuple[str, ...]:
        """Class names of the items of a list that is an attribute of an attribute of … an object.

        Raises:
            LookupError: There is no such list.
        """
        found = self._attribute(address, names)
        if not self._is(found, list):
            raise LookupError
        count = min(self._memory.word(found + self._at.count), _MOST_NAMES)
        items = self._memory.words(self._memory.word(found + self._at.list_items), count) if count else ()
        return tuple(map(self._kind, items))

    def named(self, module: str, name: str) -> int:
        """The address of a module's global variable.

        Raises:
            LookupError: There is no such module or variable.
        """
        modules = self._named(self._memory.word(self._state + self._at.modules_of_sys), "modules")
        for key, held in pairwise(self._words_of(modules)):
            length = or_none(partial(self._memory.word, key + self._at.text_length))
            if length == len(module) and self._name(key) == module:
                return self._named(self._memory.word(held + self._at.names_of_module), name)
        raise LookupError(name)

    def under(self, dictionary: int, key: int) -> int:
        """The address of a dictionary's value.

        Args:
            dictionary: Address of the dictionary.
            key: Address of the key.

        Raises:
            LookupError: There is no such key.
        """
        words = self._words_of(dictionary)
        if key not in words[:-1]:
            raise LookupError
        return words[words.index(key) + 1]

    def numbers_of(self, dictionary: int) -> tuple[int, ...]:
        """The keys of a dictionary that are small integers from 0."""
        words = self._words_of(dictionary)
        count = words[self._at.names // WORD.size]
        # The word before each key is its hash, which is the number itself.
        pairs = ((number, key) for number, key in pairwise(words) if number < _MOST_ENTRIES)
        return tuple(number for number, key in pairs if or_none(partial(self._number_at, key)) == number)[:count]

    def _words_of(self, dictionary: int) -> tuple[int, ...]:
        """The words of a dictionary's keys and values, and some beyond them."""
        keys = self._memory.word(dictionary + self._at.keys)
        count = min(self._memory.word(keys + self._at.names), _MOST_ENTRIES)
        return self._memory.words(keys, _OF_HEAD + count * _OF_ENTRY)

    def _number_at(self, address: int) -> int:
        if not self._is(address, int):
            raise LookupError
        return self._number(address)

    def _attribute(self, address: int, names: Sequence[str]) -> int:
        for name in names:
            address = self._held(address, name)
            if not address:
                raise LookupError(name)
        return address

    def _main_thread(self) -> int:
        """The last thread in the list: each new thread is inserted at its front."""
        thread = self._memory.word(self._state + self._at.threads)
        for _ in range(_MOST_THREADS):
            following = self._memory.word(thread + self._at.next_thread)
            if not following:
                return thread
            thread = following
        raise LookupError("too many threads")

    def _is_exception(self, address: int) -> bool:
        if address % 8 or self._is(address, type(None)):
            return False
        args = self._memory.word(address + self._at.args)
        return bool(args) and self._is(args, tuple)

    def _is(self, address: int, kind: type) -> bool:
        """Whether an object has exactly this built-in type, by address: other types may have the same name."""
        return self._memory.word(address + self._at.type) == id(kind) + self._shift

    def _kind(self, address: int) -> str:
        kind = self._memory.word(address + self._at.type)
        if kind not in self._kinds:
            name = self._memory.text(self._memory.word(kind + self._at.type_name))
            self._kinds[kind] = name.rpartition(".")[2]
        return self._kinds[kind]

    def _chain(self, error: int) -> Iterator[ReadException]:
        seen: set[int] = set()
        while error and error not in seen and len(seen) < _MOST_CHAIN:
            seen.add(error)
            yield ReadException(
                type=self._kind(error),
                message=self._message(error),
                places=tuple(self._places(self._memory.word(error + self._at.trace))),
            )
            error = self._memory.word(error + self._at.cause) or self._memory.word(error + self._at.context)

    def _message(self, error: int) -> str:
        args = self._memory.word(error + self._at.args)
        count = self._memory.word(args + self._at.count)
        items = self._memory.words(args + self._at.items, min(count, _MOST_ITEMS)) if count else ()
        parts = ["…" if (words := or_none(partial(self._words, item))) is None else words for item in items]
        parts += ["…"] if count > _MOST_ITEMS else []
        kind = getattr(builtins, self._kind(error), None)
        if isinstance(kind, type) and issubclass(kind, OSError) and len(parts) > 1:
            file = self._name(self._memory.word(error + self._at.file_name))
            return f"[Errno {parts[0]}] {parts[1]}{f': {file!r}' if file else ''}"
        if len(parts) == 1:
            return repr(parts[0]) if kind is KeyError and self._is(items[0], str) else parts[0]
        return f"({', '.join(parts)})" if parts else ""

    def _words(self, address: int) -> str:
        if self._is(address, str):
            return self._text(address)
        return str(self._number(address)) if self._is(address, int) else f"<{self._kind(address)}>"

    def _number(self, address: int) -> int:
        head = self._memory.word(address + self._at.text_length)
        if head not in self._at.signs:
            raise LookupError("it is too large")
        return self._at.signs[head] * self._memory.number(address + self._at.number)

    def _text(self, address: int) -> str:
        length = min(self._memory.word(address + self._at.text_length), _MOST_CHARACTERS)
        flags = self._memory.number(address + self._at.text_kind) >> self._at.text_shift
        width, is_ascii = flags & 7, bool(flags >> 4 & 1)
        taken = self._memory.read(address + (self._at.ascii_data if is_ascii else self._at.other_data), length * width)
        return taken.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width], errors="replace")

    def _places(self, trace: int) -> Iterator[tuple[str, int, str]]:
        for _ in range(_MOST_STACK):
            if not trace or not self._is(trace, TracebackType):
                return
            code = self._memory.word(trace + self._at.trace_frame)
            for offset in self._at.code:
                code = self._memory.word(code + offset) & ~TAGS
            file, function = (self._text(self._memory.word(code + at)) for at in (self._at.file, self._at.function))
            yield file, self._line(trace, code), function
            trace = self._memory.word(trace + self._at.next_trace)

    def _line(self, trace: int, code: int) -> int:
        line = self._memory.number(trace + self._at.trace_line)
        if line > 0:
            return line
        # Python 3.12 and newer compute it on demand.
        table = self._memory.word(code + self._at.lines)
        size = min(self._memory.word(table + self._at.count), _MOST_TABLE)
        first = self._memory.number(code + self._at.first_line)
        instruction = self._memory.number(trace + self._at.trace_instruction)
        return line_in(self._memory.read(table + self._at.bytes_data, size), first, instruction)

    def _held(self, address: int, name: str) -> int:
        """The address of an instance's attribute; 0 if there is none of this name."""
        inside = self._memory.word(address + self._at.dictionary)
        if inside and inside % 8 == 0 and or_none(partial(self._is, inside, dict)):
            return self._named(inside, name)
        kind = self._memory.word(address + self._at.type)
        place = self._names(self._memory.word(kind + self._at.shared_names)).get(name)
        if place is None:
            return 0
        at, beyond = self._at.attributes
        values = address + at if beyond is None else self._memory.word(address + at) + beyond
        return self._memory.word(values + place[0] * WORD.size)

    def _named(self, names: int, name: str) -> int:
        """The address of a dictionary's value under a name; 0 if there is none."""
        place = self._names(self._memory.word(names + self._at.keys)).get(name)
        values = self._memory.word(names + self._at.keys + WORD.size)
        if place is None or not values:
            return place[1] if place is not None else 0
        return self._memory.word(values + self._at.split_values + place[0] * WORD.size)

    def _names(self, keys: int) -> dict[str, tuple[int, int]]:
        """The names among a dictionary's keys, each with its index and the word behind it."""
        if keys not in self._known:
            count = min(self._memory.word(keys + self._at.names), _MOST_NAMES)
            words = self._memory.words(keys, _OF_HEAD + count * _OF_ENTRY)
            # An entry is a name and its value, or a hash, a name and its value.
            found = (tuple(self._names_in(words, count, step)) for step in (2, 3))
            self._known[keys] = {name: (index, value) for index, name, value in max(found, key=len)}
        return self._known[keys]

    def _names_in(self, words: Sequence[int], count: int, step: int) -> Iterator[tuple[int, str, int]]:
        begin = next((index for index, word in enumerate(words) if self._name(word)), len(words))
        for index, at in enumerate(range(begin, min(begin + count * step, len(words) - 1), step)):
            if name := self._name(words[at]):
                yield index, name, words[at + 1]

    def _name(self, address: int) -> str:
        if not PAGE < address < HIGHEST or address % 8:
            return ""
        return or_none(lambda: self._text(address) if self._is(address, str) else "") or ""


def line_in(table: bytes, first: int, instruction: int) -> int:
    """The line of an instruction, from the line table of a code object of Python 3.11 or newer.

    Args:
        table: ``co_linetable``.
        first: ``co_firstlineno``.
        instruction: Offset of the instruction in bytes.
    """
    line, begins, index = first, 0, 0
    while index < len(table):
        head, index = table[index], index + 1
        kind, ends = head >> 3 & 15, begins + 2 * ((head & 7) + 1)
        if kind in (13, 14):
            shift, index = _signed(table, index)
            line += shift
        elif 10 <= kind <= 12:
            line += kind - 10
        if begins <= instruction < ends:
            return line
        while index < len(table) and not table[index] & 128:
            index += 1
        begins = ends
    return first


def _signed(table: bytes, index: int) -> tuple[int, int]:
    value = shift = 0
    while index < len(table):
        part, index = table[index], index + 1
        value |= (part & 63) << shift
        shift += 6
        if not part & 64:
            break
    return (-(value >> 1) if value & 1 else value >> 1), index
