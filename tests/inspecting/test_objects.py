"""Objects of another process: exceptions that it handles, attributes of what it has, and the group it waits in."""

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest
import torch.distributed as dist

from lightning_ncclsafe.facts import Group
from lightning_ncclsafe.inspecting import layouts
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.inspecting.objects import Interpreter, ReadException, line_in
from lightning_ncclsafe.inspecting.rank_objects import group_of

BEGIN = """
    import contextlib, sys, threading, time

    class Odd(RuntimeError):
        pass

    def look_up(names):
        return names[
            "läbel"
        ]

    @contextlib.contextmanager
    def cleaning_up():
        try:
            yield
        finally:
            wait()

    def wait():
        print(*map(id, kept), flush=True)
        sys.stdin.read()

    kept = []
    threading.Thread(target=sys.stdin.read, daemon=True).start()
"""
HELD = """
    try:
        look_up({})
    except KeyError:
        wait()
"""
LAST = """
    try:
        look_up({})
    except KeyError as error:
        try:
            raise Odd("bad", 7) from error
        except Odd:
            wait()
"""
FINALLY = """
    try:
        look_up({})
    finally:
        wait()
"""
WITH = """
    with cleaning_up():
        look_up({})
"""
CAUGHT = """
    try:
        look_up({})
    except KeyError:
        pass
    wait()
"""
LEFT = """
    threading.Thread(target=wait).start()
    open("/nowhere/at/all")
"""
OBJECTS = """
    class Counts:
        def __init__(self):
            self.ready, self.done, self.limit, self.stop = 3, -1, 1.5, False
            self.name, self.none, self.all, self.large = "fit", None, [Odd(), 1], 5 << 40

    class Many:
        def __init__(self):
            for number in range(40):
                setattr(self, f"name{number}", number)
            self.counts = Counts()

    class Named:
        def __init__(self):
            for kind in (str, int, float, bool, list, type(None)):
                setattr(self, kind.__name__, type(kind.__name__, (), {})())

    looked_into = Counts()
    looked_into.__dict__["more"] = 8
    kept += [Many(), looked_into, Named()]
    wait()
"""


@contextmanager
def running(tmp_path: Path, program: str, python: str = sys.executable) -> Iterator[tuple[int, list[int]]]:
    """A program that waits, and where what it has kept is."""
    path = tmp_path / "program.py"
    path.write_text(dedent(BEGIN) + dedent(program))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([python, "-S", str(path)], **pipes)  # type: ignore[call-overload]
    try:
        yield process.pid, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate(timeout=10)


def handled(pid: int) -> tuple[ReadException, ...]:
    with Interpreter(pid) as read:
        return read.handled()


def printed(pid: int) -> tuple[ReadException, ...]:
    with Interpreter(pid) as read:
        return read.printed()


def is_same(pid: int) -> bool:
    with Interpreter(pid) as read:
        return read.is_same


def line_of(tmp_path: Path, code: str) -> int:
    return 1 + next(
        number for number, line in enumerate((tmp_path / "program.py").read_text().splitlines()) if code in line
    )


@pytest.mark.parametrize(
    ("program", "types"), [(HELD, ["KeyError"]), (FINALLY, ["KeyError"]), (WITH, ["KeyError"]), (CAUGHT, [])]
)
def test_only_the_exception_being_handled_is_read(tmp_path: Path, program: str, types: list[str]) -> None:
    with running(tmp_path, program) as (pid, _):
        found = handled(pid)
        assert printed(pid) == ()
    assert [one.type for one in found] == types
    for one in found:
        # The call begins a line before the key that it fails for.
        line = line_of(tmp_path, "return names[")
        assert one.message == "'läbel'" and one.places[-1] == (str(tmp_path / "program.py"), line, "look_up")


def test_the_latest_exception_comes_first(tmp_path: Path) -> None:
    with running(tmp_path, LAST) as (pid, _):
        last, first = handled(pid)
    assert (last.type, last.message) == ("Odd", "(bad, 7)")
    assert last.places == ((str(tmp_path / "program.py"), line_of(tmp_path, "raise Odd"), "<module>"),)
    assert first.type == "KeyError"


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        ('raise Odd("")', ""),
        ("raise Odd", ""),
        ("raise Odd(1 << 80)", "…"),
        ("raise Odd(1, 2, 3, 4, 5)", "(1, 2, 3, 4, …)"),
        ("raise KeyError(7)", "7"),
        ('open("/nowhere/at/all")', "[Errno 2] No such file or directory: '/nowhere/at/all'"),
        # Names of files that are no text are left out.
        ('import os; os.listdir(b"datasets/train/shard-000.tar")', "[Errno 2] No such file or directory"),
    ],
)
def test_a_message_is_read_as_far_as_possible(tmp_path: Path, raises: str, message: str) -> None:
    program = f"""
    try:
        {raises}
    except Exception:
        wait()
"""
    with running(tmp_path, program) as (pid, _):
        (found,) = handled(pid)
    assert found.message == message


def test_an_uncaught_exception_is_read_while_a_thread_runs(tmp_path: Path) -> None:
    with running(tmp_path, LEFT) as (pid, _):
        (found,) = wait_for_end(pid)
        assert handled(pid) == ()
    assert (found.type, found.message) == (
        "FileNotFoundError",
        "[Errno 2] No such file or directory: '/nowhere/at/all'",
    )
    assert found.places[0][1] == line_of(tmp_path, "open(")


def wait_for_end(pid: int) -> tuple[ReadException, ...]:
    """The thread may be there before the exception has left the program."""
    for _ in range(1_000_000):
        if found := printed(pid):
            return found
    raise TimeoutError


def test_attributes_are_read_from_any_instance_layout(tmp_path: Path) -> None:
    with running(tmp_path, OBJECTS) as (pid, (many, looked_into, named)), Interpreter(pid) as read:
        assert [read.value(many, f"name{number}") for number in (0, 39)] == [0, 39]
        for owner, names in ((many, ("counts",)), (looked_into, ())):
            found = [read.value(owner, *names, name) for name in ("ready", "done", "limit", "stop", "name", "none")]
            assert found == [3, -1, 1.5, False, "fit", None]
            assert read.kinds(owner, *names, "all") == ("Odd", "int")
            for absent in ("nothing", "large", "all"):
                with pytest.raises(LookupError):
                    read.value(owner, *names, absent)
        assert read.value(looked_into, "more") == 8
        # Other classes may have the names of Python's own.
        for name in ("str", "int", "float", "bool", "list", "NoneType"):
            with pytest.raises(LookupError):
                read.value(named, name)
        with pytest.raises(LookupError):
            read.kinds(named, "list")


def test_another_python_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running(tmp_path, HELD) as (pid, _):
        assert is_same(pid)
        mapped = layouts._mapped
        monkeypatch.setattr(
            layouts,
            "_mapped",
            lambda of: [(begin, end, key and (*key, of)) for begin, end, key in mapped(of)],
        )
        assert not is_same(pid)


def test_a_file_with_the_same_inode_may_not_be_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, runtime = layouts._mapped, layouts.own_runtime()
    python = [key for begin, _, key in mapped("self") if key and begin <= runtime][-1]
    monkeypatch.setattr(
        layouts, "_mapped", lambda of: [(begin, end, key if of == "self" else python) for begin, end, key in mapped(of)]
    )
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not is_same(process.pid)
        finally:
            process.kill()


def test_mapped_file_names_need_not_be_text(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\x85"
    Path(os.fsdecode(path)).write_bytes(b"x")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert is_same(os.getpid())


def test_unreadable_memory_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(OSError, match="No such"):
        layouts.Memory(1 << 30)
    with layouts.Memory(os.getpid()) as own:
        for address in (0, 8, 1 << 46, 1 << 63, -1):
            with pytest.raises(OSError):
                own.word(address)


def test_reading_an_ended_process_is_an_error() -> None:
    """The kernel returns no bytes instead of an error."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        memory = layouts.Memory(process.pid)
    with memory:
        for read in (memory.word, memory.number, memory.real, memory.text, memory.words):
            with pytest.raises(OSError):
                read(id(memory))


def test_a_truncated_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with layouts.Memory(os.getpid()) as own:
        monkeypatch.setattr(os, "pread", lambda *_: b"\1\2")
        assert own.read(layouts.PAGE, 8) == b"\1\2"
        for read in (own.word, own.number, own.real):
            with pytest.raises(OSError):
                read(layouts.PAGE)


def test_high_addresses_of_other_processors_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """64-bit ARM maps libraries and their memory here."""
    with layouts.Memory(os.getpid()) as own:
        monkeypatch.setattr(os, "pread", lambda *_: b"\7" + bytes(7))
        assert own.word(0xFFFF_9C00_0000) == 7


@pytest.mark.skipif(sys.version_info < (3, 11), reason="line tables had another format")
def test_line_numbers_match_python() -> None:
    code = layouts._learned_of.__code__
    first = {}
    for begin, end, line in code.co_lines():
        if line is not None:
            first |= dict.fromkeys(range(begin, end, 2), line)
    assert len(set(first.values())) > 30
    assert {at: line_in(code.co_linetable, code.co_firstlineno, at) for at in first} == first


def test_an_invalid_line_table_terminates() -> None:
    for table in (b"", b"\xff" * 50, bytes(range(256)), b"\x80", b"\xf0\x40\x40"):
        line_in(table, 7, 10_000)


def test_concurrent_layout_lookups_agree() -> None:
    """Each lookup starts afresh: all must find the same layout despite the other threads."""
    ends = threading.Event()

    def come_and_go() -> None:
        while not ends.is_set():
            threading.Thread(target=int).start()

    busy = threading.Thread(target=come_and_go)
    busy.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: layouts.layout(), range(8))]
            layouts._layout.cache_clear()
            found += pool.map(lambda _: layouts.layout(), range(8))
    finally:
        ends.set()
        busy.join()
    assert all(one == found[0] for one in found)


C10D = "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
GROUPS = """
    import types

    class Made:
        pass

    tensor_parallel, gone = Made(), Made()
    c10d = types.ModuleType("torch.distributed.distributed_c10d")
    c10d._pg_names = {Made(): "0", tensor_parallel: "tp"}
    c10d._pg_group_ranks = {Made(): {0: 0, 1: 1}, tensor_parallel: {7: 2, 0: 0, 3: 1}}
    sys.modules.update({f"one of many, {number}": types for number in range(3000)})
    sys.modules[c10d.__name__] = c10d
    kept += [tensor_parallel, gone]
    wait()
"""


def in_call(group: int) -> list[SeenFrame]:
    users = SeenFrame("/home/ada/train.py", 1, "reduce", addresses={"group": 1234})
    return [users, SeenFrame(C10D, 5, "all_reduce", addresses={"group": group}), SeenFrame(C10D, 6, "wrapper")]


def test_the_group_of_a_call_is_read_with_its_members(tmp_path: Path) -> None:
    with running(tmp_path, GROUPS) as (pid, (tensor_parallel, gone)), Interpreter(pid) as read:
        assert group_of(read, in_call(tensor_parallel)) == Group(name="tp", ranks=(0, 3, 7))
        assert group_of(read, in_call(gone)) is None
        assert group_of(read, in_call(0)) is None
        assert group_of(read, in_call(tensor_parallel)[:1]) is None


def test_torch_has_the_expected_group_attributes() -> None:
    c10d = dist.distributed_c10d
    assert isinstance(c10d._pg_names, dict) and isinstance(c10d._pg_group_ranks, dict)
