"""Python objects of another process, read out of its memory as py-spy reads stacks: it runs on, and nothing is changed.

Where in an object what lies, this interpreter's own objects tell, so that only a process of the same interpreter can be
read, and no table of versions is needed. All that is read may be nonsense, as the other process goes on meanwhile.
"""

import ctypes
import os
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from lightning_ncclsafe.probes.absent import or_none

_WORD = struct.Struct("=Q")
# Of the structures that are searched for something: more than any of them has before it.
_MOST_WORDS, _OF_INTERPRETER, _OF_NAMES = 48, 4096, 2048
_MOST_THREADS, _MOST_STACK, _MOST_CHAIN, _MOST_ITEMS = 4096, 120, 8, 4
_MOST_CHARACTERS = 2000
_MOST_TABLE = 1 << 16
# The last bits of a pointer may say something of their own (Python 3.14).
_TAGS = 7
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception of another process.

    Attributes:
        type: Class name.
        message: Its text, as far as it is made of texts and numbers.
        places: File, line and function of each frame that it has left so far, outermost first.
    """

    type: str
    message: str = ""
    places: tuple[tuple[str, int, str], ...] = ()


def handled_by(pid: int) -> tuple[Raised, ...]:
    """The exceptions that a main thread is handling: in an ``except`` or ``finally`` block, or while a ``with`` ends.

    Args:
        pid: Process id.

    Returns:
        The one that was raised last first, then those during whose handling, or because of which, it was raised.
        Nothing where there is none, or this process cannot tell.
    """
    return or_none(lambda: _Interpreter(pid).handled()) or ()


def left_by(pid: int) -> tuple[Raised, ...]:
    """The exceptions that have left the program of a process which has not ended yet; as ``handled_by`` gives them."""
    return or_none(lambda: _Interpreter(pid).printed()) or ()


class Memory:
    """Memory of a process.

    Args:
        pid: Process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, address: int, size: int) -> bytes:
        """So many bytes, or as many as there are.

        Raises:
            OSError: There are none, or they may not be read.
        """
        taken = ctypes.create_string_buffer(size)
        here = _Part(ctypes.addressof(taken), size)
        # Page by page: what lies behind the end is no reason for giving nothing.
        bounds = [address, *range((address // _PAGE + 1) * _PAGE, address + size, _PAGE), address + size]
        there = (_Part * (len(bounds) - 1))(*(_Part(begin, end - begin) for begin, end in pairwise(bounds)))
        count = _readv(self._pid, ctypes.byref(here), 1, there, len(there), 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return taken.raw[:count]

    def words(self, address: int, count: int = _MOST_WORDS) -> tuple[int, ...]:
        """So many words, of the size of a pointer, or as many as there are."""
        taken = self.read(address, count * _WORD.size)
        return tuple(word for (word,) in _WORD.iter_unpack(taken[: len(taken) // _WORD.size * _WORD.size]))

    def word(self, address: int) -> int:
        """One of them."""
        return int(_WORD.unpack(self.read(address, _WORD.size))[0])

    def number(self, address: int) -> int:
        """A C ``int``."""
        return int.from_bytes(self.read(address, 4), sys.byteorder, signed=True)

    def text(self, address: int) -> str:
        """A C string, a short one."""
        return self.read(address, 200).partition(b"\0")[0].decode()


class _Part(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_PAGE = os.sysconf("SC_PAGESIZE")
_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where what lies, in bytes from the beginning; learned by :func:`_layout`."""

    type: int
    type_name: int
    interpreter: int
    threads: int
    next_thread: int
    modules_of_sys: int
    handling: int
    handled: int
    previous: int
    args: int
    trace: int
    context: int
    cause: int
    next_trace: int
    trace_frame: int
    trace_line: int
    trace_instruction: int
    code: tuple[int, ...]
    file: int
    function: int
    lines: int
    first_line: int
    items: int
    count: int
    keys: int
    text_length: int
    text_kind: int
    text_shift: int
    ascii_data: int
    other_data: int
    bytes_data: int
    number: int


class _Interpreter:
    """That of another process, if it is the same program as this one's."""

    def __init__(self, pid: int) -> None:
        self._memory = Memory(pid)
        self._pid = pid

    @cached_property
    def _at(self) -> _Layout:
        return _layout()

    @cached_property
    def _state(self) -> int:
        address = _runtime_of(self._pid)
        if address is None:
            raise LookupError("it is not the same Python")
        return self._memory.word(address + self._at.interpreter)

    def handled(self) -> tuple[Raised, ...]:
        item = self._memory.word(self._main_thread() + self._at.handling)
        for _ in range(_MOST_CHAIN):
            # What runs in a generator has its own, and before that its caller's.
            error = self._memory.word(item + self._at.handled)
            if error and self._is_exception(error):
                return tuple(self._chain(error))
            item = self._memory.word(item + self._at.previous)
            if not item:
                break
        return ()

    def printed(self) -> tuple[Raised, ...]:
        error = self._named(self._memory.word(self._state + self._at.modules_of_sys), "last_value")
        return tuple(self._chain(error)) if error and self._is_exception(error) else ()

    def _main_thread(self) -> int:
        """Every other one has been put before it."""
        thread = self._memory.word(self._state + self._at.threads)
        for _ in range(_MOST_THREADS):
            following = self._memory.word(thread + self._at.next_thread)
            if not following:
                return thread
            thread = following
        raise LookupError("too many threads")

    def _is_exception(self, address: int) -> bool:
        return address % 8 == 0 and self._type(address) != "NoneType" and self._is_a(address + self._at.args, "tuple")

    def _is_a(self, place: int, name: str) -> bool:
        held = self._memory.word(place)
        return bool(held) and self._type(held) == name

    def _type(self, address: int) -> str:
        kind = self._memory.word(address + self._at.type)
        return self._memory.text(self._memory.word(kind + self._at.type_name)).rpartition(".")[2]

    def _chain(self, error: int) -> Iterator[Raised]:
        seen: set[int] = set()
        while error and error not in seen and len(seen) < _MOST_CHAIN:
            seen.add(error)
            yield Raised(
                type=self._type(error),
                message=self._message(error),
                places=tuple(self._places(self._memory.word(error + self._at.trace))),
            )
            error = self._memory.word(error + self._at.cause) or self._memory.word(error + self._at.context)

    def _message(self, error: int) -> str:
        args = self._memory.word(error + self._at.args)
        count = min(self._memory.word(args + self._at.count), _MOST_ITEMS)
        items = self._memory.words(args + self._at.items, count) if count else ()
        told = [or_none(lambda item=item: self._value(item)) or "…" for item in items]
        return told[0] if len(told) == 1 else f"({', '.join(told)})" if told else ""

    def _value(self, address: int) -> str:
        kind = self._type(address)
        if kind == "str":
            return self._text(address)
        if kind == "int":
            return str(self._memory.number(address + self._at.number))
        return f"<{kind}>"

    def _text(self, address: int) -> str:
        length = min(self._memory.word(address + self._at.text_length), _MOST_CHARACTERS)
        flags = self._memory.number(address + self._at.text_kind) >> self._at.text_shift
        width, is_ascii = flags & 7, bool(flags >> 4 & 1)
        taken = self._memory.read(address + (self._at.ascii_data if is_ascii else self._at.other_data), length * width)
        return taken.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width], errors="replace")

    def _places(self, trace: int) -> Iterator[tuple[str, int, str]]:
        for _ in range(_MOST_STACK):
            if not trace or self._type(trace) != "traceback":
                return
            code = self._memory.word(trace + self._at.trace_frame)
            for offset in self._at.code:
                code = self._memory.word(code + offset) & ~_TAGS
            file, function = (self._text(self._memory.word(code + at)) for at in (self._at.file, self._at.function))
            yield file, self._line(trace, code), function
            trace = self._memory.word(trace + self._at.next_trace)

    def _line(self, trace: int, code: int) -> int:
        line = self._memory.number(trace + self._at.trace_line)
        if line > 0:
            return line
        # Python 3.12 and newer work it out when somebody asks.
        table = self._memory.word(code + self._at.lines)
        size = min(self._memory.word(table + self._at.count), _MOST_TABLE)
        first = self._memory.number(code + self._at.first_line)
        instruction = self._memory.number(trace + self._at.trace_instruction)
        return line_in(self._memory.read(table + self._at.bytes_data, size), first, instruction)

    def _named(self, names: int, name: str) -> int:
        """What a dictionary has under a name: it stands behind the name, whatever else there is for each."""
        words = self._memory.words(self._memory.word(names + self._at.keys), _OF_NAMES)
        for key, value in pairwise(words):
            if key > _PAGE and key % 8 == 0 and or_none(lambda key=key: self._is_named(key, name)):
                return value
        return 0

    def _is_named(self, address: int, name: str) -> bool:
        return (
            self._memory.word(address + self._at.text_length) == len(name)
            and self._type(address) == "str"
            and self._text(address) == name
        )


def line_in(table: bytes, first: int, instruction: int) -> int:
    """The line of an instruction, by the table of a code object of Python 3.11 and newer.

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
    while True:
        part, index = table[index], index + 1
        value |= (part & 63) << shift
        shift += 6
        if not part & 64:
            return (-(value >> 1) if value & 1 else value >> 1), index


@lru_cache(maxsize=1)
def _layout() -> _Layout:
    """Learned in a thread, which is then the first of them."""
    learned: list[_Layout] = []
    learns = threading.Thread(target=lambda: learned.append(_learned()), name="ncclsafe-layout")
    learns.start()
    learns.join()
    return learned[0]


def _learned() -> _Layout:
    own, api = Memory(os.getpid()), ctypes.pythonapi
    state, head = _address("PyInterpreterState_Get"), _address("PyThreadState_Get")
    next_of: Any = api.PyThreadState_Next
    next_of.restype, next_of.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    error, outer = _raised()
    trace = error.__traceback__
    if trace is None:
        raise LookupError
    told = TracebackType(trace, trace.tb_frame, 0x1234, 0x2345)
    code = trace.tb_frame.f_code
    numbered = code.replace(co_firstlineno=0x123456)
    handling, handled, previous = _of_handling(own, head)
    texts = [own.words(id(text), 8) for text in _TEXTS]
    text_kind, text_shift = _kind_of_text()
    return _Layout(
        type=_find(own.words(id(error)), id(type(error))),
        type_name=_find_if(own.words(id(type(error))), lambda word: own.read(word, 9) == b"KeyError\0"),
        interpreter=_find(own.words(_own_runtime(), _OF_INTERPRETER), state),
        threads=_find(own.words(state, _OF_INTERPRETER), head),
        next_thread=_find(own.words(head), int(next_of(head) or 0)),
        modules_of_sys=_find(own.words(state, _OF_INTERPRETER * 8), id(sys.__dict__)),
        handling=handling,
        handled=handled,
        previous=previous,
        args=_find(own.words(id(error)), id(error.args)),
        trace=_find(own.words(id(error)), id(trace)),
        context=_find(own.words(id(error)), id(outer)),
        cause=_find(own.words(id(error)), id(error.__cause__)),
        next_trace=_find(own.words(id(told)), id(trace)),
        trace_frame=_find(own.words(id(told)), id(trace.tb_frame)),
        trace_line=_find_number(own, id(told), 0x2345),
        trace_instruction=_find_number(own, id(told), 0x1234),
        code=_way_to(own, id(trace.tb_frame), code),
        file=_find(own.words(id(code)), id(code.co_filename)),
        function=_find(own.words(id(code)), id(code.co_name)),
        lines=_find(own.words(id(code)), id(code.co_linetable)),
        first_line=_find_number(own, id(numbered), 0x123456),
        items=_find(own.words(id(error.args)), id(error.args[0])),
        count=_find(own.words(id(_SEVENTEEN)), len(_SEVENTEEN)),
        keys=_find_if(own.words(id(sys.__dict__), 8), lambda word: id(_key("version")) in own.words(word, _OF_NAMES)),
        text_length=_find(texts[0], len(_TEXTS[0])),
        text_kind=text_kind,
        text_shift=text_shift,
        ascii_data=sys.getsizeof("") - 1,
        other_data=sys.getsizeof("é" * 100) - 101,
        bytes_data=sys.getsizeof(b"") - 1,
        number=_find_number(own, id(_NUMBER), _NUMBER),
    )


_TEXTS = ("a" * 23, "é" * 23, "€" * 23, "😀" * 23)
_SEVENTEEN = (None,) * 17
_NUMBER = 0x2345678


def _key(name: str) -> str:
    return next(key for key in sys.__dict__ if key == name)


def _address(function: str) -> int:
    called: Any = getattr(ctypes.pythonapi, function)
    called.restype = ctypes.c_void_p
    return int(called())


def _raised() -> tuple[BaseException, BaseException]:
    """An exception that has all that one can have, and what was handled before."""
    try:
        try:
            raise ValueError
        except ValueError as outer:
            raise KeyError("", outer) from IndexError()
    except KeyError as error:
        return error, error.args[1]


def _of_handling(own: Memory, thread: int) -> tuple[int, int, int]:
    """Where a thread has what it handles, where that is in it, and where what was handled before."""

    def inside(index: int) -> Iterator[tuple[int, ...]]:
        yield own.words(own.words(thread)[index], 6)

    before = own.words(thread)
    try:
        raise KeyError
    except KeyError as error:
        within, address = own.words(thread), id(error)
        for index, word in enumerate(within):
            if word > _PAGE and word % 8 == 0 and word == before[index]:
                held = or_none(lambda word=word: own.words(word, 2)) or ()
                if address in held:
                    return index * 8, held.index(address) * 8, _find(next(inside(index)), word)
    raise LookupError


def _find(words: Sequence[int], wanted: int) -> int:
    return words.index(wanted) * _WORD.size


def _find_if(words: Sequence[int], is_meant: Callable[[int], bool]) -> int:
    found = (index for index, word in enumerate(words) if word > _PAGE and or_none(lambda word=word: is_meant(word)))
    return next(found) * _WORD.size


def _find_number(own: Memory, address: int, wanted: int) -> int:
    taken = own.read(address, _MOST_WORDS * _WORD.size)
    return next(at for at in range(0, len(taken), 4) if int.from_bytes(taken[at : at + 4], sys.byteorder) == wanted)


def _way_to(own: Memory, frame: int, code: CodeType) -> tuple[int, ...]:
    """From a frame to its code: since Python 3.11 by what the interpreter has beside it."""
    for index, word in enumerate(own.words(frame, 16)):
        if word & ~_TAGS == id(code):
            return (index * 8,)
        inner = (or_none(lambda word=word: own.words(word, 16)) or ()) if word > _PAGE and word % 8 == 0 else ()
        for deeper, held in enumerate(inner):
            if held & ~_TAGS == id(code) and word != id(code):
                return (index * 8, deeper * 8)
    raise LookupError


def _kind_of_text() -> tuple[int, int]:
    """Where a text has the width of its characters, and in which bits; four bits on it says whether it is ASCII."""
    own = Memory(os.getpid())
    for at in range(16, 48, 4):
        numbers = [own.number(id(text) + at) for text in _TEXTS]
        for shift in range(24):
            if [(number >> shift) & 31 for number in numbers] == [0b11001, 0b01001, 0b01010, 0b01100]:
                return at, shift
    raise LookupError


def _own_runtime() -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))


def _runtime_of(pid: int) -> int | None:
    """Where another process has it, if the file that it lies in is the same as this process's; else None."""
    address = _own_runtime()
    own = _mapped("self")
    file = next((key for begin, end, key in reversed(own) if key and begin <= address), None)
    base = next((begin for begin, _, key in own if key == file), None)
    there = next((begin for begin, _, key in _mapped(str(pid)) if key == file), None)
    return there + address - base if file and base is not None and there is not None else None


def _mapped(pid: str) -> list[tuple[int, int, tuple[str, str] | None]]:
    """What files a process has in its memory: begin, end, and device and number of the file."""
    lines = (_MAPPING.match(line) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return [
        (int(found[1], 16), int(found[2], 16), (found[3], found[4]) if found[4] != "0" else None)
        for found in lines
        if found is not None
    ]
