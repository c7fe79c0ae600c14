"""The process that encodes media: what it makes, and what becomes of calls that it cannot make."""

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorboard.compat.proto.event_pb2 import Event

from lightning_ncclsafe.loggers.events import EventMaker
from lightning_ncclsafe.loggers.media import MediaProcess, MediaProcessError

IMAGE = np.zeros((3, 8, 8), dtype=np.float32)


class OnlyHere:
    """The other process does not find its module."""

    __module__ = "__main__"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaProcess]:
    process = MediaProcess(str(tmp_path_factory.mktemp("logs")), {"default_bins": [0.0, 1.0]})
    yield process
    process.close()


def encoders() -> list[psutil.Process]:
    """The processes that encode media, also those that have ended and that nobody has waited for."""
    name = "lightning_ncclsafe.loggers.media"
    children = psutil.Process().children()
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE or name in child.cmdline()]


def test_events_match_those_made_in_process(process: MediaProcess, tmp_path: Path) -> None:
    [(_, made)] = process.make("add_image", ("image", IMAGE, 7), {}, 12.5)
    [(_, here)] = EventMaker(str(tmp_path)).make("add_image", ("image", IMAGE, 7), {}, 12.5)
    assert Event.FromString(made) == Event.FromString(here)
    assert (Event.FromString(made).step, Event.FromString(made).wall_time) == (7, 12.5)


def test_an_exception_in_the_process_is_raised_here(process: MediaProcess) -> None:
    with pytest.raises(AssertionError, match="size of input tensor"):
        process.make("add_image", ("image", IMAGE, 7), {"dataformats": "HW"}, 0.0)
    assert process.make("add_image", ("image", IMAGE, 7), {}, 0.0)


@pytest.mark.parametrize("argument", [lambda: None, OnlyHere()], ids=["cannot be sent", "cannot be read there"])
def test_an_unpicklable_call_raises_and_the_process_survives(
    process: MediaProcess, argument: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    monkeypatch.setattr(__main__, "OnlyHere", OnlyHere, raising=False)
    process.make("add_text", ("t", "x"), {}, 0.0)
    before = encoders()
    with pytest.raises(MediaProcessError, match="cannot be"):
        process.make("add_text", ("t", argument), {}, 0.0)
    assert encoders() == before


def test_a_killed_process_is_replaced_at_the_next_call(process: MediaProcess) -> None:
    process.make("add_text", ("t", "x"), {}, 0.0)
    (killed,) = encoders()
    killed.kill()
    with pytest.raises(MediaProcessError, match="has exited"):
        process.make("add_text", ("t", "x"), {}, 0.0)
    assert process.make("add_text", ("t", "x"), {}, 0.0)
    assert len(encoders()) == 1 and killed not in encoders()


def test_at_the_end_no_more_calls_are_taken_and_the_current_one_is_made(
    process: MediaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.make("add_text", ("t", "x"), {}, 0.0)
    monkeypatch.setattr(process, "_is_refusing", False)  # again, for the next test
    receive = Connection.recv_bytes

    def receive_once_refused(pipe: Any) -> bytes:
        process.refuse()
        return receive(pipe)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "recv_bytes", receive_once_refused)
        assert process.make("add_text", ("t", "x"), {}, 0.0)
    with pytest.raises(MediaProcessError, match="no more calls"):
        process.make("add_text", ("t", "x"), {}, 0.0)


def test_a_program_that_is_killed_while_it_sends_ends_the_process_without_a_traceback(process: MediaProcess) -> None:
    process.make("add_text", ("t", "x"), {}, 0.0)
    assert process._pipe is not None and process._process is not None
    os.write(process._pipe.fileno(), (1000).to_bytes(4, "big") + b"the beginning")
    process._pipe.close()
    assert process._process.wait(10) == 0
    process.close()


def test_a_program_may_have_closed_its_standard_input_and_output() -> None:
    script = (
        "from lightning_ncclsafe.loggers.media import MediaProcess\n"
        "process = MediaProcess('logs', {'default_bins': [0.0, 1.0]})\n"
        "assert len(process.make('add_text', ('t', 'x'), {}, 0.0)) == 1\n"
        "process.close()"
    )
    without = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
    ran = subprocess.run([*without, sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_closing_leaves_no_process(process: MediaProcess) -> None:
    process.make("add_text", ("t", "x"), {}, 0.0)
    assert len(encoders()) == 1
    process.close()
    process.close()
    assert encoders() == []
