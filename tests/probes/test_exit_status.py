"""How a process ended that is no child of this one, and whose parent has collected its status already."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from lightning_ncclsafe.facts import ProcessFacts
from lightning_ncclsafe.probes.peers import Peers
from lightning_ncclsafe.probes.process import exit_status
from lightning_ncclsafe.probes.process.exit_status import ExitStatuses
from lightning_ncclsafe.probes.process.growth import MemoryGrowth
from lightning_ncclsafe.probes.rank_info import RankInfo

AMPLE_S = 20.0
# Since Linux 6.15, the kernel keeps the status for whoever holds a pidfd.
KEEPS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


@pytest.fixture
def statuses() -> Iterator[ExitStatuses]:
    made = ExitStatuses()
    yield made
    made.close()


def grandchild(code: int) -> tuple[int, int, int]:
    """A process that ends once something is written: its process id, the pipe to write to, and the process id of its
    parent, which has collected its status when it has ended itself."""
    (told, tell), (read, write) = os.pipe(), os.pipe()
    if not (parent := os.fork()):
        os.close(tell)  # so that both end with the test, whatever becomes of it
        if not (pid := os.fork()):
            os.read(told, 1)
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)
        os.write(write, str(pid).encode())
        os.waitpid(pid, 0)
        os._exit(0)
    pid = int(os.read(read, 20))
    for file in (told, read, write):
        os.close(file)
    return pid, tell, parent


def open_descriptors() -> set[int]:
    with os.scandir("/proc/self/fd") as folder:
        found = {int(one.name) for one in folder}
    return {number for number in found if os.path.exists(f"/proc/self/fd/{number}")}


def end(tell: int, parent: int) -> None:
    os.write(tell, b"x")
    os.close(tell)
    os.waitpid(parent, 0)


@pytest.mark.parametrize("code", [0, 3, 124, -signal.SIGKILL])
def test_the_status_of_a_collected_process_is_known(statuses: ExitStatuses, code: int) -> None:
    pid, tell, parent = grandchild(code)
    statuses.hold([pid])
    assert statuses.of(pid) is None, "it is alive"
    end(tell, parent)
    assert statuses.of(pid) == (code if KEEPS else None)


def test_an_unknown_process_has_no_status(statuses: ExitStatuses) -> None:
    statuses.hold([2**22 + 1])
    assert statuses.of(2**22 + 1) is None
    assert statuses.of(os.getpid()) is None


def test_nothing_stays_open(statuses: ExitStatuses) -> None:
    before = len(os.listdir("/proc/self/fd"))
    statuses.hold([os.getpid(), os.getppid(), os.getpid()])
    assert len(os.listdir("/proc/self/fd")) == before + 2
    statuses.close()
    statuses.hold([os.getpid()])
    assert len(os.listdir("/proc/self/fd")) == before
    assert statuses.of(os.getpid()) is None


def test_what_has_its_number_meanwhile_is_left_alone(statuses: ExitStatuses) -> None:
    other = os.open(os.devnull, os.O_RDONLY)
    before = open_descriptors()
    statuses.hold([os.getppid()])
    (held,) = open_descriptors() - before
    os.dup2(other, held)  # as if a program had closed all, and opened its own
    try:
        assert statuses.of(os.getppid()) is None
        statuses.close()
        assert os.path.sameopenfile(other, held)
    finally:
        os.close(held)
        os.close(other)


def test_a_kernel_that_does_not_tell_is_asked_in_vain(statuses: ExitStatuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status.fcntl, "ioctl", lambda file, request, given: bytes(len(given)))
    statuses.hold([os.getpid()])
    assert statuses.of(os.getpid()) is None


@pytest.mark.parametrize(("code", "expected"), [(3, ("", 3)), (-signal.SIGKILL, ("SIGKILL", None)), (0, ("", 0))])
def test_a_peer_that_is_gone_is_reported_with_its_end(code: int, expected: tuple[str, int | None]) -> None:
    pid, tell, parent = grandchild(code)
    peer = RankInfo(rank=1, host="h", pid=pid)
    peers = Peers(ask=lambda _: ((), False), growth=MemoryGrowth())
    try:
        peers.known = (peer,)
        end(tell, parent)
        ends_s = time.monotonic() + AMPLE_S
        while (seen := peers.look_at(peer)).state != "gone" and time.monotonic() < ends_s:
            time.sleep(0.01)
    finally:
        peers.close()
    assert isinstance(seen, ProcessFacts) and seen.state == "gone"
    assert (seen.ended_by, seen.exit_code) == (expected if KEEPS else ("", None))


def test_another_process_with_the_id_of_a_peer_is_not_it() -> None:
    pid, tell, parent = grandchild(3)
    peers = Peers(ask=lambda _: ((), False), growth=MemoryGrowth())
    peer = RankInfo(rank=1, host="h", pid=pid, started=1.0)
    try:
        assert peers.look_at(peer).state == "gone"
        end(tell, parent)
        assert peers.look_at(peer).exit_code is None
    finally:
        peers.close()
