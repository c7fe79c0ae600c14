"""Real processes whose run is ended: nobody saves any more, whatever wakes them, and all are gone in time.

What ranks do to be in the way of it is tried in two jobs, in each by all of its ranks at the same time.
"""

import _thread
import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ENDING, Ranks, all_reduce, run_ranks

from lightning_ncclsafe.facts import IncidentKind
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.guard import ending, reporter
from lightning_ncclsafe.guard.ending import EXIT_CODE

Harm = Callable[[Path], None]
GOOD, WRONG = {"weights": torch.zeros(3)}, {"weights": torch.full((3,), float("nan"))}
# Long enough for a woken thread to do what it wants to.
HARM_S = 1.0
# Of each rank. As a stream's synchronization does, to acquire it waits in C, and says nothing when it ends.
WAIT = _thread.allocate_lock()


# Of each rank: what its logs need.
LOCKS: list[threading.Lock] = []


def write_logs(_: float) -> None:
    """What an abort by somebody else does, as soon as the verdict is there; and then what logs do."""
    if WAIT.locked():
        WAIT.release()
    time.sleep(HARM_S)
    for lock in LOCKS:
        lock.acquire()


def wait_for_collective(group: dist.ProcessGroup | None = None) -> None:
    """A wait that an abort ends as if the collective had been completed."""
    WAIT.acquire()
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    WAIT.acquire()
    del work


def save_after_it(checkpoints: Path) -> None:
    wait_for_collective()
    torch.save(WRONG, checkpoints / "last.ckpt")


def save_where_it_raises(checkpoints: Path) -> None:
    while True:
        try:
            wait_for_collective()
            ENDING.check()
        except BaseException:
            torch.save(WRONG, checkpoints / "last.ckpt")


def begin_to_save_before_it(checkpoints: Path) -> None:
    with ENDING.written(checkpoints / "last.ckpt") as beside, open(beside, "wb") as file:
        wait_for_collective()
        torch.save(WRONG, file)


def replace_after_it(checkpoints: Path) -> None:
    torch.save(WRONG, checkpoints.parent / "new.ckpt")
    wait_for_collective()
    os.replace(checkpoints.parent / "new.ckpt", checkpoints / "last.ckpt")


def delete_after_it(checkpoints: Path) -> None:
    wait_for_collective()
    (checkpoints / "last.ckpt").unlink()


def save_at_a_signal(checkpoints: Path) -> None:
    """As launchers send it to the ranks that are left."""

    def save(*_: object) -> None:
        torch.save(WRONG, checkpoints / "last.ckpt")

    def send() -> None:
        while not ENDING.is_closed:
            time.sleep(0.01)
        # Once the main thread is held.
        time.sleep(HARM_S / 2)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, save)
    threading.Thread(target=send).start()
    wait_for_collective()


def save_in_another_thread(checkpoints: Path) -> None:
    """As AsyncCheckpointIO does."""

    def save() -> None:
        with ENDING.written(checkpoints / "last.ckpt") as beside:
            torch.save(WRONG, beside)
            while not ENDING.is_closed:
                time.sleep(0.01)

    threading.Thread(target=save).start()
    wait_for_collective()


def train_in_another_thread(checkpoints: Path) -> None:
    """As Ray does."""

    def train() -> None:
        ENDING.note_thread()
        save_where_it_raises(checkpoints)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def fail() -> None:
    raise RuntimeError("unhandled cuda error")


def save_when_aborted(checkpoints: Path, abort: Callable[[], None]) -> None:
    """With several communicators, one of which it waits for."""
    dist.distributed_c10d._abort_process_group = lambda *_: abort()
    dist.ProcessGroup.abort = lambda _: abort()  # type: ignore[method-assign]
    groups = [dist.new_group([dist.get_rank()], use_local_synchronization=True) for _ in range(3)]
    dist.all_reduce(torch.ones(10), async_op=True)
    wait_for_collective(groups[1])
    torch.save(WRONG, checkpoints / "last.ckpt")


class BlocksWhenDeleted:
    """As a communicator with a kernel that does not end."""

    def __del__(self) -> None:
        threading.Event().wait()


def never_end(_: Path) -> None:
    dist.group.WORLD.kept = BlocksWhenDeleted()  # type: ignore[union-attr]
    atexit.register(threading.Event().wait)
    threading.Thread(target=threading.Event().wait).start()
    wait_for_collective()


def hold_the_lock_of_the_logs(_: Path) -> None:
    LOCKS.append(threading.Lock())
    with LOCKS[0]:
        wait_for_collective()


WAKENED: tuple[Harm, ...] = (
    save_after_it,
    save_where_it_raises,
    begin_to_save_before_it,
    replace_after_it,
    delete_after_it,
    save_at_a_signal,
    save_in_another_thread,
    train_in_another_thread,
)
HELD_UP: dict[str, Harm] = {
    "an abort that wakes": partial(save_when_aborted, abort=WAIT.release),
    "an abort that hangs": partial(save_when_aborted, abort=threading.Event().wait),
    "an abort that raises": partial(save_when_aborted, abort=fail),
    "what never ends": never_end,
    "a lock of the logs": hold_the_lock_of_the_logs,
}


@dataclass
class Ended:
    """How the ranks of a job have ended, and the files that lie with the checkpoints of each, but for the good one."""

    ranks: Ranks
    is_good: list[bool]
    others: list[list[str]]


def end_at_limit(harms: Sequence[Harm], folder: Path) -> Ended:
    """Rank 0 keeps the others waiting until the limit; then those after it are woken, each of which does its harm.

    The last rank waits as gloo lets it wait: that of the others is recorded as if they could do something else
    meanwhile.
    """
    folders = [folder / f"rank-{rank}" / "checkpoints" for rank in range(1, len(harms) + 1)]
    for checkpoints in folders:
        checkpoints.mkdir(parents=True)
        torch.save(GOOD, checkpoints / "last.ckpt")
    good = (folders[0] / "last.ckpt").read_bytes()

    def body(rank: int) -> None:
        all_reduce()
        if rank == 0:
            threading.Event().wait(60)
        elif rank > len(harms):
            all_reduce()
        else:
            harms[rank - 1](folders[rank - 1])

    # A busy machine takes its time until so many ranks have met, and they have to before the limit.
    ranks = run_ranks(len(harms) + 2, body, folder, timeout_s=12, patience_s=30, write_logs=write_logs)
    lasts = [checkpoints / "last.ckpt" for checkpoints in folders]
    return Ended(
        ranks,
        is_good=[last.exists() and last.read_bytes() == good for last in lasts],
        others=[sorted({path.name for path in checkpoints.iterdir()} - {"last.ckpt"}) for checkpoints in folders],
    )


@pytest.fixture(scope="module")
def woken(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return end_at_limit(WAKENED, tmp_path_factory.mktemp("woken"))


@pytest.fixture(scope="module")
def held_up(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return end_at_limit([*HELD_UP.values()], tmp_path_factory.mktemp("held-up"))


@pytest.mark.parametrize("number", range(len(WAKENED)), ids=[harm.__name__ for harm in WAKENED])
def test_a_thread_woken_after_the_verdict_changes_no_checkpoint(number: int, woken: Ended) -> None:
    assert woken.is_good[number], woken.ranks.said
    assert woken.others[number] == []


@pytest.mark.parametrize("number", range(len(HELD_UP)), ids=[*HELD_UP])
def test_blocked_code_at_the_end_changes_no_checkpoint(number: int, held_up: Ended) -> None:
    assert held_up.is_good[number], held_up.ranks.said
    assert held_up.others[number] == []


@pytest.mark.parametrize("job", ["woken", "held_up"])
def test_all_ranks_end_on_their_own_and_in_time(job: str, request: pytest.FixtureRequest) -> None:
    """The test kills ranks that do not, which gives another exit code."""
    ended = request.getfixturevalue(job)
    assert ended.ranks.exit_codes == [EXIT_CODE] * (len(ended.is_good) + 2), ended.ranks.said


def test_a_hanging_report_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage it is written to may be what hangs."""
    write_report = reporter.write_report

    def written(diagnosis: Diagnosis, *more: Any) -> Path:
        if diagnosis.job.incident.kind is IncidentKind.TIMEOUT:
            threading.Event().wait()
        return write_report(diagnosis, *more)

    monkeypatch.setattr(reporter, "write_report", written)
    monkeypatch.setattr("lightning_ncclsafe.guard.participation.AT_LIMIT_S", 4.0)
    assert ending.AT_LIMIT_S < 30

    def body(rank: int) -> None:
        all_reduce()
        if rank == 0:
            threading.Event().wait(60)
        all_reduce()

    ranks = run_ranks(2, body, tmp_path, suspect_after_s=1, timeout_s=3, patience_s=30)
    assert ranks.exit_codes == [EXIT_CODE] * 2, ranks.said
