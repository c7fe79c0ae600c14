"""How ranks agree where to stop after SIGTERM: over the exchange, while they train, and all before the same batch.

A rank that has received the signal asks. Every rank then promises its position: from then on, its main thread waits
before its next batch until the decision is known. The decision is the furthest promised position: no rank is beyond
it, and every rank can still get there. Only the watchdog's thread asks, promises and decides, so a main thread that
waits in a collective, for a rank that waits here, blocks no rank.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError, first_rank
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure

Position = tuple[int, int]
"""How many batches of training have begun, and how many of evaluation since then."""

# Far longer than working ranks need to answer, and a third of the usual time between SIGTERM and SIGKILL (30 s with
# Kubernetes, SLURM and torchrun).
DEADLINE_S = 10.0

# After this, a rank whose guard is off passes the signal on itself.
_PASSED_ON_S = 2.0

_ASKED, _DECISION = "stop/asked", "stop/decision"
# The position before every batch; and the value in the exchange if there is no decision.
_AT_ONCE, _NONE = (-1, -1), "none"


class StopAgreement:
    """One rank's part in the agreement, for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        hosts_store: Whether the exchange ends with this rank's process, which then stops once all others know the
            decision.
        each_alone: Whether ranks have their own batches, and each stops before its next one.
        deadline_s: Seconds after which a rank no longer waits for the others.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        hosts_store: bool = False,
        each_alone: bool = False,
        deadline_s: float = DEADLINE_S,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._exchange = exchange
        self._rank = rank
        self._ranks = range(world_size)
        self._hosts_store = hosts_store
        self._each_alone = each_alone
        self._deadline_s = deadline_s
        self._say = say
        self._lock = threading.Lock()
        """Guards the position that the main thread has passed, and the promised one."""
        self._passed: Position = (0, 0)
        self._promised: Position | None = None
        self._waits_until = 0.0
        self._received_at: float | None = None
        self._pass_on: Callable[[], None] = lambda: None
        self._asker: int | None = None
        self._asked_at: float | None = None
        self._decision: Position | None = None
        self._is_over = threading.Event()
        self._is_off = False

    @property
    def is_asked(self) -> bool:
        """Whether this rank knows about a signal, its own or another rank's."""
        return self._received_at is not None or self._asker is not None

    @property
    def asked_for_s(self) -> float:
        """Seconds since this rank has known about a signal; 0 if there was none."""
        return time.monotonic() - self._asked_at if self._asked_at is not None else 0.0

    # Called on the main thread.

    def receive(self, pass_on: Callable[[], None] = lambda: None) -> None:
        """Notes that this rank has received the signal. Takes no lock: the interrupted code may hold it.

        Once the others know who received it, ``pass_on`` sends it to the ranks that this one has started.
        """
        if self._received_at is None:
            self._pass_on = pass_on
            self._received_at = self._asked_at = time.monotonic()

    def may_pass(self, position: Position) -> bool:
        """Whether this rank may begin its next batch, at this position; waits for the decision if one is due."""
        if self._received_at is not None and time.monotonic() > self._received_at + _PASSED_ON_S:
            self._send_on()
        with self._lock:
            # If this rank has received the signal long ago, its guard, which would ask the others, is off.
            is_unheard = self._received_at is not None and time.monotonic() > self._received_at + self._deadline_s
            if self._promised is None and not is_unheard:
                self._passed = position
                return True
        return self._follow_decision(position)

    @marked(Mark.STORE)
    def _follow_decision(self, position: Position) -> bool:
        if not self._is_over.wait(max(0.0, self._waits_until - time.monotonic())):
            self._give_up()
        return self._received_at is None if self._decision is None else position <= self._decision

    def leave(self) -> None:
        """Notes that this rank has no further batch, so that the others do not wait for its promise."""
        self._send_on()
        with suppress(ExchangeError):  # no rank is left to inform, or they have their deadline
            self._promise()
            self._exchange.set(f"stop/knows/{self._rank}", b"")

    def _give_up(self) -> None:
        """Gives up waiting. The first rank to do so decides for all, so that ranks never disagree."""
        decision = None
        with suppress(ExchangeError):
            decision = _parse(self._exchange.set_if_absent(_DECISION, _NONE.encode()))
        with self._lock:
            self._decision = self._decision or decision
            self._is_over.set()
        if self._decision is None:
            alone = "stops" if self._received_at is not None else "continues"
            self._say(
                f"rank {self._rank} {alone} alone: a rank received SIGTERM, but the ranks did not agree on where to "
                f"stop within {self._deadline_s:g} s"
            )

    # Called on the watchdog's thread.

    def poll(self) -> None:
        """Asks, promises and decides, without waiting. Never raises."""
        try:
            if not (self._is_off or self._is_over.is_set()):
                self._poll()
        except ExchangeError:
            pass  # tried again at the next poll; main threads have their deadline
        except Exception as error:
            self._is_off = True
            say_own_failure(error, self._say, what="the agreement on where to stop")
        if self._received_at is not None:
            self._send_on()

    def _send_on(self) -> None:
        pass_on, self._pass_on = self._pass_on, lambda: None
        pass_on()

    def _poll(self) -> None:
        if self._asker is None:
            self._asker = self._find_asker()
        if self._asker is not None:
            self._asked_at = self._asked_at or time.monotonic()
            self._promise()
            if self._decision is not None or self._find_decision():
                self._spread()

    def _find_asker(self) -> int | None:
        if self._received_at is None:
            asked = self._exchange.get_many([_ASKED]).get(_ASKED)
            return None if asked is None else int(asked)
        asker = first_rank(self._exchange, _ASKED, self._rank)
        if asker == self._rank:
            will = "each rank will stop before its next" if self._each_alone else "all ranks will stop before the same"
            self._say(f"rank {self._rank} received SIGTERM; {will} batch")
        return asker

    def _promise(self) -> None:
        with self._lock:
            if self._promised is None:
                # From its next check on, the main thread waits: the passed position no longer changes.
                self._waits_until = time.monotonic() + self._deadline_s
                self._promised = self._passed
        self._exchange.set_if_absent(f"stop/promise/{self._rank}", _text(self._promised))

    def _find_decision(self) -> bool:
        """Whether there is a decision; the rank that asked makes it for all."""
        decided = _text(_AT_ONCE) if self._each_alone else self._exchange.get_many([_DECISION]).get(_DECISION)
        if decided is None and self._asker == self._rank:
            promises = self._exchange.get_many([f"stop/promise/{rank}" for rank in self._ranks])
            if len(promises) == len(self._ranks):
                furthest = max(_position(promise) for promise in promises.values())
                decided = self._exchange.set_if_absent(_DECISION, _text(furthest))
        if decided is None:
            return False
        with self._lock:
            if not self._is_over.is_set():
                self._decision = _parse(decided)
                # No decision: a waiting rank waits until its deadline.
                if self._decision is None:
                    self._is_over.set()
        return self._decision is not None

    def _spread(self) -> None:
        """Lets the main thread follow the decision; on the rank that hosts the exchange, once all others know it."""
        self._exchange.set(f"stop/knows/{self._rank}", b"")
        knows = [f"stop/knows/{rank}" for rank in self._ranks]
        if not self._hosts_store or len(self._exchange.get_many(knows)) == len(knows):
            self._is_over.set()


def _text(position: Position) -> bytes:
    return f"{position[0]},{position[1]}".encode()


def _position(text: bytes) -> Position:
    training, evaluation = text.decode().split(",")
    return int(training), int(evaluation)


def _parse(decision: bytes) -> Position | None:
    return None if decision == _NONE.encode() else _position(decision)
