"""The other ranks' part in the alignment of clocks: one rank of each host measures, the others read what it found."""

from collections.abc import Callable, Iterator

from lightning_ncclsafe.collectives.alignment import Alignment, Round, aligned
from lightning_ncclsafe.collectives.clock_keys import (
    PROMPT_S,
    REFERENCE,
    ROUNDS,
    TURN,
    Surroundings,
    alignment_key,
    alignment_text,
    leader_key,
    numbers,
    ping_key,
    pong_key,
    read_alignment,
    slot_key,
)
from lightning_ncclsafe.timing.windows import Clock

# Many ranks ask rank 0's host for what only changes once a minute.
_READ_EVERY_S = 5.0
# How long an invited rank waits for rank 0's next tick: so much longer than one takes, at most, and polls how often.
_LATER = 1.2
_LATER_S = 0.5
_LONGEST_S = 15.0
_LINGER_S = 0.02
# For an answer within a session.
_ANSWER_S = 0.1

# Session, and how long rank 0 takes from tick to tick.
_Turn = tuple[int, float]


class Follower:
    """What a rank other than 0 does in its ticks.

    Args:
        around: Exchange, clocks and sleep.
        is_stopped: Whether nobody waits for the outcome any more.
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
        """This rank's clock now, as far as it is known."""
        if self._shares_reference:
            return Clock(offset_ns=0, uncertainty_ns=0)
        found = self._alignment
        return Clock() if found is None else found.clock(self._around.read())

    def tick(self) -> None:
        """One round of all of it; nothing on rank 0's host."""
        if self._shares_reference or not self._is_due():
            return
        reference, text = self._around.get_many([REFERENCE, self._other_key()])
        epoch, _, boot_id = reference.partition(" ")
        if not boot_id:
            return
        self._shares_reference = boot_id == self._around.boot_id
        self._see_epoch(numbers(epoch))
        if self._shares_reference:
            return
        if self._leader is None:
            self._leader = self._around.claim(leader_key(self._around.boot_id))
        elif self._leader == self._around.rank:
            self._lead(text)
        else:
            self._accept(read_alignment(text))

    def _is_due(self) -> bool:
        """For a rank that aligns its host, always: its turn may have come."""
        now_s = self._around.monotonic()
        if self._leader not in (None, self._around.rank) and self._alignment is not None and self._read_s is not None:
            return now_s - self._read_s >= _READ_EVERY_S
        return True

    def _other_key(self) -> str:
        return TURN if self._leader in (None, self._around.rank) else alignment_key(self._around.boot_id)

    def _see_epoch(self, told: tuple[int, ...]) -> None:
        self._epoch = told[0] if told else 0
        if self._alignment is not None and self._alignment.epoch != self._epoch:
            self._alignment = None

    def _accept(self, told: Alignment | None) -> None:
        self._read_s = self._around.monotonic()
        if told is not None and told.epoch == self._epoch:
            self._alignment = told

    def _lead(self, text: str) -> None:
        if not self._has_slot:
            self._has_slot = self._take_slot()
        turn = _turn_of(self._around.rank, numbers(text))
        if turn is not None and turn[0] != self._session:
            self._align(*turn)

    def _take_slot(self) -> bool:
        """Slots are taken in order, so that rank 0 finds all by asking for the next one."""
        return any(self._around.claim(slot_key(n)) == self._around.rank for n in range(self._around.world_size))

    def _align(self, session: int, every_s: float) -> None:
        around = self._around
        # Unlike any other attempt's, so that no old answer is taken for one to this.
        attempt = around.now_ns()
        around.put(ping_key(around.rank), f"{session} {attempt} 0")
        wait_s = min(every_s * _LATER + _LATER_S, _LONGEST_S)
        opened = self._answer((session, attempt, 0), wait_s, _LINGER_S)
        if opened is None:
            around.put(ping_key(around.rank), f"{session} {attempt} -1")
            return
        began = around.read()
        rounds = list(self._rounds(session, attempt, epoch=opened[5]))
        found = aligned(rounds, began, around.read(), opened[5])
        if found is not None:
            self._session, self._epoch, self._alignment = session, found.epoch, found
            around.put(alignment_key(around.boot_id), alignment_text(found))

    def _rounds(self, session: int, attempt: int, epoch: int) -> Iterator[Round]:
        for number in range(1, ROUNDS + 1):
            sent_ns = self._around.now_ns()
            self._around.put(ping_key(self._around.rank), f"{session} {attempt} {number}")
            pong = self._answer((session, attempt, number), _ANSWER_S, PROMPT_S)
            got_ns = self._around.now_ns()
            if pong is None or pong[5] != epoch:
                return
            yield Round(sent_ns, pong[3], pong[4], got_ns)

    def _answer(self, message: tuple[int, int, int], wait_s: float, every_s: float) -> tuple[int, ...] | None:
        until_s = self._around.monotonic() + wait_s
        while not self._is_stopped() and self._around.monotonic() < until_s:
            pong = numbers(self._around.get(pong_key(self._around.rank)))
            if len(pong) == 6 and pong[:3] == message:
                return pong
            self._around.sleep(every_s)
        return None


def _turn_of(rank: int, told: tuple[int, ...]) -> _Turn | None:
    """Of rank 0's ticks in nanoseconds, and pairs of rank and session."""
    sessions = dict(zip(told[1::2], told[2::2], strict=False))
    return (sessions[rank], told[0] / 1e9) if rank in sessions else None
