"""Real stacks of code of ours, for scenes: a thread waits there, and the probe looks at it as it does at a rank."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, wait_for
from lightning_ncclsafe.exchange.meeting import Agreed, Meeting
from lightning_ncclsafe.facts import Frame, Phase, PreflightFacts, Progress, RankFacts
from lightning_ncclsafe.loggers.intake import Intake, LoggedScalars
from lightning_ncclsafe.loggers.ledger import Ledger
from lightning_ncclsafe.loggers.offload import Offload
from lightning_ncclsafe.preflight.check import Preflight
from lightning_ncclsafe.probes.process import stacks

FACTS = RankFacts(rank=1, progress=Progress(phase=Phase.TRAIN))


@contextmanager
def standing(call: Callable[[], object], at: Callable[..., object], release: Callable[[], object]) -> Iterator[int]:
    """The number of a thread that has come to a function and stands there.

    Args:
        call: What the thread does.
        at: The function.
        release: Makes the call return, or raise that the exchange is lost.
    """

    def run() -> None:
        with suppress(ExchangeError):
            call()

    code: Any = unwrap(at).__code__  # type: ignore[attr-defined]
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        give_up, before = time.monotonic() + 20, ()
        while not (stack := stacks.thread_stack(thread.ident or 0)) or stack != before or not _is_at(code, stack):
            assert thread.is_alive(), "it does not wait"
            assert time.monotonic() < give_up, stack
            before = stack
            time.sleep(0.005)  # nothing tells that another thread stands still
        yield thread.ident or 0
    finally:
        release()
        thread.join(20)
    assert not thread.is_alive()


def _is_at(code: Any, stack: tuple[Frame, ...]) -> bool:
    return any((frame.file, frame.function) == (code.co_filename, code.co_name) for frame in stack)


def seen(call: Callable[[], object], at: Callable[..., object], release: Callable[[], object]) -> tuple[Frame, ...]:
    """The stack of such a thread as a rank's facts have it, from the first frame of ours on."""
    with standing(call, at, release) as ident:
        stack = stacks.with_source(stacks.thread_stack(ident))
    return stack[next(depth for depth, frame in enumerate(stack) if frame.mark) :]


def meeting(exchange: MemoryExchange, rank: int) -> Meeting:
    return Meeting(exchange=exchange, rank=rank, world_size=2, deadline_s=60.0, say=lambda text: None)


@cache
def in_agreement() -> tuple[Frame, ...]:
    """A rank that waits for the verdict on its loaders."""
    exchange = MemoryExchange()
    one = meeting(exchange, rank=1)
    return seen(lambda: one.meet(FACTS, lambda ranks: Agreed()), wait_for, exchange.close)


@cache
def in_preflight() -> tuple[Frame, ...]:
    """A rank on which code of ours waits for itself: for its own look at the host, which does not end."""
    over = threading.Event()

    def look() -> PreflightFacts:
        over.wait(60)
        return PreflightFacts()

    preflight = Preflight(
        look=look,
        on_problem="warn",
        identity=FACTS,
        world_size=2,
        report_dir=None,
        say=lambda text: None,
    )
    preflight.begin()
    exchange = MemoryExchange()
    exchange.close()
    return seen(lambda: preflight.compare(exchange), Preflight.wait, over.set)


@cache
def in_offload() -> tuple[Frame, ...]:
    """A rank whose offloaded logger has no room."""
    intake = Intake(limit_bytes=1_000, overflow="block", block_s=60.0)
    point = LoggedScalars(step=1, values={"loss": 1.0}, created=0.0)
    offload: Any = SimpleNamespace(_is_forked=False, _intake=intake, ledger=Ledger("CSVLogger", print))

    def put() -> None:
        while not intake.is_closed:
            Offload.put(offload, point)

    return seen(put, Intake.put, intake.close)
