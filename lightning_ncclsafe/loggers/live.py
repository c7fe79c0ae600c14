"""The offloaded loggers of this process: asked all together by the guard, and left alone by forked children."""

import os
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.facts import LoggerFacts

if TYPE_CHECKING:
    from lightning_ncclsafe.loggers.offload import Offload

_live: "weakref.WeakSet[Offload]" = weakref.WeakSet()
# By destination, what is set once an earlier offload has brought its rest there.
_unfinished: dict[str, threading.Event] = {}


def add(offload: "Offload") -> None:
    """A logger has been taken off the training thread."""
    _live.add(offload)


def discard(offload: "Offload") -> None:
    """A logger has been given back."""
    _live.discard(offload)


def unfinished(destination: str) -> threading.Event | None:
    """What is set once an earlier offload has brought its rest to a destination; None if there is no such rest."""
    event = _unfinished.get(destination)
    if event is not None and event.is_set():
        del _unfinished[destination]
        return None
    return event


def set_unfinished(destination: str, ended: threading.Event) -> None:
    """An offload ends with something left; ``ended`` is set once that is on storage."""
    for other in [other for other, event in _unfinished.items() if event.is_set()]:
        del _unfinished[other]
    _unfinished[destination] = ended


@marked(Mark.LOGGER)
def drain_all(timeout_s: float) -> None:
    """Brings what all offloaded loggers of this process have accepted to storage, as far as that goes in the time.

    Args:
        timeout_s: Seconds for all of them together.
    """
    deadline = time.monotonic() + timeout_s
    offloads = list(_live)
    # All of them first: one whose storage is dead must not take the time of the others.
    for offload in offloads:
        with suppress(Exception):
            offload.hurry()
    for offload in offloads:
        with suppress(Exception):
            offload.wait(deadline)


def live_facts() -> tuple[LoggerFacts, ...]:
    """What the offloaded loggers of this process have come to."""
    return tuple(offload.facts() for offload in list(_live))


def _forget() -> None:
    for offload in list(_live):
        offload.forked()
    _live.clear()


os.register_at_fork(after_in_child=_forget)
