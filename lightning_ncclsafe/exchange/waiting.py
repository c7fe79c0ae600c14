"""Waiting over the exchange: asking again and again, within a deadline, and marked, so that a stack shows the wait."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange.interface import Exchange, ExchangeError

T = TypeVar("T")

POLL_S = 0.02
# Of cheap questions the store serves about twice as many.
_POLLS_PER_S = 2000.0
_GROWTH = 1.5


def poll_interval_s(world_size: int, *, least_s: float = POLL_S, polls_per_s: float = _POLLS_PER_S) -> float:
    """How long a rank pauses between two questions while all ranks wait, so that the store keeps up.

    Args:
        least_s: The pause in a small job.
        polls_per_s: How many questions the store may get, from all ranks together.
    """
    return max(least_s, world_size / polls_per_s)


@marked(Mark.STORE)
def wait_for(
    ask: Callable[[], T],
    *,
    deadline_s: float,
    poll_s: float = POLL_S,
    longest_poll_s: float = 0.0,
    give_up: Callable[[], bool] = lambda: False,
    forgive: Exchange | None = None,
) -> T | None:
    """Asks until the answer is true; at least once, however short the deadline is.

    Args:
        ask: What to ask. It does not wait itself, beyond the exchange's own deadline.
        deadline_s: Seconds after which it does not ask again; ``math.inf`` where ``give_up`` limits the wait.
        poll_s: Seconds between two questions.
        longest_poll_s: If longer than ``poll_s``, questions become rarer up to this.
        give_up: Whether there is nothing left to wait for, whatever the deadline; asked after each answer.
        forgive: An exchange that may miss a deadline and answer the next time; not once it is lost.

    Returns:
        The first answer that is true; None if there was none.

    Raises:
        ExchangeError: If the exchange does not answer, unless that is forgiven.
    """
    ends = time.monotonic() + deadline_s
    while True:
        try:
            if answer := ask():
                return answer
        except ExchangeError:
            if forgive is None or forgive.lost:
                raise
        if time.monotonic() > ends or give_up():
            return None
        time.sleep(poll_s)
        poll_s = max(poll_s, min(poll_s * _GROWTH, longest_poll_s))


@marked(Mark.STORE)
def wait_for_keys(
    exchange: Exchange,
    keys: Iterable[str],
    *,
    deadline_s: float,
    poll_s: float = POLL_S,
    longest_poll_s: float = 0.0,
    give_up: Callable[[], bool] = lambda: False,
) -> dict[str, bytes]:
    """Waits until all keys have a value; each is asked for until it has one.

    Args:
        deadline_s: As the other arguments, see :func:`wait_for`.

    Returns:
        The values of those keys that have one by then.
    """
    missing, found = [*keys], dict[str, bytes]()

    def all_are_there() -> bool:
        found.update(exchange.get_many(missing))
        missing[:] = [key for key in missing if key not in found]
        return not missing

    if missing:
        wait_for(all_are_there, deadline_s=deadline_s, poll_s=poll_s, longest_poll_s=longest_poll_s, give_up=give_up)
    return found


@marked(Mark.STORE)
def keep_trying(exchange: Exchange, call: Callable[[], T], *, deadline_s: float) -> T:
    """Makes a call that has to succeed: an exchange that has missed one deadline may answer the next time.

    Args:
        call: The call; made once more after the deadline.
        deadline_s: How long to forgive the exchange, seconds.

    Raises:
        ExchangeError: If the exchange is lost, or has not answered by then.
    """
    answers: list[T] = []

    def has_answered() -> bool:
        answers.append(call())
        return True

    wait_for(has_answered, deadline_s=deadline_s, forgive=exchange)
    return answers[0] if answers else call()
