"""Leaving: all ranks together when they have finished, and after the report when a run cannot go on."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import psutil

from lightning_ncclsafe import _torch
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.marks import Mark, marked
from lightning_ncclsafe.probes.rank import Card

EXIT_CODE = 124
"""Exit status of a process that had to be ended from outside its main thread; that of ``timeout(1)``."""

# What the main thread is given to leave by its own exception once its process groups have been aborted.
ABORT_GRACE_S = 10.0
# What the process that hosts the store gives the others to leave before it.
_OTHERS_LEAVE_S = 3.0
# What loggers' storage is given; what it does not take then stays in local staging.
_LOGS_S = 5.0
_POLL_S = 0.02
_FINISH_POLL_S = 0.01
# The store serves about so many questions a second, from all ranks that wait for the last one.
_POLLS_PER_S = 5000.0


def end_frozen(cards: Iterable[Card], say: Callable[[str], None]) -> None:
    """Kills processes of this host that cannot end themselves, and that nobody else may end: their launcher is one.

    Args:
        cards: Of ranks that are stopped, or whose interpreter's lock is held for good.
        say: Prints a line to the user.
    """
    for card in cards:
        with suppress(psutil.Error, OSError):
            process = psutil.Process(card.pid)
            is_same = not card.started or abs(process.create_time() - card.started) < 1.0
            if is_same and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                say(f"rank {card.rank} cannot end itself: its process {card.pid} is killed")


def end_run(
    *,
    exchange: Exchange,
    rank: int,
    world_size: int,
    main_thread_left: threading.Event,
    write_logs: Callable[[float], None],
    logging_ranks: Sequence[int] = (),
    end_frozen: Callable[[], None] = lambda: None,
    before_exit: Callable[[], None],
) -> None:
    """Ends this rank's part of the run, from a side thread.

    Where the process groups can be aborted (NCCL) the main thread's wait raises and the Trainer unwinds; where they
    cannot (gloo), or where the main thread is not in a collective and does not come back, the process exits.

    Args:
        exchange: What the ranks share.
        rank: This rank.
        world_size: Number of ranks.
        main_thread_left: Set once the main thread has left the Trainer's function.
        write_logs: Brings what loggers were given to storage, within so many seconds.
        logging_ranks: Ranks that have such loggers.
        end_frozen: Ends ranks that cannot end themselves; not before logs are written, as launchers end all with one.
        before_exit: What is left to do for this process before it exits; its failure is ignored.
    """
    if _torch.groups_can_be_aborted():
        # The abort itself may wait for a kernel that never ends.
        threading.Thread(target=_torch.abort_groups, name="ncclsafe-abort", daemon=True).start()
        if main_thread_left.wait(ABORT_GRACE_S):
            end_frozen()
            return
    _write_logs(exchange, write_logs, rank=rank, logging_ranks=logging_ranks)
    end_frozen()
    say_goodbye(exchange, rank)
    if _torch.hosts_store(rank):
        wait_for_others(exchange, rank, world_size)
    with suppress(Exception):
        before_exit()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(EXIT_CODE)


def _write_logs(exchange: Exchange, write: Callable[[float], None], *, rank: int, logging_ranks: Sequence[int]) -> None:
    """Nobody leaves before all have written: launchers end the others with the first."""
    deadline = time.monotonic() + _LOGS_S
    with suppress(Exception):
        write(_LOGS_S)
    keys = [f"logs/{other}" for other in logging_ranks]
    with suppress(ExchangeError):
        if rank in logging_ranks:
            exchange.set(f"logs/{rank}", b"")
        while keys and time.monotonic() < deadline and len(exchange.get_many(keys)) < len(keys):
            time.sleep(_POLL_S)


@marked(Mark.STORE)
def stay_until_all_finished(
    exchange: Exchange, *, rank: int, world_size: int, may_leave: Callable[[], bool], leave_behind: Callable[[], None]
) -> None:
    """Waits until all ranks have come this far, or this one may leave without them.

    Rank 0 counts and tells, so that the store is not asked for every rank by every rank.

    Args:
        exchange: What the ranks share.
        rank: This rank.
        world_size: Number of ranks.
        may_leave: Whether this rank has stayed for long enough.
        leave_behind: Called before it leaves without others.
    """
    exchange.set(f"finished/{rank}", b"")
    keys = {"finished/all"} if rank else {f"finished/{other}" for other in range(world_size)}
    while keys := keys - exchange.get_many(keys).keys():
        if may_leave():
            leave_behind()
            break
        time.sleep(max(_FINISH_POLL_S, world_size / _POLLS_PER_S))
    if rank == 0:
        exchange.set("finished/all", b"")


def say_goodbye(exchange: Exchange, rank: int) -> None:
    """This rank needs the exchange no more."""
    with suppress(ExchangeError):
        exchange.set(f"left/{rank}", b"")


@marked(Mark.STORE)
def wait_for_others(exchange: Exchange, rank: int, world_size: int) -> None:
    """Waits, at most 3 s, until the other ranks have said that they need the store no more."""
    others = {f"left/{other}" for other in range(world_size) if other != rank}
    deadline = time.monotonic() + _OTHERS_LEAVE_S
    with suppress(ExchangeError):
        while time.monotonic() < deadline and (others := others - exchange.get_many(others).keys()):
            time.sleep(_POLL_S)
