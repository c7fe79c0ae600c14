"""Rank 0's part in the alignment of clocks: invites hosts, some at a time, and answers their messages."""

from dataclasses import dataclass

from lightning_ncclsafe.collectives.alignment import Reading
from lightning_ncclsafe.collectives.clock_keys import (
    PROMPT_S,
    REFERENCE,
    ROUNDS,
    TURN,
    Surroundings,
    numbers,
    ping_key,
    pong_key,
    slot_key,
)

# A host's clock is aligned again after a minute, or later in a job of so many hosts that this would be all rank 0 does.
_AGAIN_S = 60.0
_AGAIN_PER_HOST_S = 0.5
# Hosts that are asked to be there at the next tick; each polls until then.
_MOST_INVITED = 8
# What all sessions of a tick may take, and what a session waits for the next message.
_SERVE_S = 0.3
_QUIET_S = 0.05
# A host that has not come by then is asked again after all others.
_EXPIRES_S = 30.0
_EXPIRES_TICKS = 3


@dataclass(slots=True)
class _Invitation:
    session: int
    since_s: float
    ticks: int = 0


class Reference:
    """What rank 0 does in its ticks.

    Args:
        around: Exchange, clocks and sleep.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._epoch = 0
        self._reading: Reading | None = None
        self._due_s: dict[int, float] = {}
        self._invited: dict[int, _Invitation] = {}
        self._sessions = 0
        self._last_tick_s: float | None = None
        self._told_turn: tuple[float, tuple[int, ...]] = (0.0, ())

    def tick(self) -> None:
        """One round of all of it."""
        began_s = self._around.monotonic()
        every_s = 1.0 if self._last_tick_s is None else began_s - self._last_tick_s
        self._last_tick_s = began_s
        self._watch_own_clock()
        self._meet()
        self._serve(began_s + _SERVE_S)
        self._invite(every_s)

    def _watch_own_clock(self) -> None:
        """All alignments are void once rank 0's own clock has been set: the epoch tells."""
        now = self._around.read()
        has_stepped = self._reading is not None and now.has_stepped(self._reading)
        self._reading = now
        if has_stepped:
            self._epoch = 0
            self._due_s = dict.fromkeys(self._due_s, 0.0)
            self._invited = {}
        if not self._epoch:
            self._around.put(REFERENCE, f"{now.wall_ns} {self._around.boot_id}")
            self._epoch = now.wall_ns

    def _meet(self) -> None:
        while len(self._due_s) < self._around.world_size:
            leader = numbers(self._around.get(slot_key(len(self._due_s))))
            if not leader or leader[0] in self._due_s:
                return
            self._due_s[leader[0]] = 0.0

    def _serve(self, until_s: float) -> None:
        """Those that were invited and are there."""
        leaders = [*self._invited]
        pings = self._around.get_many([ping_key(leader) for leader in leaders]) if leaders else []
        for leader, ping in zip(leaders, pings, strict=True):
            invitation = self._invited[leader]
            told = numbers(ping)
            is_there = len(told) == 3 and told[0] == invitation.session and told[2] == 0
            if is_there and self._answer(leader, told[:2], until_s):
                self._put_off(leader)

    def _put_off(self, leader: int) -> None:
        del self._invited[leader]
        self._due_s[leader] = self._around.monotonic() + max(_AGAIN_S, _AGAIN_PER_HOST_S * len(self._due_s))

    def _answer(self, leader: int, session: tuple[int, ...], until_s: float) -> bool:
        """Whether all rounds came, each soon after the one before."""
        around, expected = self._around, 0
        quiet_s = around.monotonic() + _QUIET_S
        while around.monotonic() < min(until_s, quiet_s):
            ping = around.get(ping_key(leader))
            # Not earlier: that the message had been sent by then is what this time proves.
            seen_ns = around.now_ns()
            if numbers(ping) != (*session, expected):
                around.sleep(PROMPT_S)
                continue
            told = f"{session[0]} {session[1]} {expected} {seen_ns}"
            around.put(pong_key(leader), f"{told} {around.now_ns()} {self._epoch}")
            if expected == ROUNDS:
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
        self._tell_turn(every_s)

    def _tell_turn(self, every_s: float) -> None:
        """Who is invited, and how long after a tick the next one comes: so long they have to be there."""
        sessions = tuple(invitation.session for invitation in self._invited.values())
        told_s, told = self._told_turn
        if sessions == told and (not sessions or told_s / 1.5 < every_s < told_s * 1.5):
            return
        turn = " ".join(f"{leader} {invitation.session}" for leader, invitation in self._invited.items())
        self._around.put(TURN, f"{int(every_s * 1e9)} {turn}")
        self._told_turn = every_s, sessions
