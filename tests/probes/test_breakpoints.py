"""Of a thread that is paused in a debugger, the call that has made it pause: it is before the line, or at it."""

import io
import os
import pdb
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from polling import until

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.probes.process.breakpoints import breakpoint_before
from lightning_ncclsafe.probes.process.stacks import main_thread_stack, training_thread

PDB = Frame(file=pdb.__file__, line=432, function="_cmdloop")
SOURCE = """\
import pdb
import helpers
from helpers import debugged_on as stop_here

def step(self, batch):
    x = 1
    {call}
    # a comment
    y = self.log(
        x,
        2,
    )
    z = 3

def debug_rank(rank):
    if rank == 0:
        pdb.Pdb().set_trace(sys._getframe(1))

class Net:
    def look(self):
        pdb.Pdb().set_trace(sys._getframe(1))
"""


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., int]:
    """The line of the call in a source, for a thread that is paused at a line of a function of it; 0 for none."""
    path = tmp_path / "train.py"

    def find(source: str, line: int, function: str = "step", prompt: Frame = PDB) -> int:
        path.write_text(source)
        paused = Frame(file=str(path), line=line, function=function, user=True)
        frame = breakpoint_before((Frame(file=str(path), line=90, function="<module>", user=True), paused, prompt))
        assert frame is None or (frame.file, frame.function) == (str(path), function)
        return frame.line if frame is not None else 0

    return find


@pytest.mark.parametrize(
    "call",
    [
        "breakpoint()",
        "pdb.set_trace()",
        "import ipdb; ipdb.set_trace()",
        "dist.breakpoint(rank=1)",
        "if x: breakpoint()",
        "from remote_pdb import RemotePdb; RemotePdb('127.0.0.1', 4444).set_trace()",
        "pydevd_pycharm.settrace('localhost', port=90)",
        "import pudb; pu.db",
        "self.look()",
    ],
)
def test_the_call_is_before_the_line_or_at_it(found: Callable[..., int], call: str) -> None:
    source = SOURCE.format(call=call)
    assert [found(source, line) for line in (6, 7, 9, 10, 13)] == [0, 7, 7, 7, 0]


@pytest.mark.parametrize(
    "call",
    [
        "self.log(2)",
        "sys.settrace(None)",
        "hook = lambda: breakpoint()",
        "def breakpoint_here(): breakpoint()",
        "# breakpoint()",
        "unknown(2)",
    ],
)
def test_other_calls_are_none(found: Callable[..., int], call: str) -> None:
    assert [found(SOURCE.format(call=call), line) for line in (7, 9)] == [0, 0]


def test_an_endless_loop_has_no_code_at_its_head(found: Callable[..., int]) -> None:
    source = "def step():\n    while True:\n        x = 4\n        breakpoint()\n"
    assert [found(source, line) for line in (2, 3, 4)] == [4, 4, 4]


def test_a_thread_that_is_not_paused_has_none(found: Callable[..., int]) -> None:
    at_work = Frame(file="/venv/torch/functional.py", line=9, function="norm")
    assert found(SOURCE.format(call="breakpoint()"), 9, prompt=at_work) == 0
    assert breakpoint_before(()) is None
    assert breakpoint_before((PDB,)) is None


BLOCKS = """\
def step(batch):
    for row in batch:
        if row:
            breakpoint()
        elif not row:
            pass
        else:
            breakpoint()
    with a() as b:
        breakpoint()
    try:
        breakpoint()
    except ValueError:
        breakpoint()
    else:
        x = 1
    finally:
        x = 2
    match x:
        case 1:
            breakpoint()
        case 2:
            pass
    breakpoint()
    try:
        x = 3
    except ValueError:
        breakpoint()
    while True:
        x = 4
        breakpoint()
    x = 5
"""


@pytest.mark.parametrize(
    "line, call",
    [
        # The head of a loop follows the end of its body, in either of two branches.
        (2, 0),
        (5, 0),
        (9, 10),
        (11, 10),
        (16, 12),
        (18, 14),
        # The call may have paused here, from Python 3.13 on, or the one in the block before.
        (24, 0),
        # `try:` and `while True:` may have no code of their own.
        (25, 24),
        (26, 24),
        # A loop may have begun, or gone on.
        (30, 0),
        (29, 0),
        (32, 0),
    ],
)
def test_the_call_may_be_in_a_block(found: Callable[..., int], line: int, call: int) -> None:
    assert found(BLOCKS, line) == call


def test_a_thread_whose_source_is_gone_has_none(found: Callable[..., int]) -> None:
    assert found("", 7) == 0
    assert found("def step(:", 7) == 0
    assert found(SOURCE.format(call="breakpoint()"), 9, function="<lambda>") == 0


CALLED = """\
import helpers as h
from helpers import on_rank as stop
def step():
    {call}
    return 2
"""
HELPERS = """\
import sys
def on_rank(rank):
    Debugger().set_trace(sys._getframe(1))
class Debugger:
    pass
"""


@pytest.mark.parametrize("call", ["breakpoint()", "h.on_rank(1)", "stop(1)"])
def test_a_real_pause(
    tmp_path: Path,
    training: Callable[[Callable[[], object]], threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Python pauses before the next line until 3.13, and at the call since."""
    reads, writes = os.pipe()
    with os.fdopen(reads) as stdin, os.fdopen(writes, "w") as keyboard:

        class Prompt(pdb.Pdb):
            def __init__(self) -> None:
                super().__init__(stdin=stdin, stdout=io.StringIO(), nosigint=True, readrc=False)

        helpers, names = ModuleType("helpers"), {}
        helpers.__dict__["__file__"] = str(tmp_path / "helpers.py")
        for path, source, into in (
            ("helpers.py", HELPERS, helpers.__dict__),
            ("train.py", CALLED.format(call=call), names),
        ):
            monkeypatch.setitem(sys.modules, "helpers", helpers)
            (tmp_path / path).write_text(source)
            exec(compile(source, str(tmp_path / path), "exec"), into)
        helpers.__dict__["Debugger"] = Prompt
        monkeypatch.setattr(sys, "breakpointhook", lambda: Prompt().set_trace(sys._getframe(1)))
        thread = training(names["step"])
        assert thread is training_thread()
        try:
            until(lambda: main_thread_stack()[-1].function == "cmdloop")
            stack = main_thread_stack()
            frame = breakpoint_before(stack)
            assert frame is not None and (frame.line, frame.function, frame.code) == (4, "step", call)
            paused = next(one for one in reversed(stack) if one.user)
            assert paused.line == (4 if sys.version_info >= (3, 13) else 5)
        finally:
            keyboard.write("continue\n")
            keyboard.close()
            thread.join(20)
