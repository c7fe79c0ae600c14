"""The guard of one rank: decides when to look, when to warn and when to end, and wires together what does so.

Ranks agree through a log of numbered rounds that all of them read on the exchange: a rank that has waited too long, or
that raises, opens the next round; every rank then publishes its facts, one judges and reports, all learn the verdict.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_ncclsafe import _torch, codec
from lightning_ncclsafe.ending import end_run, say_goodbye, wait_for_others
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts
from lightning_ncclsafe.findings import Severity
from lightning_ncclsafe.gathering import REPORT_S, Gathering, Verdict
from lightning_ncclsafe.probes import host, stacks
from lightning_ncclsafe.probes.rank import Card, RankProbe
from lightning_ncclsafe.report.folder import write_report
from lightning_ncclsafe.report.text import render_short
from lightning_ncclsafe.rules import judge
from lightning_ncclsafe.rules.activity import Activity, activity
from lightning_ncclsafe.settings import Limits
from lightning_ncclsafe.watchdog import Watchdog

# A run whose ranks often wait this long for each other is slow, not stuck; after so many reports they repeat.
MAX_SUSPICIONS = 20
# The store serves every rank's poll: at most about a thousand a second in all.
_POLLS_PER_S = 1000.0
_POLL_S = 0.25
CLOSING_LINE = "\nthe run cannot go on, it is ended"
# How long beyond suspect_after a rank that has finished stays for those that have not, while none of them complains.
LINGER_S = 5.0
# What processes are given to start before the first meeting, however soon the user wants to know.
START_UP_S = 30.0
_FINISH_POLL_S = 0.01
# How much longer the process groups' own timeout is than the user's, so that the report always comes first.
BACKSTOP_S = 15.0
# How often a rank that stands still, but waits for nobody, is looked at again.
_GLANCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank of which job this is.

    Attributes:
        rank: Global rank.
        local_rank: Rank on this host.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this host.
        master_port: ``MASTER_PORT`` of the job.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_port: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One entry in the log of rounds: an incident, or the end of one.

    Attributes:
        incident: What the round is about.
        recovered_after_s: If training moves again: seconds for which it stood still.
    """

    incident: Incident
    recovered_after_s: float | None = None


class Guard:
    """Guards one rank for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    The guard never hurts the run: if it fails itself, it says so once, on this rank, and is off from then on.

    Args:
        place: Which rank of which job this is.
        limits: When to look and when to end.
        report_dir: The folder of all incidents; made when the first one is reported.
        exchange: What the ranks share.
        probe: Sees this rank.
        kill_launched: Ends the processes that this one launched, before this one has to exit.
        say: Prints one or more lines to the user.
    """

    def __init__(
        self,
        *,
        place: Place,
        limits: Limits,
        report_dir: Path,
        exchange: Exchange,
        probe: RankProbe,
        kill_launched: Callable[[], None] = lambda: None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._place = place
        self._limits = limits
        self._report_dir = report_dir
        self._exchange = exchange
        self._probe = probe
        self._kill_launched = kill_launched
        self._say = say or say_on_stderr
        self._round = 0
        self._incidents = 0
        self._suspicions = 0
        self._open: Incident | None = None
        self._stalled_s = 0.0
        self._glanced_idle_s = 0.0
        self._verdict: Verdict | None = None
        self._told = threading.Event()
        self._main_thread_left = threading.Event()
        self._off = False
        self._next_exchange: Exchange | None = None
        self._connected = False
        self._watchdog = Watchdog(
            position=probe.position,
            tick=self._tick,
            on_failure=self._switch_off,
            poll_s=max(_POLL_S, place.world_size / _POLLS_PER_S),
        )

    # What the strategy calls, on the main thread.

    def start(self) -> None:
        """Begins to watch. There may be no process group yet."""
        self._watchdog.start()

    def connect(self, exchange: Exchange) -> None:
        """Goes over to another exchange, with a log of its own: the process group, and so the job's store, is there."""
        exchange.set(f"card/{self._place.rank}", codec.encode(self._probe.card))
        # The watchdog may be in the middle of a round about this very delay; it is dropped, nobody waits for it.
        self._next_exchange = exchange
        self._watchdog.wake()

    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """The Trainer's function raised on this rank: the others are told, and the report written, before it leaves.

        Args:
            error: What was raised.

        Returns:
            The error to raise in its place, if it only says that a collective failed and the cause is known.
        """
        self._main_thread_left.set()
        if self._off or self._place.world_size == 1 or _is_orderly(error):
            return None
        is_consequence = _torch.is_communication_error(error)
        if not (is_consequence and self._ends_run):
            self._probe.exception = stacks.exception_facts(error, is_consequence=is_consequence)
            self._told.clear()
            self._watchdog.wake()
            self._told.wait(2 * REPORT_S)
        return self._timeout_error() if is_consequence and self._ends_run else None

    def finish(self) -> None:
        """The Trainer's function returned on this rank. Waits until it has on all, and stays to answer meanwhile.

        A rank that left would take its facts with it, and rank 0 the job's store, while others still wait for them.

        Raises:
            CollectiveTimeoutError: If the others wait for this rank in vain.
        """
        self._probe.finished = True
        self._main_thread_left.set()
        if self._off or self._place.world_size == 1:
            return
        with suppress(ExchangeError):
            exchange = self._next_exchange or self._exchange
            self._wait_until_all_finished(exchange)
            say_goodbye(exchange, self._place.rank)
            if _torch.hosts_store(self._place.rank) and not self._ends_run:
                wait_for_others(exchange, self._place.rank, self._place.world_size)
        if self._ends_run:
            raise self._timeout_error()

    def close(self) -> None:
        """Ends the watch; threads, connections, files and signal handlers are given back."""
        self._off = True
        self._watchdog.stop()
        self._probe.close()
        for exchange in (self._exchange, self._next_exchange):
            if exchange is not None:
                exchange.close()

    @property
    def _ends_run(self) -> bool:
        return self._verdict is not None and self._verdict.fatal and self._limits.on_timeout == "abort"

    def _timeout_error(self) -> CollectiveTimeoutError:
        verdict = self._verdict
        assert verdict is not None
        return CollectiveTimeoutError(verdict.answer, findings=verdict.findings, report_folder=verdict.folder)

    def _wait_until_all_finished(self, exchange: Exchange) -> None:
        """Rank 0 counts and tells, so that the store is not asked for every rank by every rank."""
        rank, world_size = self._place.rank, self._place.world_size
        exchange.set(f"finished/{rank}", b"")
        keys = ["finished/all"] if rank else [f"finished/{other}" for other in range(world_size)]
        give_up = time.monotonic() + self._limits.suspect_after_s + LINGER_S
        while len(exchange.get_many(keys)) < len(keys) and not self._need_not_stay(give_up):
            time.sleep(_FINISH_POLL_S)
        if rank == 0:
            exchange.set("finished/all", b"")
        # An incident that was open a moment ago is over; there is still time to say so.
        give_up = time.monotonic() + 1
        while self._open is not None and not self._need_not_stay(give_up) and time.monotonic() < give_up:
            self._watchdog.wake()
            time.sleep(_FINISH_POLL_S)

    def _need_not_stay(self, give_up: float) -> bool:
        # Others may have work of their own left, and then this rank may go; but not while somebody waits for it.
        nobody_waits = self._open is None and time.monotonic() > give_up
        is_settled = self._verdict is not None and self._verdict.fatal
        return nobody_waits or is_settled or self._off or bool(self._exchange.lost)

    # What the watchdog calls, on its thread.

    def _tick(self, idle_s: float) -> None:
        self._change_exchange()
        self._know_peers()
        entry = self._read_round() or self._open_round(idle_s)
        if entry is not None:
            self._take_part(entry, idle_s)
            self._round += 1

    def _change_exchange(self) -> None:
        if self._next_exchange is not None and not self._connected:
            self._exchange.close()
            self._exchange = self._next_exchange
            self._round, self._open, self._connected = 0, None, True

    def _know_peers(self) -> None:
        """Reads the cards of the ranks of this host, once they are all there: later nobody may be able to give them."""
        place = self._place
        if not self._connected or self._probe.peers or place.local_world_size == 1:
            return
        first = place.rank - place.local_rank
        keys = [f"card/{rank}" for rank in range(first, first + place.local_world_size) if rank != place.rank]
        with suppress(ExchangeError):
            self._keep_cards(keys)

    def _keep_cards(self, keys: list[str]) -> None:
        cards = [codec.decode(Card, card) for card in self._exchange.get_many(keys).values()]
        if len(cards) == len(keys):
            self._probe.peers = tuple(card for card in cards if card.host == self._probe.card.host)

    def _read_round(self) -> Round | None:
        key = f"log/{self._round}"
        try:
            found = self._exchange.get_many([key]).get(key)
        except ExchangeError:
            return None  # then this rank is on its own
        return codec.decode(Round, found) if found is not None else None

    def _open_round(self, idle_s: float) -> Round | None:
        entry = self._recovery(idle_s)
        if entry is None:
            kind = self._reason(idle_s)
            entry = Round(incident=self._incident(kind, idle_s)) if kind is not None else None
        if entry is None:
            return None
        try:
            return codec.decode(Round, self._exchange.set_if_absent(f"log/{self._round}", codec.encode(entry)))
        except ExchangeError:
            return entry  # alone, but not silent

    def _recovery(self, idle_s: float) -> Round | None:
        """The end of the incident, if this rank opened it and moves again."""
        stalled_s, self._stalled_s = self._stalled_s, idle_s
        if self._open is None or self._open.opened_by != self._place.rank or idle_s >= stalled_s:
            return None
        return Round(incident=self._open, recovered_after_s=round(stalled_s, 1))

    def _reason(self, idle_s: float) -> IncidentKind | None:
        if self._probe.exception is not None and not self._told.is_set():
            return IncidentKind.EXCEPTION
        suspect_after_s = self._limits.suspect_after_s
        if not self._connected:
            # Before there is a process group, processes start and import; that is not a matter of a few seconds.
            suspect_after_s = max(suspect_after_s, min(START_UP_S, self._limits.timeout_s))
        if idle_s < suspect_after_s or not self._is_time_to_glance(idle_s, suspect_after_s):
            return None
        doing = activity(self._probe.glance(idle_s))
        if doing.waits_for_peers and not doing.exempt:
            if self._ends_run:
                self._end()
            if idle_s >= self._deadline_s(doing) and not self._is_over():
                return IncidentKind.TIMEOUT
        if self._open is None and self._suspicions < MAX_SUSPICIONS and (doing.waits_for_peers or doing.waits_for_data):
            return IncidentKind.SUSPECT
        return None

    def _is_time_to_glance(self, idle_s: float, suspect_after_s: float) -> bool:
        """When a limit has just been passed, and once a second from then on."""
        before_s = self._glanced_idle_s if self._glanced_idle_s <= idle_s else 0.0
        passed = any(before_s < limit_s <= idle_s for limit_s in (suspect_after_s, self._limits.timeout_s))
        if passed or idle_s - before_s >= _GLANCE_S:
            self._glanced_idle_s = idle_s
            return True
        return False

    def _deadline_s(self, doing: Activity) -> float:
        """The hard limit; a group that was created with a longer timeout of its own keeps that."""
        own_s = doing.collective.timeout_ms / 1000 if doing.collective is not None else 0.0
        return own_s if own_s > self._limits.timeout_s + BACKSTOP_S else self._limits.timeout_s

    def _is_over(self) -> bool:
        return self._verdict is not None and self._verdict.incident.kind is IncidentKind.TIMEOUT

    def _incident(self, kind: IncidentKind, idle_s: float) -> Incident:
        if kind is IncidentKind.TIMEOUT and self._open is not None:
            return replace(self._open, kind=kind, opened_by=self._place.rank, idle_s=round(idle_s, 1))
        return Incident(
            number=self._incidents + 1,
            kind=kind,
            opened_by=self._place.rank,
            opened_ns=time.time_ns(),
            idle_s=round(idle_s, 1),
            suspect_after_s=self._limits.suspect_after_s,
            timeout_s=self._limits.timeout_s,
        )

    def _take_part(self, entry: Round, idle_s: float) -> None:
        incident = entry.incident
        if entry.recovered_after_s is not None:
            self._open = self._verdict = None
            if self._place.rank == 0:
                self._say(f"recovered after {entry.recovered_after_s:.0f} s (incident {incident.number})")
            return
        self._incidents = max(self._incidents, incident.number)
        self._suspicions += incident.kind is IncidentKind.SUSPECT
        self._open = incident
        self._verdict = self._gather(incident, idle_s) or self._verdict
        self._told.set()
        # Where the cause is fatal before the limit, each rank first makes sure that it still waits: see _reason.
        if self._ends_run and incident.kind is IncidentKind.TIMEOUT:
            self._end()

    def _gather(self, incident: Incident, idle_s: float) -> Verdict | None:
        facts = self._probe.look(idle_s)
        lost = self._exchange.lost
        gathering = Gathering(
            self._exchange,
            round_number=self._round,
            rank=self._place.rank,
            world_size=self._place.world_size,
            peers=self._probe.peers or self._peers_by_environment(),
            witness=self._probe.witness,
            missing=(lost,) if lost else (),
            is_dropped=lambda: self._off or (self._next_exchange is not None and not self._connected),
        )
        try:
            gathering.publish(facts)
            return gathering.hold(incident, self._report)
        except ExchangeError as error:
            alone = JobFacts(
                incident=incident, world_size=self._place.world_size, ranks=(facts,), missing=(str(error),)
            )
            return self._report(alone)

    def _peers_by_environment(self) -> tuple[Card, ...]:
        """Ranks of this host that have not come far enough to leave a card."""
        if self._connected or self._place.local_world_size == 1:
            return ()
        first = self._place.rank - self._place.local_rank
        found = host.find_ranks(self._place.master_port)
        name = self._probe.card.host
        return tuple(
            Card(rank=first + n, host=name, pid=pid) for n, pid in found.items() if n != self._place.local_rank
        )

    def _report(self, job: JobFacts) -> Verdict:
        """Judges, writes and prints; on one rank."""
        diagnosis = judge(job)
        verdict = Verdict(
            incident=job.incident,
            answer=diagnosis.findings[0].summary if diagnosis.findings else "",
            findings=diagnosis.findings,
            unanswered=diagnosis.unanswered,
            fatal=job.incident.kind is IncidentKind.TIMEOUT
            or any(f.severity is Severity.ERROR for f in diagnosis.findings),
        )
        if _all_raised_alike(job):
            return verdict  # their own tracebacks say it all
        try:
            folder = str(write_report(diagnosis, self._report_dir))
            where = f"report: {folder}"
        except OSError as error:
            folder, where = "", f"the report could not be written: {error}"
        ends = self._limits.on_timeout == "abort" and verdict.fatal
        self._say(f"{render_short(diagnosis)}\n{where}{CLOSING_LINE if ends else ''}")
        return replace(verdict, folder=folder)

    def _end(self) -> None:
        """Ends the run on this rank, unless its main thread is already on its way out."""
        if not self._main_thread_left.is_set():
            end_run(
                exchange=self._exchange,
                rank=self._place.rank,
                world_size=self._place.world_size,
                main_thread_left=self._main_thread_left,
                kill_launched=self._kill_launched,
            )

    def _switch_off(self, error: Exception) -> None:
        self._off = True
        self._told.set()
        self._say(f"rank {self._place.rank}: the guard has failed and is off, training goes on: {error!r}")


def _is_orderly(error: BaseException) -> bool:
    """Whether an exception is the guard's, Lightning's or the user's way to stop on all ranks."""
    orderly = (KeyboardInterrupt, CollectiveTimeoutError)
    return isinstance(error, orderly) or type(error).__name__ in ("SIGTERMException", "_TunerExitException")


def _all_raised_alike(job: JobFacts) -> bool:
    raised = {(f.exception.type, f.exception.stack[-1:], f.exception.is_consequence) for f in job.ranks if f.exception}
    everyone = len(job.ranks) == job.world_size and all(facts.exception for facts in job.ranks)
    return everyone and len(raised) == 1 and not any(is_consequence for *_, is_consequence in raised)


def say_on_stderr(text: str) -> None:
    """Prints to the user, every line marked as ours; the first one, which is the answer, stands out."""
    from rich.console import Console
    from rich.text import Text

    first, *rest = text.splitlines() or [""]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("\n".join([f"[ncclsafe] {first}", *(f"[ncclsafe] {line}" for line in rest)])))
