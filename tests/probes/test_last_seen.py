"""Where a process was shortly before it was killed, as a peer reads it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ncclsafe.facts import Phase, Progress
from lightning_ncclsafe.probes.process.crash_traces import CrashTraces
from lightning_ncclsafe.probes.process.last_seen import LastSeenFile, open_last_seen, read_last_seen

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")

AT_BATCH_3 = Progress(phase=Phase.TRAIN, epoch=0, batch_idx=3)


@pytest.fixture
def place() -> Iterator[LastSeenFile]:
    made = LastSeenFile()
    yield made
    made.close()


@pytest.fixture
def file(place: LastSeenFile) -> Iterator[int]:
    opened = open_last_seen(os.getpid())
    assert opened is not None
    yield opened
    os.close(opened)


def outer(place: LastSeenFile, idle_s: float) -> None:
    place.note(replace(AT_BATCH_3, idle_s=idle_s))


def inner(place: LastSeenFile, idle_s: float) -> None:
    outer(place, idle_s)


def test_nothing_is_there_before_the_first_note_and_after_the_end(place: LastSeenFile, file: int) -> None:
    assert read_last_seen(file) is None
    outer(place, 0.0)
    assert read_last_seen(file) is not None
    place.close()
    place.close()
    assert read_last_seen(file) is None


def test_a_descriptor_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    place = LastSeenFile()
    mine = place._fd
    with (tmp_path / "weights").open("w+b", buffering=0) as other:
        other.write(b"weights")
        os.dup2(other.fileno(), mine)
        place.note(AT_BATCH_3)
        place.close()
        os.close(mine)
    assert (tmp_path / "weights").read_bytes() == b"weights"


def test_a_place_of_an_earlier_call_gives_way_to_that_of_the_next(place: LastSeenFile) -> None:
    traces = CrashTraces()
    earlier = LastSeenFile()
    traces._places[os.getpid()] = os.dup(earlier._fd)
    earlier.close()
    place.note(AT_BATCH_3)
    traces.hold([os.getpid()])
    assert traces.last_seen(os.getpid()) is not None
    traces.close()
    traces.hold([os.getpid()])
    assert traces.last_seen(os.getpid()) is None, "it is closed"


def test_a_shorter_note_replaces_a_longer_one(place: LastSeenFile, file: int) -> None:
    inner(place, 0.25)
    outer(place, 0.5)
    found = read_last_seen(file)
    assert found is not None and found.progress == replace(AT_BATCH_3, idle_s=0.5)
    assert [frame.function for frame in found.stack][-1] == "outer"
    assert all(frame.user for frame in found.stack)


def test_functions_it_stayed_in_are_those_of_all_notes_since_the_last_progress(place: LastSeenFile, file: int) -> None:
    def stayed_in() -> str:
        found = read_last_seen(file)
        assert found is not None
        return found.stack[found.stayed - 1].function if found.stack else ""

    this = "test_functions_it_stayed_in_are_those_of_all_notes_since_the_last_progress"
    inner(place, 0.25)
    assert stayed_in() == "outer"
    inner(place, 0.5)
    assert stayed_in() == "outer"
    outer(place, 0.75)
    assert stayed_in() == this
    inner(place, 1.0)
    assert stayed_in() == this, "it had been left in the meantime"
    inner(place, 0.1)
    assert stayed_in() == "", "it has made progress"
    inner(place, 0.35)
    assert stayed_in() == "outer"


def test_a_place_outlives_a_process_that_is_killed() -> None:
    script = (
        "import sys\n"
        "from lightning_ncclsafe.facts import Phase, Progress\n"
        "from lightning_ncclsafe.probes.process.last_seen import LastSeenFile\n"
        "place = LastSeenFile()\n"
        "place.note(Progress(phase=Phase.TRAIN, batch_idx=7))\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        traces = CrashTraces()
        traces.hold([process.pid])
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
    found = traces.last_seen(process.pid)
    assert found is not None and found.progress.batch_idx == 7
    traces.close()
    assert traces.last_seen(process.pid) is None


@pytest.mark.parametrize("text", [b"", b"\n", b"{", b'{"stack":[]}\n', b"\xff\n", b'{"progress":{"phase":"train"}}'])
def test_what_is_no_place_is_not_read(text: bytes) -> None:
    file = os.memfd_create("anything")
    os.write(file, text)
    assert read_last_seen(file) is None
    os.close(file)
