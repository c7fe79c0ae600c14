"""How the facts of all ranks are gathered: every rank publishes its own, and one of them judges and reports.

The reporter is rank 0 or, if that is silent, the lowest rank that answered. Every wait has a deadline. If a rank does
not answer, another rank of its host looks at its process from outside.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from lightning_ncclsafe.exchange import (
    Exchange,
    ExchangeError,
    first_rank,
    in_parts,
    keep_trying,
    poll_interval_s,
    wait_for,
    wait_for_keys,
)
from lightning_ncclsafe.facts import ANSWERING, ENDED, STOPPED, Incident, JobFacts, ProcessFacts, RankFacts, codec
from lightning_ncclsafe.facts.wording import size_words
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.probes.host.resources import look_at
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key

# Ranks that only wait answer within some 50 ms; a rank that is still silent after this is looked at from outside.
ANSWER_S = 0.6
# A process that runs may just be slow to answer, on an overloaded host; after this it counts as frozen.
PATIENCE_S = 3.0
# How long the others wait for the reporter.
REPORT_S = 6.0
# How long the reporter waits until the others have read the verdict.
SEEN_S = 1.0
# A rank's facts usually have some 60 kB; much more would block the store, which serves all ranks.
_MOST_BYTES = 4_000_000
_FEW_COLLECTIVES = 100
_CANNOT_ANSWER = {*ENDED, *STOPPED, "disk-sleep"}


def report_deadline_s(world_size: int) -> float:
    """How long the others wait for the reporter, which reads and judges at least a hundred ranks a second."""
    return REPORT_S + world_size / 100


def _shortened(facts: RankFacts, size_bytes: int) -> RankFacts:
    """The most important facts: what a rank is doing, and its last collectives."""
    left_out = (
        f"Its facts were too large to share ({size_words(size_bytes)}): source lines, older collectives, loaders and "
        "its view of other processes are left out."
    )
    return replace(
        facts,
        stack=tuple(replace(frame, code="", rank_condition="", branches=()) for frame in facts.stack),
        collectives=facts.collectives[-_FEW_COLLECTIVES:],
        units=(),
        peers=(),
        workers=(),
        loaders=(),
        data=None,
        preflight=None,
        missing=(*facts.missing, left_out),
    )


def share_last_facts(exchange: Exchange, facts: RankFacts) -> None:
    """Publishes the facts of a rank that leaves with an exception, as its answer in all later rounds."""
    exchange.set(_last_key(facts.rank), codec.encode(facts))


def _last_key(rank: int) -> str:
    return f"last/{rank}"


class Gathering:
    """One round of questions and answers among the ranks.

    Args:
        round_number: Number of the round, equal on all ranks.
        peers: The other ranks of this host.
        is_dropped: Whether the round has become pointless; it then ends without a verdict.
        publish_info: Whether ranks have published their info on this exchange if they watch.
        has_moved: Whether this rank has made progress since its answer, and none for long before.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        round_number: int,
        rank: int,
        world_size: int,
        peers: Iterable[RankInfo],
        witness: Callable[[Iterable[RankInfo]], list[ProcessFacts]],
        is_dropped: Callable[[], bool] = lambda: False,
        publish_info: bool = False,
        has_moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exchange = exchange
        self._key = f"round/{round_number}"
        self._key_before = f"round/{round_number - 1}"
        self._rank = rank
        self._world_size = world_size
        self._peers = {peer.rank: peer for peer in peers}
        self._witness = witness
        self._is_dropped = is_dropped
        self._publish_info = publish_info
        self._has_moved = has_moved
        self._move_is_noted = False
        self._stood_ns = 0
        self._began = time.monotonic()
        # Many ranks take longer to write to one store: some 0.3 ms each.
        self._answer_s = ANSWER_S + world_size / 1000
        self._report_s = report_deadline_s(world_size)
        self._poll_s = poll_interval_s(world_size)
        self._lower_has_answered = False
        self._gone: set[int] = set()
        self._unread: dict[int, str] = {}
        self._answers: dict[int, RankFacts] = {}
        self._witnessed: dict[int, ProcessFacts] = {}
        self._watched: dict[int, RankInfo] = {}

    def publish(self, facts: RankFacts) -> None:
        """Publishes this rank's answer; if it leaves with an exception, also for later rounds."""
        self._answers[self._rank] = facts
        self._stood_ns = facts.taken_ns
        # Not waited for: their launcher may end all other ranks within a second.
        self._gone = {peer.rank for peer in facts.peers if peer.state in ENDED}
        encoded = codec.encode(facts)
        if len(encoded) > _MOST_BYTES:
            encoded = codec.encode(_shortened(facts, len(encoded)))
        self._set(self._facts_key(self._rank), encoded)
        self._set(self._here_key(self._rank), b"")
        if facts.exception is not None:
            self._set(_last_key(self._rank), encoded)

    def answered(self) -> set[int]:
        """The ranks that have answered, including this one."""
        here = {self._here_key(rank): rank for rank in range(self._world_size)}
        return {here[key] for part in in_parts(here) for key in self._exchange.get_many(part)}

    def hold(self, incident: Incident, report: Callable[[JobFacts], Verdict]) -> Verdict | None:
        """Takes part until there is a verdict.

        Args:
            report: Judges and reports; called on one rank.

        Returns:
            The verdict, the same on all ranks; None if there was none in time, or the round was dropped.
        """
        # The first rank may report at once, the next one after the time that an answer takes, and so on.
        return wait_for(
            lambda: None if self._is_dropped() else self._follow(incident, report),
            deadline_s=self._second_term_s + self._report_s / 2 - self._waited_s(),
            poll_s=self._poll_s,
            give_up=self._is_dropped,
            forgive=self._exchange,
        )

    def attend(self) -> Verdict | None:
        """Takes part without being a rank: looks at the peers if they do not answer; returns the verdict, if any."""
        here = [*map(self._here_key, self._peers)]

        def verdict() -> bytes | None:
            return self._exchange.get_many([self._verdict_key]).get(self._verdict_key)

        # Ranks that have seen the verdict have left the round, with their answers.
        wait_for(
            lambda: verdict() or len(self._exchange.get_many(here)) == len(here),
            deadline_s=self._answer_s,
            poll_s=self._poll_s,
            give_up=self._is_dropped,
            forgive=self._exchange,
        )
        if verdict() is None and not self._is_dropped():
            self._look_at_silent_peers()
        found = wait_for(
            verdict,
            deadline_s=self._second_term_s + self._report_s / 2 - self._waited_s(),
            poll_s=self._poll_s,
            give_up=self._is_dropped,
            forgive=self._exchange,
        )
        return codec.decode(Verdict, found) if found is not None else None

    def _follow(self, incident: Incident, report: Callable[[JobFacts], Verdict]) -> Verdict | None:
        # A move that is noted after the verdict would stay on the store.
        if (verdict := self._read_verdict()) is not None:
            return verdict
        self._note_move()
        return self._take_turn(incident, report)

    def _note_move(self) -> None:
        """Publishes that this rank makes progress again, and when it last did not; the first rank's note counts."""
        now_ns = time.time_ns()
        if self._move_is_noted:
            return
        if not self._has_moved():
            self._stood_ns = now_ns
            return
        self._exchange.set_if_absent(self._moved_key, f"{self._rank} {self._stood_ns}".encode())
        self._move_is_noted = True

    def _moved(self) -> int | None:
        """The first rank that made progress again, if that may have been before the facts of another were taken."""
        noted = self._exchange.get_many([self._moved_key]).get(self._moved_key, b"").split()
        if not noted:
            return None
        rank, stood_ns = map(int, noted)
        is_early = any(facts.taken_ns > stood_ns for facts in self._answers.values() if facts.rank != rank)
        return rank if is_early else None

    def _read_verdict(self) -> Verdict | None:
        verdict = self._exchange.get_many([self._verdict_key]).get(self._verdict_key)
        if verdict is None:
            return None
        self._leave(seen=True)
        return codec.decode(Verdict, verdict)

    def _take_turn(self, incident: Incident, report: Callable[[JobFacts], Verdict]) -> Verdict | None:
        waited_s = self._waited_s()
        if waited_s > self._answer_s:
            self._look_at_silent_peers()
        if not self._is_my_turn(waited_s) or not self._claim(waited_s):
            return None
        job = self._collect(incident)
        if self._is_dropped():
            return None
        verdict = report(job)
        self._set(self._verdict_key, codec.encode(verdict))
        self._leave()
        return verdict

    def _set(self, key: str, value: bytes) -> None:
        keep_trying(self._exchange, lambda: self._exchange.set(key, value), deadline_s=PATIENCE_S)

    def _leave(self, *, seen: bool = False) -> None:
        """Finishes the round once there is a verdict, for the other ranks and for the store."""
        with suppress(ExchangeError):
            if seen:
                self._exchange.set(self._seen_key(self._rank), b"")
            else:
                # The reporter may be about to leave, and the store with it: the others read the verdict first.
                others = (self._seen_key(rank) for rank in self._answers if rank != self._rank)
                wait_for_keys(self._exchange, others, deadline_s=SEEN_S + 2 * self._poll_s)
            # The store uses rank 0's memory. The reporter may still check whether this rank has seen this verdict, but
            # no longer that of the round before.
            seen_before = f"{self._key_before}/seen/{self._rank}"
            own = (self._facts_key(self._rank), self._here_key(self._rank), seen_before)
            self._exchange.delete(own if seen else (*own, self._moved_key))

    def _seen_key(self, rank: int) -> str:
        return f"{self._key}/seen/{rank}"

    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def _second_term_s(self) -> float:
        """When another rank takes over, as the first reporter may have died."""
        return self._answer_s + PATIENCE_S + self._report_s / 2

    @property
    def _verdict_key(self) -> str:
        return f"{self._key}/verdict"

    @property
    def _moved_key(self) -> str:
        return f"{self._key}/moved"

    def _here_key(self, rank: int) -> str:
        """The key that shows whether a rank has answered: reading its facts takes many times as long."""
        return f"{self._key}/here/{rank}"

    def _facts_key(self, rank: int) -> str:
        return f"{self._key}/facts/{rank}"

    def _is_my_turn(self, waited_s: float) -> bool:
        if self._gone.issuperset(range(self._rank)):
            return True
        if waited_s < 2 * self._answer_s:
            return False
        # A lower rank that answered reports, unless that fails, too.
        return waited_s > self._second_term_s or not self._has_lower_answered()

    def _has_lower_answered(self) -> bool:
        if not self._lower_has_answered:
            parts = in_parts(map(self._here_key, range(self._rank)))
            self._lower_has_answered = any(self._exchange.get_many(part) for part in parts)
        return self._lower_has_answered

    def _claim(self, waited_s: float) -> bool:
        term = int(waited_s > self._second_term_s)
        return first_rank(self._exchange, f"{self._key}/reporter/{term}", self._rank) == self._rank

    def _collect(self, incident: Incident) -> JobFacts:
        wait_for(self._is_complete, deadline_s=math.inf)
        self._read_answers(_last_key)
        self._look_again()
        off = self._exchange.get_many(f"off/{rank}" for rank in self._silent())
        missing = [f"The guard of rank {key.rpartition('/')[2]} had failed and was off." for key in sorted(off)]
        missing += [f"The answer of rank {rank} could not be read: {why}" for rank, why in sorted(self._unread.items())]
        return JobFacts(
            incident=incident,
            world_size=self._world_size,
            ranks=tuple(self._answers[rank] for rank in sorted(self._answers)),
            witnessed=tuple(seen for rank, seen in sorted(self._witnessed.items()) if self._is_needed(seen)),
            absent=self._absent(),
            moved=self._moved(),
            missing=(*missing, *filter(None, [self._exchange.lost])),
        )

    def _is_needed(self, seen: ProcessFacts) -> bool:
        """Whether a rank that was seen from outside has not answered since, or not with where it is."""
        answer = self._answers.get(seen.rank)
        return answer is None or seen.gil_held or not answer.stack

    def _absent(self) -> tuple[int, ...]:
        silent = self._silent() if self._publish_info and not self._exchange.lost else []
        left = {name for part in in_parts(map(info_key, silent)) for name in self._exchange.get_many(part)}
        return tuple(rank for rank in silent if info_key(rank) not in left)

    def _is_complete(self) -> bool:
        # Measured before reading: all answers given by the deadline are read, however long that takes.
        waited_s = self._waited_s()
        self._note_move()
        self._read_answers(self._facts_key)
        silent = [rank for rank in self._silent() if rank not in self._unread]
        if self._gone.issuperset(silent) or self._is_dropped() or waited_s > self._answer_s + PATIENCE_S:
            return True
        if waited_s < self._answer_s:
            return False
        self._read_answers(_last_key)
        silent = [rank for rank in silent if rank not in self._answers]
        self._look_at_silent_peers()
        for data in self._exchange.get_many(map(self._witness_key, silent)).values():
            seen = codec.decode(ProcessFacts, data)
            self._witnessed.setdefault(seen.rank, seen)
        return all(rank in self._witnessed and self._witnessed[rank].state in _CANNOT_ANSWER for rank in silent)

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self._answers]

    def _read_answers(self, key: Callable[[int], str]) -> None:
        for part in in_parts(map(key, self._silent())):
            for name, data in self._exchange.get_many(part).items():
                if data:
                    self._read_answer(int(name.rpartition("/")[2]), data)

    def _read_answer(self, rank: int, data: bytes) -> None:
        """Decodes an answer; one that cannot be read, for instance of another version, does not affect the others."""
        try:
            self._answers[rank] = codec.decode(RankFacts, data)
            self._unread.pop(rank, None)
        except codec.DecodeError as error:
            self._unread[rank] = str(error)

    def _look_at_silent_peers(self) -> None:
        """Looks once at the silent ranks of this host, if this is its lowest rank that answered."""
        peers, self._peers = self._peers, {}
        if not peers:
            return
        answered = {int(key.rpartition("/")[2]) for key in self._exchange.get_many(map(self._here_key, peers))}
        if any(rank < self._rank for rank in answered):
            return
        # Ranks that answered for later rounds have left, and need no look.
        answered |= self._answers.keys()
        self._watched = {rank: peer for rank, peer in peers.items() if rank not in answered}
        for seen in self._witness(self._watched.values()):
            self._witnessed[seen.rank] = seen
            self._exchange.set(self._witness_key(seen.rank), codec.encode(seen))

    def _look_again(self) -> None:
        """Looks again at processes that ran: one whose connections broke may have been about to end."""
        for rank, peer in self._watched.items():
            before = self._witnessed.get(rank)
            may_have_ended = rank not in self._answers and before is not None and before.state in ANSWERING
            if may_have_ended and look_at(peer.pid, rank=rank, started=peer.started or None).state in ENDED:
                # Now with its crash trace.
                self._witnessed |= {seen.rank: seen for seen in self._witness([peer])}

    def _witness_key(self, rank: int) -> str:
        return f"{self._key}/witness/{rank}"
