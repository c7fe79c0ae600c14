"""How all ranks reach one verdict: each publishes its facts, rank 0 judges, and all ranks follow the verdict.

No rank waits forever. A rank that cannot take part announces that once, and is not waited for again. Ranks that do not
arrive are given up after a deadline, and the first rank to give up decides for all that there is no verdict.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_ncclsafe.exchange import Exchange, comes_first, keep_trying, wait_for
from lightning_ncclsafe.facts import EpochEnd, RankFacts, codec
from lightning_ncclsafe.facts.findings import Finding

T = TypeVar("T")

# Ranks come within about a millisecond of each other, as Lightning has just made them wait for all.
_SHORTEST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
# How much longer the other ranks wait than rank 0, whose verdict names the missing ranks.
_VERDICT_S = 10.0
# How long the next meeting waits for ranks that have missed one.
_ABSENT_S = 1.0
# After how long a rank looks whether others share by something else, and how often: it takes a look at storage.
_APART_S, _LOOK_S = 5.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank publishes.

    Attributes:
        number: The number of the meeting, from 1: all meetings use the same key.
        facts: The facts; without ``data`` if the rank could not determine anything.
        withdrawn: Whether this rank takes no part from now on.
    """

    number: int
    facts: RankFacts
    withdrawn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The verdict that all ranks follow.

    Attributes:
        complete: Whether all ranks have contributed data, so that there is a verdict.
        error: The text of the error to raise; empty if ranks agree, or continue anyway.
        findings: The differences, the most important first.
        folder: The folder of the report; empty if none was written.
        incident: The number of the incident that was reported; 0 if there was none.
        ends: How an epoch of each loader ends.
    """

    complete: bool = False
    error: str = ""
    findings: tuple[Finding, ...] = ()
    folder: str = ""
    incident: int = 0
    ends: tuple[EpochEnd, ...] = ()


class Meeting:
    """The meetings of one call of the Trainer, seen from one rank.

    Args:
        deadline_s: Seconds after which ranks that do not come are given up.
        name: The subject of the meetings, unique on the exchange.
        check: Called repeatedly while a rank waits; raises if the run ends, as no rank comes any more then.

    Attributes:
        number: The number of the last meeting.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        rank: int,
        world_size: int,
        deadline_s: float,
        say: Callable[[str], None],
        name: str = "data",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._deadline_s = deadline_s
        self._say = say
        self._name = name
        self._check = check
        self._absent: set[int] = set()
        self._withdrawn: dict[int, RankFacts] = {}
        self._last: dict[int, bytes] = {}
        # What this rank has published, the verdict before with its key, and what ranks had given up then.
        self._own: Contribution | None = None
        self._verdict: tuple[str, bytes] | None = None
        self._given_up = ""
        self.number = 0

    def meet(self, facts: RankFacts, judge: Callable[[tuple[RankFacts, ...]], Agreed]) -> Agreed:
        """Publishes this rank's facts, and returns the verdict, which is the same on all ranks.

        Args:
            judge: Makes the verdict, on rank 0, from the facts of the ranks that came, by rank.

        Raises:
            ExchangeError: If ranks cannot share.
        """
        self.number += 1
        # The same key every time, so that loaders that are created again each epoch do not fill the store: a rank gets
        # here again only after rank 0 has read its previous contribution.
        self._own = Contribution(number=self.number, facts=facts)
        self._publish(self._own)
        return self._judge(judge) if self._rank == 0 else self._await_verdict()

    def withdraw(self, facts: RankFacts) -> None:
        """Announces that this rank takes no part from now on, so that the others do not wait for it.

        Raises:
            ExchangeError: If ranks cannot share.
        """
        self._publish(Contribution(number=0, facts=facts, withdrawn=True))

    def _publish(self, contribution: Contribution) -> None:
        self._keep_trying(lambda: self._exchange.set(self._key(self._rank), codec.encode(contribution)))
        self._given_up = self._exchange.lost

    def _publish_again(self) -> None:
        """Where ranks share now, if they have come apart since this rank has published."""
        if self._own is None or self._exchange.lost == self._given_up:
            return
        if (verdict := self._verdict) is not None:  # others may still wait for it
            self._keep_trying(lambda: self._exchange.set_if_absent(*verdict))
        self._publish(self._own)

    def _judge(self, judge: Callable[[tuple[RankFacts, ...]], Agreed]) -> Agreed:
        agreed = Agreed()
        try:
            agreed = judge(self._gather())
        finally:
            # The others wait for a verdict, even an empty one.
            agreed = self._settle(agreed)
        if self.number > 1:
            self._keep_trying(lambda: self._exchange.delete([self._verdict_key(self.number - 1)]))
        return agreed

    def _settle(self, agreed: Agreed) -> Agreed:
        """The verdict that all ranks follow: this one, unless another rank has been faster."""
        key, own = self._verdict_key(self.number), codec.encode(agreed)
        verdict = self._keep_trying(lambda: self._exchange.set_if_absent(key, own))
        self._verdict = key, verdict
        return codec.decode(Agreed, verdict)

    def _gather(self) -> tuple[RankFacts, ...]:
        found = dict(self._withdrawn)
        missing = set(range(self._world_size)) - found.keys()

        def all_are_there() -> bool:
            answers = self._exchange.get_many(map(self._key, sorted(missing)))
            for rank in [*missing]:
                if self._read(rank, answers.get(self._key(rank)), found):
                    missing.discard(rank)
            return not missing

        self._wait_until(all_are_there, _ABSENT_S)
        if missing - self._absent:
            self._wait_until(all_are_there, self._deadline_s)
        self._absent = missing
        return tuple(found[rank] for rank in sorted(found))

    def _read(self, rank: int, answer: bytes | None, found: dict[int, RankFacts]) -> bool:
        """Whether a rank has contributed its facts, or withdrawn."""
        # Most often it is still the contribution to the last meeting; decoding it takes a fifth of a millisecond.
        if answer is None or answer == self._last.get(rank):
            return False
        self._last[rank] = answer
        contribution = codec.decode(Contribution, answer)
        if contribution.withdrawn:
            self._withdrawn[rank] = contribution.facts
        if contribution.withdrawn or contribution.number == self.number:
            found[rank] = contribution.facts
            return True
        return False

    def _await_verdict(self) -> Agreed:
        found: list[bytes] = []
        of_rank_0: dict[int, RankFacts] = {}

        def is_there() -> bool:
            verdict = self._verdict_key(self.number)
            answers = self._exchange.get_many([verdict, self._key(0)])
            self._read(0, answers.get(self._key(0)), of_rank_0)
            if verdict in answers:
                found.append(answers[verdict])
            return bool(found or self._withdrawn)

        if not self._wait_until(is_there, self._deadline_s + _VERDICT_S):
            late = f"rank 0 did not compare the ranks' {self._name} within {self._deadline_s:g} s"
            if comes_first(self._exchange, f"{self._name}/late/{self.number}", self._rank):
                self._say(f"rank {self._rank}: {late}; continuing without the comparison")
        # If rank 0 still comes, it must follow the same verdict.
        return codec.decode(Agreed, found[0]) if found else self._settle(Agreed())

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _verdict_key(self, number: int) -> str:
        return f"{self._name}/verdict/{number}"

    def _wait_until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Whether something is done within the limit; asks ever more rarely.

        If it takes long, others may have come apart from this rank: then it asks where they share.
        """
        look_s = time.monotonic() + _APART_S

        def ask() -> bool:
            nonlocal look_s
            self._check()
            if time.monotonic() > look_s:
                look_s += _LOOK_S
                self._exchange.follow()
            self._publish_again()
            return is_done()

        found = wait_for(
            ask,
            deadline_s=limit_s,
            poll_s=_SHORTEST_POLL_S,
            longest_poll_s=_LONGEST_POLL_S,
            forgive=self._exchange,
        )
        return found is True

    def _keep_trying(self, call: Callable[[], T]) -> T:
        return keep_trying(self._exchange, call, deadline_s=self._deadline_s)
