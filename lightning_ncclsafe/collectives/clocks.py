"""Measures the offset of all hosts' wall clocks from rank 0's, so that ranks on different hosts can be compared.

One rank of each host sends messages to rank 0 over the exchange and measures how long they take. Keys are reused.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from lightning_ncclsafe.collectives.alignment import (
    Alignment,
    Monotonic,
    NowNs,
    Reading,
    Round,
    aligned,
    oscillator_s,
    read_clocks,
)
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.timing.windows import Clock

_ROUNDS = 8
"""Messages and answers in a session; the first, which only announces a rank, is not counted."""

# Between polls of the two ranks that exchange messages. A store answers within 0.2 ms.
_PROMPT_S = 0.0005

_REFERENCE = "clock/reference"
_TURN = "clock/turn"

# A host's clock is aligned again after a minute, or later if rank 0 would do nothing else because of many hosts.
_AGAIN_S = 60.0
_AGAIN_PER_HOST_S = 0.5
# Hosts that are invited to the next tick; each polls until then.
_MOST_INVITED = 8
# The longest that all sessions of a tick may take, and that a session waits for the next message.
_SERVE_S = 0.3
_QUIET_S = 0.05
# A host that has not answered by then is invited again after all others.
_EXPIRES_S = 30.0
_EXPIRES_TICKS = 3

# Many ranks read what changes only once a minute.
_READ_EVERY_S = 5.0
# How long an invited rank waits for rank 0's next tick, as a multiple of a tick and at most; and how often it polls.
_LATER = 1.2
_LATER_S = 0.5
_LONGEST_S = 15.0
_LINGER_S = 0.02
# The wait for an answer within a session.
_ANSWER_S = 0.1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rank shares and measures with; tests replace it.

    Attributes:
        exchange: Shared by all ranks.
        rank: Global rank.
        world_size: Number of ranks.
        boot_id: Equal on all ranks of this host.
        now_ns: The wall clock, nanoseconds since the epoch.
        sleep: Waits for some seconds.
        monotonic: The host's steady clock, seconds.
    """

    exchange: Exchange
    rank: int
    world_size: int
    boot_id: str
    now_ns: NowNs
    sleep: Callable[[float], None]
    monotonic: Monotonic

    def read(self) -> Reading:
        """Reads both clocks."""
        return read_clocks(self.now_ns, self.monotonic)

    def get(self, key: str) -> str:
        """The text under a key; empty where there is none."""
        return self.get_many([key])[0]

    def get_many(self, keys: list[str]) -> list[str]:
        """The texts under several keys."""
        found = self.exchange.get_many(keys)
        return [found.get(key, b"").decode("utf-8", "replace") for key in keys]

    def put(self, key: str, text: str) -> None:
        """Publishes a text."""
        self.exchange.set(key, text.encode())

    def claim(self, key: str) -> int:
        """The rank that owns a key: this one, if it is the first to claim it."""
        owner = numbers(self.exchange.set_if_absent(key, str(self.rank).encode()).decode("utf-8", "replace"))
        return owner[0] if owner else -1


def _slot_key(number: int) -> str:
    """Key where a rank that aligns its host announces itself; slots are taken in order."""
    return f"clock/slot/{number}"


def _ping_key(rank: int) -> str:
    """Key of messages to rank 0: session, attempt and round."""
    return f"clock/ping/{rank}"


def _pong_key(rank: int) -> str:
    """Key of its answers: session, attempt, round, time seen, time answered, and rank 0's epoch."""
    return f"clock/pong/{rank}"


def _alignment_key(boot_id: str) -> str:
    """Key of a host's alignment, for all ranks on it."""
    return f"clock/alignment/{boot_id}"


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by spaces; empty if the text is anything else."""
    try:
        return tuple(map(int, text.split()))
    except ValueError:
        return ()


def read_alignment(text: str) -> Alignment | None:
    """The alignment in a text; None if there is none."""
    parsed = numbers(text)
    if len(parsed) != 5 or parsed[1] < 0:
        return None
    return Alignment(parsed[0], parsed[1], Reading(parsed[2], parsed[3]), parsed[4])


@dataclass(slots=True)
class _Invitation:
    session: int
    since_s: float
    ticks: int = 0


class Reference:
    """Rank 0's part."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._epoch = 0
        self._reading: Reading | None = None
        self._due_s: dict[int, float] = {}
        self._invited: dict[int, _Invitation] = {}
        self._sessions = 0
        self._last_tick_s: float | None = None
        self._sent_turn: tuple[float, tuple[int, ...]] = (0.0, ())

    def tick(self) -> None:
        """Answers messages, aligns what is due, and publishes which rank is next."""
        began_s = self._around.monotonic()
        every_s = 1.0 if self._last_tick_s is None else began_s - self._last_tick_s
        self._last_tick_s = began_s
        self._watch_own_clock()
        self._meet()
        self._serve(began_s + _SERVE_S)
        self._invite(every_s)

    def _watch_own_clock(self) -> None:
        """Begins a new epoch, which voids all alignments, if rank 0's own clock was set."""
        now = self._around.read()
        has_stepped = self._reading is not None and now.has_stepped(self._reading)
        self._reading = now
        if has_stepped:
            self._epoch = 0
            self._due_s = dict.fromkeys(self._due_s, 0.0)
            self._invited = {}
        if not self._epoch:
            self._around.put(_REFERENCE, f"{now.wall_ns} {self._around.boot_id}")
            self._epoch = now.wall_ns

    def _meet(self) -> None:
        while len(self._due_s) < self._around.world_size:
            leader = numbers(self._around.get(_slot_key(len(self._due_s))))
            if not leader or leader[0] in self._due_s:
                return
            self._due_s[leader[0]] = 0.0

    def _serve(self, until_s: float) -> None:
        """Answers the invited hosts that showed up."""
        leaders = [*self._invited]
        pings = self._around.get_many([_ping_key(leader) for leader in leaders]) if leaders else []
        for leader, ping in zip(leaders, pings, strict=True):
            invitation = self._invited[leader]
            parsed = numbers(ping)
            is_there = len(parsed) == 3 and parsed[0] == invitation.session and parsed[2] == 0
            if is_there and self._answer(leader, parsed[:2], until_s):
                self._put_off(leader)

    def _put_off(self, leader: int) -> None:
        del self._invited[leader]
        self._due_s[leader] = self._around.monotonic() + max(_AGAIN_S, _AGAIN_PER_HOST_S * len(self._due_s))

    def _answer(self, leader: int, session: tuple[int, ...], until_s: float) -> bool:
        """Answers one host; whether all its rounds came, each soon after the one before."""
        around, expected = self._around, 0
        quiet_s = around.monotonic() + _QUIET_S
        while around.monotonic() < min(until_s, quiet_s):
            ping = around.get(_ping_key(leader))
            # Not earlier: this time proves that the message had been sent by then.
            seen_ns = around.now_ns()
            if numbers(ping) != (*session, expected):
                around.sleep(_PROMPT_S)
                continue
            message = f"{session[0]} {session[1]} {expected} {seen_ns}"
            around.put(_pong_key(leader), f"{message} {around.now_ns()} {self._epoch}")
            if expected == _ROUNDS:
                return True
            expected += 1
            quiet_s = around.monotonic() + _QUIET_S
        return False

    def _invite(self, every_s: float) -> None:
        now_s = self._around.monotonic()
        for leader, invitation in [*self._invited.items()]:
            invitation.ticks += 1
            if invitation.ticks > _EXPIRES_TICKS and now_s - invitation.since_s > _EXPIRES_S:
                self._put_off(leader)
        waiting = [leader for leader, due_s in self._due_s.items() if due_s <= now_s and leader not in self._invited]
        waiting.sort(key=lambda leader: self._due_s[leader])
        for leader in waiting[: _MOST_INVITED - len(self._invited)]:
            self._sessions += 1
            self._invited[leader] = _Invitation(session=self._sessions, since_s=now_s)
        self._publish_turn(every_s)

    def _publish_turn(self, every_s: float) -> None:
        """Publishes who is invited, and the time until the next tick, for which they have to wait."""
        sessions = tuple(invitation.session for invitation in self._invited.values())
        sent_s, sent = self._sent_turn
        if sessions == sent and (not sessions or sent_s / 1.5 < every_s < sent_s * 1.5):
            return
        turn = " ".join(f"{leader} {invitation.session}" for leader, invitation in self._invited.items())
        self._around.put(_TURN, f"{int(every_s * 1e9)} {turn}")
        self._sent_turn = every_s, sessions


class Follower:
    """The part of a rank other than 0.

    Args:
        is_stopped: Whether the outcome is no longer needed.
    """

    def __init__(self, around: Surroundings, is_stopped: Callable[[], bool]) -> None:
        self._around = around
        self._is_stopped = is_stopped
        self._shares_reference = False
        self._leader: int | None = None
        self._has_slot = False
        self._session = 0
        self._epoch = 0
        self._read_s: float | None = None
        self._alignment: Alignment | None = None

    def clock(self) -> Clock:
        """This rank's clock now, if it is known."""
        if self._shares_reference:
            return Clock(offset_ns=0, uncertainty_ns=0)
        found = self._alignment
        return Clock() if found is None else found.clock(self._around.read())

    def tick(self) -> None:
        """Aligns the host if this rank does that and it is due, else reads the alignment; nothing on rank 0's host."""
        if self._shares_reference or not self._is_due():
            return
        aligns = self._leader in (None, self._around.rank)
        reference, text = self._around.get_many([_REFERENCE, _TURN if aligns else _alignment_key(self._around.boot_id)])
        epoch, _, boot_id = reference.partition(" ")
        if not boot_id:
            return
        self._shares_reference = boot_id == self._around.boot_id
        self._epoch = next(iter(numbers(epoch)), 0)
        if self._alignment is not None and self._alignment.epoch != self._epoch:
            self._alignment = None
        if self._shares_reference:
            return
        if self._leader is None:
            # The ranks of a host find the one that aligns it there.
            self._leader = self._around.claim(f"clock/leader/{self._around.boot_id}")
        elif self._leader == self._around.rank:
            self._lead(text)
        else:
            self._read_s = self._around.monotonic()
            received = read_alignment(text)
            if received is not None and received.epoch == self._epoch:
                self._alignment = received

    def _is_due(self) -> bool:
        """Whether to look for news; always for a rank that aligns its host, as it may be invited."""
        now_s = self._around.monotonic()
        if self._leader not in (None, self._around.rank) and self._alignment is not None and self._read_s is not None:
            return now_s - self._read_s >= _READ_EVERY_S
        return True

    def _lead(self, text: str) -> None:
        rank = self._around.rank
        if not self._has_slot:
            # The next free one: rank 0 finds all by asking for the next.
            self._has_slot = any(self._around.claim(_slot_key(n)) == rank for n in range(self._around.world_size))
        # The period of rank 0's ticks, nanoseconds, and pairs of rank and session.
        every_ns, *pairs = numbers(text) or (0,)
        session = dict(zip(pairs[::2], pairs[1::2], strict=False)).get(rank)
        if session is not None and session != self._session:
            self._align(session, every_ns / 1e9)

    def _align(self, session: int, every_s: float) -> None:
        around = self._around
        # Unique, so that no old answer is taken for one to this attempt.
        attempt = around.now_ns()
        around.put(_ping_key(around.rank), f"{session} {attempt} 0")
        wait_s = min(every_s * _LATER + _LATER_S, _LONGEST_S)
        opened = self._answer((session, attempt, 0), wait_s, _LINGER_S)
        if opened is None:
            around.put(_ping_key(around.rank), f"{session} {attempt} -1")
            return
        began = around.read()
        rounds = list(self._rounds(session, attempt, epoch=opened[5]))
        found = aligned(rounds, began, around.read(), opened[5])
        if found is not None:
            self._session, self._epoch, self._alignment = session, found.epoch, found
            text = f"{found.offset_ns} {found.uncertainty_ns} {found.at.wall_ns} {found.at.steady_ns} {found.epoch}"
            around.put(_alignment_key(around.boot_id), text)

    def _rounds(self, session: int, attempt: int, epoch: int) -> Iterator[Round]:
        for number in range(1, _ROUNDS + 1):
            sent_ns = self._around.now_ns()
            self._around.put(_ping_key(self._around.rank), f"{session} {attempt} {number}")
            pong = self._answer((session, attempt, number), _ANSWER_S, _PROMPT_S)
            got_ns = self._around.now_ns()
            if pong is None or pong[5] != epoch:
                return
            yield Round(sent_ns, pong[3], pong[4], got_ns)

    def _answer(self, message: tuple[int, int, int], wait_s: float, every_s: float) -> tuple[int, ...] | None:
        until_s = self._around.monotonic() + wait_s
        while not self._is_stopped() and self._around.monotonic() < until_s:
            pong = numbers(self._around.get(_pong_key(self._around.rank)))
            if len(pong) == 6 and pong[:3] == message:
                return pong
            self._around.sleep(every_s)
        return None


class ClockSync:
    """Aligns a rank's wall clock with rank 0's over the exchange, with a bound of the error.

    Ranks of one host share a clock; the first one to claim it measures for all. Rank 0 invites hosts, eight at
    a time; a rank that finds itself invited waits in its tick until rank 0's next tick, which answers its messages.
    Keys are reused, so their number does not grow with time; a host that does not show up is left out.

    Args:
        boot_id: Equal on the ranks of this host and different elsewhere; see
            :func:`~lightning_ncclsafe.code.this_host.host_boot_id`.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        boot_id: str,
        now_ns: NowNs = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Monotonic = oscillator_s,
    ) -> None:
        around = Surroundings(exchange, rank, world_size, boot_id, now_ns, sleep, monotonic)
        self._stopped = False
        self._reference = Reference(around) if rank == 0 else None
        self._follower = Follower(around, lambda: self._stopped)

    def tick(self) -> None:
        """Does what is due; call it every 0.5 to 10 s, on a thread that may wait.

        On rank 0 it takes at most 0.3 s besides the exchange's own calls. On a rank that measures for its host it
        takes, once a minute, as long as rank 0 takes from tick to tick. An exchange that does not answer is asked
        again at the next tick.
        """
        if self._stopped:
            return
        with suppress(ExchangeError):
            (self._reference or self._follower).tick()

    def run(self, ended: threading.Event, every_s: float = 1.0) -> None:
        """Ticks until the event is set; meant for a separate thread, as a tick may wait."""
        while not self._stopped:
            self.tick()
            if ended.wait(every_s):
                break

    def clock(self) -> Clock:
        """How much this rank's wall clock is ahead of rank 0's now, and a bound of the error.

        Both are 0 on rank 0's host. The bound is negative while the offset is unknown: before the first alignment, and
        after either clock was set until the next one. Other ranks learn a tick later that rank 0's clock was set.
        """
        if self._reference is not None:
            return Clock(offset_ns=0, uncertainty_ns=0)
        return self._follower.clock()

    def stop(self) -> None:
        """Ends a tick that waits, within some milliseconds, and makes later ones do nothing."""
        self._stopped = True
