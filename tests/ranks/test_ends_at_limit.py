"""Real processes whose run is ended: nobody saves any more, whatever wakes them, and all are gone in time."""

import _thread
import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import ENDING, Ranks, all_reduce, run_ranks

from lightning_ncclsafe.guard import ending, reporter
from lightning_ncclsafe.guard.ending import EXIT_CODE

GOOD, WRONG = {"weights": torch.zeros(3)}, {"weights": torch.full((3,), float("nan"))}
# Long enough for a woken thread to do what it wants to.
HARM_S = 1.0
# Of each rank. As a stream's synchronization does, to acquire it waits in C, and says nothing when it ends.
WAIT = _thread.allocate_lock()


def wake(_: float = 0.0) -> None:
    """What an abort by somebody else does, as soon as the verdict is there."""
    if WAIT.locked():
        WAIT.release()
    time.sleep(HARM_S)


def wait_for_collective(group: dist.ProcessGroup | None = None) -> None:
    """A wait that an abort ends as if the collective had been completed."""
    WAIT.acquire()
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    WAIT.acquire()
    del work


def end_at_limit(
    harm: Callable[[Path], None], folder: Path, *, write_logs: Callable[[float], None] = wake
) -> tuple[Ranks, dict[str, bytes]]:
    """Rank 0 keeps the others waiting until the limit; then rank 1 is woken. What lies with the checkpoints after that.

    Rank 2 waits as gloo lets it wait: that of rank 1 is recorded as if it could do something else meanwhile.
    """
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    torch.save(GOOD, checkpoints / "last.ckpt")
    good = (checkpoints / "last.ckpt").read_bytes()

    def body(rank: int) -> None:
        all_reduce()
        if rank == 0:
            threading.Event().wait(60)
        if rank == 2:
            all_reduce()
        harm(checkpoints)

    ranks = run_ranks(3, body, folder, timeout_s=3, patience_s=20, write_logs=write_logs)
    assert good == (checkpoints / "last.ckpt").read_bytes(), ranks.said
    return ranks, {path.name: path.read_bytes() for path in checkpoints.iterdir() if path.name != "last.ckpt"}


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


@pytest.mark.parametrize(
    "harm",
    [
        save_after_it,
        save_where_it_raises,
        begin_to_save_before_it,
        replace_after_it,
        delete_after_it,
        save_at_a_signal,
        save_in_another_thread,
    ],
)
def test_a_thread_that_is_woken_after_the_verdict_changes_no_checkpoint(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    ranks, others = end_at_limit(harm, tmp_path)
    assert ranks.exit_codes == [EXIT_CODE] * 3, ranks.said
    assert others == {}


def test_a_trainer_in_another_thread_is_held_as_well(tmp_path: Path) -> None:
    """As Ray runs it."""

    def harm(checkpoints: Path) -> None:
        def train() -> None:
            ENDING.note_thread()
            save_where_it_raises(checkpoints)

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    ranks, others = end_at_limit(harm, tmp_path)
    assert ranks.exit_codes == [EXIT_CODE] * 3, ranks.said
    assert others == {}


def abort_wakes() -> None:
    WAIT.release()


def abort_hangs() -> None:
    threading.Event().wait()


def abort_raises() -> None:
    raise RuntimeError("unhandled cuda error")


@pytest.mark.parametrize("abort", [abort_wakes, abort_hangs, abort_raises])
def test_whatever_an_abort_of_several_communicators_does_the_run_ends(
    abort: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda *_: abort())
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda _: abort())

    def harm(checkpoints: Path) -> None:
        groups = [dist.new_group([1], use_local_synchronization=True) for _ in range(3)]
        dist.all_reduce(torch.ones(10), async_op=True)
        wait_for_collective(groups[1])
        torch.save(WRONG, checkpoints / "last.ckpt")

    ranks, others = end_at_limit(harm, tmp_path)
    assert ranks.exit_codes == [EXIT_CODE] * 3, ranks.said
    assert others == {}


class BlocksWhenDeleted:
    """As a communicator with a kernel that does not end."""

    def __del__(self) -> None:
        threading.Event().wait()


def test_nothing_at_the_end_of_a_process_holds_it_up(tmp_path: Path) -> None:
    def harm(_: Path) -> None:
        dist.group.WORLD.kept = BlocksWhenDeleted()  # type: ignore[union-attr]
        atexit.register(threading.Event().wait)
        threading.Thread(target=threading.Event().wait).start()
        wait_for_collective()

    began = time.monotonic()
    ranks, _ = end_at_limit(harm, tmp_path)
    assert ranks.exit_codes == [EXIT_CODE] * 3, ranks.said
    assert time.monotonic() - began < 3 + 15


def test_logs_whose_lock_the_held_thread_has_do_not_hold_up_the_end(tmp_path: Path) -> None:
    lock = threading.Lock()

    def harm(_: Path) -> None:
        with lock:
            wait_for_collective()

    def write(_: float) -> None:
        wake()
        lock.acquire()

    ranks, _ = end_at_limit(harm, tmp_path, write_logs=write)
    assert ranks.exit_codes == [EXIT_CODE] * 3, ranks.said


def test_a_report_that_cannot_be_written_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage that it goes to may be what hangs."""
    monkeypatch.setattr(reporter, "write_report", lambda *_: threading.Event().wait())
    monkeypatch.setattr("lightning_ncclsafe.guard.participation.AT_LIMIT_S", 4.0)
    assert ending.AT_LIMIT_S < 30

    def body(rank: int) -> None:
        all_reduce()
        if rank == 0:
            threading.Event().wait(60)
        all_reduce()

    # With one report only, at the limit.
    ranks = run_ranks(2, body, tmp_path, suspect_after_s=2.9, timeout_s=3, patience_s=15)
    assert ranks.exit_codes == [EXIT_CODE] * 2, ranks.said
