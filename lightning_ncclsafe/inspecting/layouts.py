"""Learns the layout of Python objects from this interpreter's own objects, and reads the memory of a process.

So no table of versions is needed, but only processes that run the same interpreter file can be read.
"""

import ctypes
import errno
import os
import re
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from lightning_ncclsafe.probes.absent import or_none

WORD = struct.Struct("=Q")
# The last bits of a pointer may be tags (Python 3.14).
TAGS = 7
# No process has anything at lower or higher addresses, on any processor.
PAGE, HIGHEST = os.sysconf("SC_PAGESIZE"), 1 << 56
# How far structures are searched: nothing that is sought lies deeper.
_MOST_WORDS, _OF_INTERPRETER = 48, 4096
_TRIES, _THREAD = 8, "ncclsafe-layout"
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)")


class Memory:
    """The memory of a process, which runs while it is read.

    Raises:
        OSError: There is no such process, or no permission to read it.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> "Memory":
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)

    def read(self, address: int, size: int) -> bytes:
        """Up to ``size`` bytes from an address.

        Raises:
            OSError: Nothing is mapped there.
        """
        taken = os.pread(self._fd, size, address) if PAGE <= address < HIGHEST else b""
        # If the process has ended, the system reads nothing and reports no error.
        if size and not taken:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return taken

    def words(self, address: int, count: int = _MOST_WORDS) -> tuple[int, ...]:
        """Up to ``count`` words of the size of a pointer."""
        taken = self.read(address, count * WORD.size)
        return tuple(word for (word,) in WORD.iter_unpack(taken[: len(taken) // WORD.size * WORD.size]))

    def word(self, address: int) -> int:
        """One word."""
        return int(WORD.unpack(self._whole(address, WORD.size))[0])

    def real(self, address: int) -> float:
        """A C ``double``."""
        return float(struct.unpack("=d", self._whole(address, 8))[0])

    def number(self, address: int) -> int:
        """A C ``int``."""
        return int.from_bytes(self._whole(address, 4), sys.byteorder, signed=True)

    def text(self, address: int) -> str:
        """A short C string."""
        return self.read(address, 200).partition(b"\0")[0].decode()

    def _whole(self, address: int, size: int) -> bytes:
        taken = self.read(address, size)
        if len(taken) < size:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets of the parts of objects, in bytes; learned by :func:`layout`."""

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
    file_name: int
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
    real: int
    signs: dict[int, int]
    list_items: int
    names: int
    dictionary: int
    attributes: tuple[int, int | None]
    shared_names: int
    split_values: int
    names_of_module: int


def layout() -> Layout:
    """The layout of this interpreter's objects; learned once.

    Raises:
        LookupError: It cannot be learned.
    """
    with _learning:
        return _layout()


def is_known() -> bool:
    """Whether the layout can be learned; not of a free-threaded Python, whose objects change while it runs."""
    return not sysconfig.get_config_var("Py_GIL_DISABLED") and or_none(layout) is not None


_learning = threading.Lock()


@lru_cache(maxsize=1)
def _layout() -> Layout:
    learned: list[Layout] = []
    # A thread that starts or ends meanwhile disturbs it, so a layout counts once it was learned twice.
    for _ in range(_TRIES):
        found: list[Layout | None] = []
        # With a second thread, the list of threads has a link to follow.
        learns = threading.Thread(target=lambda found=found: found.append(or_none(_learned)), name=_THREAD)
        learns.start()
        learns.join()
        if found[0] is not None and found[0] in learned:
            return found[0]
        learned += filter(None, found)
    raise LookupError("the layout of this Python's objects is unknown")


def _learned() -> Layout:
    ends = threading.Event()
    # The newest thread is the first of the list. It must not be the one that learns: Python 3.13 also keeps that one as
    # the last holder of the GIL, which would be taken for the list if a thread starts meanwhile.
    newest = threading.Thread(target=ends.wait, name=_THREAD)
    newest.start()
    try:
        with Memory(os.getpid()) as own:
            return _learned_of(own)
    finally:
        ends.set()
        newest.join()


def _learned_of(own: Memory) -> Layout:
    state, thread = _asked("PyInterpreterState_Get"), _asked("PyThreadState_Get")
    head = _asked("PyInterpreterState_ThreadHead", state)
    error, outer = _raised()
    trace = error.__traceback__
    if trace is None:
        raise LookupError
    entry = TracebackType(trace, trace.tb_frame, 0x1234, 0x2345)
    code = trace.tb_frame.f_code
    numbered = code.replace(co_firstlineno=0x123456)
    handling, handled, previous = _of_handling(own, thread)
    text_kind, text_shift = _kind_of_text(own)
    text_length = _find(own.words(id(_TEXTS[0]), 8), len(_TEXTS[0]))
    name = next(iter(_NINETEEN))
    keys = _find_if(own.words(id(_NINETEEN), 8), lambda word: id(name) in own.words(word, 64))
    count_of_names = _find(own.words(own.word(id(_NINETEEN) + keys)), len(_NINETEEN))
    plain, whole = _Plain(), _Plain()
    # This makes the instance's dictionary.
    names = [*vars(whole)]
    return Layout(
        type=_find(own.words(id(error)), id(type(error))),
        type_name=_find_if(own.words(id(type(error))), lambda word: own.read(word, 9) == b"KeyError\0"),
        interpreter=_find(own.words(own_runtime(), _OF_INTERPRETER), state),
        threads=_find(own.words(state, _OF_INTERPRETER), head),
        next_thread=_find(own.words(head), _asked("PyThreadState_Next", head)),
        modules_of_sys=_find(own.words(state, _OF_INTERPRETER * 8), id(sys.__dict__)),
        handling=handling,
        handled=handled,
        previous=previous,
        args=_find(own.words(id(error)), id(error.args)),
        file_name=_find(own.words(id(_OF_FILE)), id(_OF_FILE.filename)),
        trace=_find(own.words(id(error)), id(trace)),
        context=_find(own.words(id(error)), id(outer)),
        cause=_find(own.words(id(error)), id(error.__cause__)),
        next_trace=_find(own.words(id(entry)), id(trace)),
        trace_frame=_find(own.words(id(entry)), id(trace.tb_frame)),
        trace_line=_find_number(own, id(entry), 0x2345),
        trace_instruction=_find_number(own, id(entry), 0x1234),
        code=_way_to(own, id(trace.tb_frame), code),
        file=_find(own.words(id(code)), id(code.co_filename)),
        function=_find(own.words(id(code)), id(code.co_name)),
        lines=_find(own.words(id(code)), id(code.co_linetable)),
        first_line=_find_number(own, id(numbered), 0x123456),
        items=_find(own.words(id(error.args)), id(error.args[0])),
        count=_find(own.words(id(_SEVENTEEN)), len(_SEVENTEEN)),
        keys=keys,
        text_length=text_length,
        text_kind=text_kind,
        text_shift=text_shift,
        ascii_data=sys.getsizeof("") - 1,
        other_data=sys.getsizeof("é" * 100) - 101,
        bytes_data=sys.getsizeof(b"") - 1,
        number=_find_number(own, id(_NUMBER), _NUMBER),
        real=_find(own.words(id(_REAL)), int(WORD.unpack(struct.pack("=d", _REAL))[0])),
        signs={own.word(id(number) + text_length): -1 if number < 0 else 1 for number in _NUMBERS},
        list_items=_find_if(own.words(id(_LIST), 8), lambda word: own.word(word) == id(_LIST[0])),
        names=count_of_names,
        # May lie before the object.
        dictionary=next(at for at in range(-40, 80, 8) if own.word(id(whole) + at) == id(vars(whole))),
        attributes=_values_of(own, id(plain), id(plain.first)),
        shared_names=_find_if(
            own.words(id(_Plain), 200),
            lambda word: own.word(word + count_of_names) == len(names) and {*map(id, names)} <= {*own.words(word, 64)},
        ),
        names_of_module=_find(own.words(id(sys), 16), id(sys.__dict__)),
        split_values=_find(own.words(own.word(id(vars(whole)) + keys + 8)), id(whole.first)),
    )


class _Plain:
    """A class whose instances have two attributes."""

    def __init__(self) -> None:
        self.first = ("x",)
        self.second = ("y",)


def _values_of(own: Memory, address: int, first: int) -> tuple[int, int | None]:
    """The offset of an instance's attributes: from the instance itself, or from what a pointer there points to."""
    for at in range(-40, 80, 8):
        word = own.word(address + at)
        if word == first:
            return at, None
        for beyond in (-1, 0, 1):
            there = or_none(partial(own.words, word + beyond, 4))
            if there is not None and (word + beyond) % 8 == 0 and first in there:
                return at, beyond + there.index(first) * 8
    # Before Python 3.11, each instance has a dictionary.
    return 0, None


_TEXTS = ("a" * 23, "é" * 23, "€" * 23, "😀" * 23)
_SEVENTEEN = (None,) * 17
_NUMBER, _REAL = 0x2345678, 1234.5
# Integers of a single digit; Python shares small ones.
_NUMBERS = (0, 1, -1, _NUMBER, -_NUMBER)
_LIST, _OF_FILE = [object()], OSError(1, "", "a file of this name")
_NINETEEN = {f"name {number}": None for number in range(19)}


def _asked(function: str, *addresses: int) -> int:
    """An address that a function of Python's C API returns."""
    called: Any = getattr(ctypes.pythonapi, function)
    called.restype, called.argtypes = ctypes.c_void_p, (ctypes.c_void_p,) * len(addresses)
    return int(called(*addresses))


def _raised() -> tuple[BaseException, BaseException]:
    """An exception with a cause and a context, and that context."""
    try:
        try:
            raise ValueError
        except ValueError as outer:
            raise KeyError("", outer) from IndexError()
    except KeyError as error:
        return error, error.args[1]


def _of_handling(own: Memory, thread: int) -> tuple[int, int, int]:
    """Offsets of a thread's entry of handled exceptions, and of the exception and the previous entry in that."""

    def inside(index: int) -> Iterator[tuple[int, ...]]:
        yield own.words(own.words(thread)[index], 6)

    before = own.words(thread)
    try:
        raise KeyError
    except KeyError as error:
        within, address = own.words(thread), id(error)
        for index, word in enumerate(within):
            if word > PAGE and word % 8 == 0 and word == before[index]:
                held = or_none(partial(own.words, word, 2)) or ()
                if address in held:
                    return index * 8, held.index(address) * 8, _find(next(inside(index)), word)
    raise LookupError


def _find(words: Sequence[int], wanted: int) -> int:
    return words.index(wanted) * WORD.size


def _find_if(words: Sequence[int], is_meant: Callable[[int], bool]) -> int:
    found = (index for index, word in enumerate(words) if word > PAGE and or_none(partial(is_meant, word)))
    return next(found) * WORD.size


def _find_number(own: Memory, address: int, wanted: int) -> int:
    taken = own.read(address, _MOST_WORDS * WORD.size)
    return next(at for at in range(0, len(taken), 4) if int.from_bytes(taken[at : at + 4], sys.byteorder) == wanted)


def _way_to(own: Memory, frame: int, code: CodeType) -> tuple[int, ...]:
    """The offsets from a frame to its code; since Python 3.11 by way of the interpreter's own frame."""
    for index, word in enumerate(own.words(frame, 16)):
        if word & ~TAGS == id(code):
            return (index * 8,)
        inner = (or_none(partial(own.words, word, 16)) or ()) if word > PAGE and word % 8 == 0 else ()
        for deeper, held in enumerate(inner):
            if held & ~TAGS == id(code) and word != id(code):
                return (index * 8, deeper * 8)
    raise LookupError


def _kind_of_text(own: Memory) -> tuple[int, int]:
    """The offset of a text's character width, and its first bit; four bits further is whether the text is ASCII."""
    for at in range(16, 48, 4):
        numbers = [own.number(id(text) + at) for text in _TEXTS]
        for shift in range(24):
            if [(number >> shift) & 31 for number in numbers] == [0b11001, 0b01001, 0b01010, 0b01100]:
                return at, shift
    raise LookupError


def own_runtime() -> int:
    """The address of this process's ``_PyRuntime``."""
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))


def runtime_of(pid: int) -> int | None:
    """The address of another process's ``_PyRuntime``; None if it comes from another file than this process's.

    Raises:
        OSError: The process cannot be read.
    """
    address = own_runtime()
    own = _mapped("self")
    file = next((key for begin, end, key in reversed(own) if key and begin <= address), None)
    base = next((begin for begin, _, key in own if key == file), None)
    there = next((begin for begin, _, key in _mapped(str(pid)) if key == file), None)
    if file is None or base is None or there is None:
        return None
    # Files of two Btrfs subvolumes may have the same numbers; the beginning of a file distinguishes builds.
    with Memory(os.getpid()) as of_own, Memory(pid) as of_other:
        is_same = of_own.read(base, PAGE) == of_other.read(there, PAGE)
    return there + address - base if is_same else None


def _mapped(pid: str) -> list[tuple[int, int, tuple[str, str] | None]]:
    """A process's mappings: begin, end, and device and inode of the file; None if there is no file."""
    text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    lines = map(_MAPPING.match, text.split("\n"))
    return [
        (int(found[1], 16), int(found[2], 16), (found[3], found[4]) if found[4] != "0" else None)
        for found in lines
        if found is not None
    ]
