"""A main thread that waits in NCCL, and an abort from another thread: does the wait end, and with what?

The guard never aborts: what is seen here is why, and what somebody else's abort does.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from nccl_here import Here

# The main thread is in its wait by then.
_BEFORE_ABORT_S = 2.0
GIVE_UP = timedelta(seconds=60)


def _abort_later(aborted_at: list[float]) -> None:
    def abort() -> None:
        time.sleep(_BEFORE_ABORT_S)
        aborted_at.append(time.monotonic())
        dist.distributed_c10d._abort_process_group()

    threading.Thread(target=abort, daemon=True).start()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def _wait_in_vain(here: Here, wait: Callable[[], None]) -> dict[str, Any]:
    """Rank 0 waits for rank 1, which never comes."""
    dist.all_reduce(here.ones(8))
    here.sync()
    if here.rank != 0:
        here.store.wait(["told"], GIVE_UP)
        return {}
    aborted_at, raised, next_raised = list[float](), "", ""
    _abort_later(aborted_at)
    try:
        wait()
    except Exception as error:
        raised = _words(error)
    ended_at = time.monotonic()
    try:
        dist.all_reduce(here.ones(8))
    except Exception as error:
        next_raised = _words(error)
    here.store.set("told", "")
    # Of a wait that has ended before the abort, nothing is learned.
    after_s = ended_at - aborted_at[0] if aborted_at else -1.0
    return {"raised": raised, "next_raised": next_raised, "after_s": after_s}


def in_synchronize(here: Here) -> dict[str, Any]:
    """As a training does: the collective returns at once, the wait is for the device."""

    def wait() -> None:
        dist.all_reduce(here.ones())
        here.sync()

    return _wait_in_vain(here, wait)


def in_item(here: Here) -> dict[str, Any]:
    """As Lightning does before every batch: the value of a reduced tensor is read."""

    def wait() -> None:
        tensor = here.ones(1)
        dist.all_reduce(tensor)
        tensor.item()

    return _wait_in_vain(here, wait)


def in_barrier(here: Here) -> dict[str, Any]:
    """A barrier, in which the host waits."""

    return _wait_in_vain(here, lambda: dist.barrier())


ABORTS: dict[str, Callable[[Here], dict[str, Any]]] = {
    "in_synchronize": in_synchronize,
    "in_item": in_item,
    "in_barrier": in_barrier,
}
