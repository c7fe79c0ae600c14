"""What logs have said about one rank, and the facts that follow."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_ncclsafe.facts import Collective, ExceptionFacts, Frame, Group, Phase, Progress, RankFacts, RecordFacts
from lightning_ncclsafe.reading.groups import DEFAULT_GROUP
from lightning_ncclsafe.reading.values import stack
from lightning_ncclsafe.reading.watchdog import Standing, TimedOut
from lightning_ncclsafe.report.lines import cut

_MOST_LINES = 6
_LONGEST_LINE = 300
_MOST_GROUPS = 256
_OF_DEVICES = ("CUDA error", "CUDA failure", "Xid", "Duplicate GPU")
UNKNOWN_GROUP = "unknown"
"""Stands for a process group that is not the default one, and that the log does not name."""


class Ended(NamedTuple):
    """How the process of a rank ended, according to its launcher."""

    rank: int
    exit_code: int
    host: str = ""
    is_first: bool = False
    at_s: float | None = None
    """By that host's clock, seconds; None if unknown."""


@dataclass(slots=True)
class RankLog:
    """What logs have said about one rank.

    Attributes:
        rank: Global rank.
        timeouts: Its collectives that have timed out, by sequence number and operation.
        standings: Its last position in each group, by the group's name.
        at: The group of a sequence number that the rank has reached, if known.
        is_mixed: Whether the log has collectives of several groups without the names of the groups.
        is_apart: Whether collectives of groups without names have different numbers.
        ended_s: When its process ended, by its host's clock, seconds; None if unknown.
    """

    rank: int
    timeouts: dict[tuple[int, str], TimedOut] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    at: dict[int, str] = field(default_factory=dict)
    is_mixed: bool = False
    is_apart: bool = False
    stacks: list[Frame] = field(default_factory=list)
    exception: ExceptionFacts | None = None
    awaited: set[int] = field(default_factory=set)
    awaited_in: str = ""
    exit_code: int | None = None
    ended_first: bool = False
    ended_s: float | None = None
    host: str = ""
    stuck_s: int = 0
    lines: list[str] = field(default_factory=list)

    def quote(self, text: str) -> None:
        """Keeps an informative line."""
        line = cut(text.strip(), _LONGEST_LINE)
        if len(self.lines) < _MOST_LINES and line not in self.lines:
            self.lines.append(line)

    def add_timeout(self, call: TimedOut) -> None:
        """Keeps a collective that has timed out: of several messages about it, the first with most details."""
        self.timeouts.pop((call.seq, "") if call.op else (-1, ""), None)
        if call.seq:
            self.timeouts.pop((0, ""), None)
        known = self.timeouts.get((call.seq, call.op))
        says_more = known is None or (known.takes is None and call.takes is not None)
        if says_more and len(self.timeouts) < _MOST_GROUPS:
            self.timeouts[(call.seq, call.op)] = call

    def add_timeout_elsewhere(self) -> None:
        """Keeps that the rank has timed out, if nothing else is known about that."""
        if not self.timeouts:
            self.timeouts[(0, "")] = TimedOut(0, "", None, None, 0, 0, None)

    def add_end(self, end: Ended) -> None:
        """Keeps how its process ended; the first message counts."""
        self.exit_code = self.exit_code or end.exit_code
        self.ended_first = self.ended_first or end.is_first
        self.ended_s = end.at_s if self.ended_s is None else self.ended_s
        self.host = self.host or end.host

    def has_named(self, seq: int) -> bool:
        """Whether the operation that has timed out under a number is known."""
        return any(op and number == seq for number, op in self.timeouts)

    def add_standing(self, standing: Standing) -> None:
        """Keeps the rank's position; the last message counts, unless it came after everything had ended."""
        if standing.group not in self.standings and len(self.standings) >= _MOST_GROUPS:
            return
        before = self.standings.get(standing.group)
        if before is None or before.seq is None or standing.seq is not None:
            self.standings[standing.group] = standing
        if standing.seq is not None:
            self.at.setdefault(standing.seq, standing.group)

    def add_exception(self, exception: ExceptionFacts) -> None:
        """Keeps the first exception that is the rank's own; one that is a consequence only where there is no other.

        What a rank raises after it has given up a collective is a consequence: the collective has left it no valid
        data.
        """
        if self.has_given_up and not exception.type.startswith(_OF_DEVICES):
            exception = replace(exception, is_consequence=True)
        if self.exception is None or (self.exception.is_consequence and not exception.is_consequence):
            self.exception = exception

    @property
    def numbers(self) -> set[int]:
        """The numbers in which it waits, by lines of its own."""
        standing = (one.seq for one in self.standings.values() if one.seq)
        return {*standing, *(seq for seq, _ in self.timeouts if seq)}

    @property
    def has_given_up(self) -> bool:
        """Whether its watchdog has given up a collective."""
        return any(call.ran_ms for call in self.timeouts.values())

    @property
    def has_finding(self) -> bool:
        """Whether this says anything about what the rank did, other than being alive."""
        waits = self.timeouts or self.standings or self.awaited
        return bool(waits or self.exception or self.stuck_s or self.exit_code)

    def facts(self, members: dict[str, tuple[int, ...]]) -> RankFacts:
        """The facts that follow.

        Args:
            members: Global ranks of the groups, if known.
        """
        calls = [self._collective(call) for call in self.timeouts.values()]
        names = dict.fromkeys([*self.standings, *(call.group for call in calls)])
        return RankFacts(
            rank=self.rank,
            host=self.host,
            progress=Progress(phase=Phase.UNKNOWN),
            groups=tuple(self._group(name, calls, members.get(name, ())) for name in names),
            collectives=tuple(sorted(calls, key=lambda call: call.seq)),
            exception=self.exception,
            record=RecordFacts(
                has_log=True,
                group_known=not calls or all(call.seq in self.at for call in self.timeouts.values()),
                waited_ms=max((call.ran_ms for call in self.timeouts.values()), default=0),
                awaited=tuple(sorted(self.awaited)),
                awaited_in=self.awaited_in,
                exit_code=self.exit_code,
                ended_first=self.ended_first,
                stuck_s=self.stuck_s,
                lines=tuple(self.lines),
            ),
        )

    def group_of(self, call: TimedOut) -> str:
        """Name of the group of a collective, which another line may give."""
        if call.seq in self.at:
            return self.at[call.seq]
        if self.is_mixed or (call.seq == 0 and not call.op) or (call.rank is not None and call.rank != self.rank):
            return f"{UNKNOWN_GROUP} {call.seq}" if self.is_apart else UNKNOWN_GROUP
        return DEFAULT_GROUP[0]

    def waits_at(self) -> list[tuple[str, int]]:
        """Groups and numbers in which the rank waits, by its positions."""
        places = []
        for group, standing in self.standings.items():
            seq = standing.completed + 1 if standing.seq is None else standing.seq
            if 0 < seq <= standing.enqueued:
                places.append((group, seq))
        return places

    def _collective(self, call: TimedOut) -> Collective:
        return Collective(
            group=self.group_of(call),
            seq=call.seq,
            op=call.op,
            backend="nccl",
            input_sizes=(call.takes,) if call.takes is not None else (),
            output_sizes=((call.gives,),) if call.gives is not None else (),
            timeout_ms=call.timeout_ms,
            stack=stack(self.stacks[::-1]) if len(self.timeouts) == 1 else (),
        )

    def _group(self, name: str, calls: list[Collective], members: tuple[int, ...]) -> Group:
        seqs = [call.seq for call in calls if call.group == name]
        standing = self.standings.get(name)
        enqueued = max([*seqs, standing.enqueued if standing else 0])
        # What has timed out has not completed; the counter may never have been written.
        completed = min([standing.completed if standing else enqueued, enqueued, *(seq - 1 for seq in seqs)])
        about = standing.description if standing else (DEFAULT_GROUP[1] if name == DEFAULT_GROUP[0] else "")
        return Group(
            name=name,
            description=about,
            ranks=members,
            last_enqueued=enqueued,
            last_started=standing.started if standing else -1,
            last_completed=max(completed, 0),
        )
