"""The guard of one rank: notices that it stands still, and wires together what looks, shares, judges, tells and ends.

Ranks agree through a log of numbered rounds: a rank that has waited too long, or that raises, opens the next round;
every rank then publishes its facts, one of them judges and reports, and all learn the verdict.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from lightning_ncclsafe import _torch
from lightning_ncclsafe.code.libraries import TRAINER_STAGE
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.errors import CollectiveTimeoutError, DatasetMismatchError
from lightning_ncclsafe.exchange import Exchange, ExchangeError, comes_first
from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts, NotRecorded, Phase, RankFacts, codec
from lightning_ncclsafe.facts.phase_kinds import LONG_S, PhaseKind
from lightning_ncclsafe.guard.ending import (
    AT_LIMIT_S,
    Ending,
    end_frozen,
    end_run,
    say_goodbye,
    stay_until_all_finished,
    wait_for_others,
)
from lightning_ncclsafe.guard.gathering import Gathering, leave_word, report_deadline_s
from lightning_ncclsafe.guard.incident_log import IncidentEntry, IncidentLog
from lightning_ncclsafe.guard.local_ranks import LocalRanks, Place
from lightning_ncclsafe.guard.rank_hosts import RankHosts
from lightning_ncclsafe.guard.reporter import Reporter, Verdict, print_no_told_errors
from lightning_ncclsafe.guard.restarts import launch_words
from lightning_ncclsafe.guard.thresholds import Thresholds
from lightning_ncclsafe.guard.watchdog import Watchdog
from lightning_ncclsafe.probes.network.reach import own_address_towards, try_addresses
from lightning_ncclsafe.probes.process import stacks
from lightning_ncclsafe.probes.process.traceback_signal import ENDED
from lightning_ncclsafe.probes.rank import RankProbe, card_key
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.rules.kit.activity import activity
from lightning_ncclsafe.rules.kit.expected import is_compiling
from lightning_ncclsafe.rules.unknowns import not_recorded
from lightning_ncclsafe.settings import Limits

# A run whose ranks often wait this long for each other is slow, not stuck; after so many reports they repeat.
MAX_SUSPICIONS = 20
# The same of those that have waited up to the limit, where that does not end the run.
MAX_REPORTS_AT_LIMIT = 20
# Rounds of which nothing is told, as what ranks waited for was to be expected, leave a few entries each on the store.
# After so many, ranks are asked only when they have waited for longer than can be expected.
MAX_QUIET_ROUNDS = 500
# How long beyond suspect_after a rank that has finished stays for those that have not, while none of them complains.
LINGER_S = 5.0
# By how much ranks that all raise the same may differ, so that this is not taken for the failure of one.
_SAME_EXCEPTION_S = 2.0
# What a rank that has failed is given to leave before those that are ended because of it: its callbacks may save.
_FAILED_LEAVE_S = 5.0
# How long the end of an incident may take to reach everybody once training has finished.
_SETTLE_S = 1.0
# The store serves every rank's poll: at most about a thousand a second in all.
_POLLS_PER_S = 1000.0
_POLL_S = 0.25


class Guard:
    """Guards one rank for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    The guard never hurts the run: if it fails itself, it says so once, on this rank, and is off from then on.

    Args:
        place: Which rank of which job this is.
        limits: When to look and when to end.
        report_dir: The folder of all incidents; made when the first one is reported.
        exchange: What the ranks share before they have joined the process group.
        probe: Sees this rank.
        ending: What is closed when the run is ended.
        write_logs: Brings what loggers were given to storage, within so many seconds, before this process has to exit.
        before_exit: What else is left to do then.
        phase_kind: What kind of phase the Trainer is in, and the index of its batch; costs next to nothing.
        on_tick: Called at the watchdog's pace on its thread, once ranks have joined; it must be quick and not raise.
        incidents: Numbers of the incidents of this process; None for its first call.
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
        ending: Ending | None = None,
        write_logs: Callable[[float], None] = lambda _: None,
        before_exit: Callable[[], None] = lambda: None,
        phase_kind: Callable[[], tuple[PhaseKind, int]] = lambda: (PhaseKind(phase=Phase.INIT), -1),
        on_tick: Callable[[], None] = lambda: None,
        incidents: IncidentNumbers | None = None,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._place = place
        self._limits = limits
        self._exchange = exchange
        self._next_exchange: Exchange | None = None
        self._log = IncidentLog(exchange, not_before_ns=int(probe.card.started * 1e9))
        self._probe = probe
        self._local_ranks = LocalRanks(place, probe)
        self._rank_hosts = RankHosts(
            rank=place.rank, world_size=place.world_size, host=probe.card.host, launch=launch_words()
        )
        self._ending = ending or Ending()
        self._write_logs = write_logs
        self._before_exit = before_exit
        self._on_tick = on_tick
        self._phase_kind_now = phase_kind
        self._phase_kind = phase_kind()[0]
        self._say = say
        self._thresholds = Thresholds(limits)
        self._reporter = Reporter(report_dir, limits, say)
        self._joined = False
        self._came: set[int] = set()
        self._off = False
        self._open: Incident | None = None
        self._incidents = incidents or IncidentNumbers()
        self._suspicions = 0
        self._reports_at_limit = 0
        self._quiet_rounds = 0
        self._idle_s = 0.0
        self._ended_s = 0.0
        self._began_ns = 0
        self._verdict: Verdict | None = None
        self._is_leaving = False
        self._leaving_is_told = threading.Event()
        self._exception_is_told = threading.Event()
        self._main_thread_left = threading.Event()
        self._watchdog = Watchdog(
            position=probe.position,
            tick=self._tick,
            on_failure=self._switch_off,
            poll_s=max(_POLL_S, place.world_size / _POLLS_PER_S),
        )

    # What the strategy calls, on the main thread.

    def start(self) -> None:
        """Begins to watch. There may be no process group yet."""
        self._began_ns = time.time_ns()
        self._watchdog.start()

    def connect(self, exchange: Exchange) -> None:
        """Goes over to another exchange, with a log of its own: the process group, and so the job's store, is there."""
        # The watchdog may be in the middle of a round about this very delay; it is dropped, nobody waits for it.
        self._next_exchange = exchange
        with suppress(ExchangeError):  # what only helps its peers when this rank cannot speak
            exchange.set(card_key(self._place.rank), codec.encode(self._probe.card))
            self._rank_hosts.tell(exchange, own_address_towards(self._place.master_address, self._place.master_port))
        self._watchdog.wake()

    def set_up(self) -> None:
        """All ranks have met in the process groups: of what no recorder tells now, none will. One rank says so."""
        # Their cards are there now, and a peer may end in the first collective of the training.
        self._watchdog.wake()
        rank, exchange = self._place.rank, self._next_exchange or self._exchange
        groups = self._probe.glance(0.0).unrecorded
        said = [*not_recorded({rank: [group for group in groups if group.why is not NotRecorded.LOST]})]
        if said and self._place.world_size > 1 and comes_first(exchange, "unrecorded", rank):
            self._say(" ".join(said))

    @marked(Mark.STORE)
    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """The Trainer's function raised on this rank: the others are told, and the report written, before it leaves.

        Args:
            error: What was raised.

        Returns:
            The error to raise in its place, if it only says that a collective failed and the cause is known. At the
            limit it does not return: the process exits.
        """
        is_consequence = self._ending.is_closed or _torch.is_communication_error(error)
        if self._leaves_at_the_end(error):
            self.finish()
            return None
        if isinstance(error, KeyboardInterrupt):
            self._leave_word(error)
        nobody_to_tell = self._off or self._place.world_size == 1 or _is_orderly(error)
        if not nobody_to_tell and not self._is_explained(is_consequence):
            self._probe.exception = stacks.exception_facts(error, is_consequence=is_consequence)
            self._main_thread_left.set()
            self._watchdog.wake()
            self._exception_is_told.wait(2 * report_deadline_s(self._place.world_size))
        self._main_thread_left.set()
        if not self._is_explained(is_consequence):
            if _is_success(error):
                self._leave_with_success(error)
            return None
        self._leave_ended_run()
        self._ending.exit_after_main_thread()
        return self._timeout_error()

    def _leaves_at_the_end(self, error: BaseException) -> bool:
        """Whether it leaves with success once its loops are over: nobody waits for it, unlike for one that trains."""
        if self._off or self._phase_kind_now()[0].phase is Phase.INIT or not _is_success(error):
            return False
        stack = stacks.exception_facts(error, is_consequence=False).stack
        return not any(TRAINER_STAGE.has(frame.file, frame.function) for frame in stack)

    def _leave_with_success(self, error: SystemExit) -> None:
        """As far as that is known: no rank is left that trains on."""
        verdict = self._verdict
        if verdict is not None and not verdict.is_joint:
            # Whoever has started the ranks would take it for the status of the run.
            error.code = 1
        elif verdict is not None and not verdict.ends_run:
            self.finish()

    def _leave_word(self, error: BaseException) -> None:
        """Nobody is asked, as the others mostly are interrupted, too; one that is not can say why this rank left."""
        exception = stacks.exception_facts(error, is_consequence=False)
        with suppress(ExchangeError):
            leave_word(self._next_exchange or self._exchange, replace(self._probe.glance(0.0), exception=exception))

    @marked(Mark.STORE)
    def finish(self) -> None:
        """The Trainer's function returned on this rank. Waits until it has on all, and stays to answer meanwhile.

        A rank that left would take its facts with it, and rank 0 the job's store, while others still wait for them.

        Raises:
            CollectiveTimeoutError: If the others wait for this rank in vain.
        """
        self._probe.finished = True
        self._main_thread_left.set()
        rank, world_size = self._place.rank, self._place.world_size
        if world_size == 1:
            return
        exchange, began = self._next_exchange or self._exchange, time.monotonic()
        with suppress(ExchangeError):
            stay_until_all_finished(
                exchange,
                rank=rank,
                world_size=world_size,
                may_leave=lambda: self._may_leave(time.monotonic() - began),
                leave_behind=self._ask_who_stays,
            )
            self._settle()
            say_goodbye(exchange, rank)
            if _torch.hosts_store(rank) and not self.ends_run:
                wait_for_others(exchange, rank, world_size)
        if self.ends_run:
            self._leave_ended_run()
            raise self._timeout_error()

    def close(self) -> None:
        """Ends the watch; threads, connections, files and signal handlers are given back."""
        self._off = True
        self._ending.go_on()
        self._watchdog.stop()
        self._probe.close()
        for exchange in (self._exchange, self._next_exchange):
            if exchange is not None:
                exchange.close()

    @property
    def ends_run(self) -> bool:
        """Whether the run cannot go on, and is being ended."""
        return self._verdict is not None and self._verdict.ends_run

    def _leave_ended_run(self) -> None:
        """A collective broke, or nobody comes any more: nothing is saved. At the limit every rank leaves alike."""
        self._ending.close(self._timeout_error)
        if self._limit_is_told():
            # The watchdog's thread ends the process.
            self._ending.stay()
        print_no_told_errors()
        self._let_the_failed_leave()

    def _let_the_failed_leave(self) -> None:
        """Launchers take the first that ends for the cause: that is to be one that tells it, and prints it before."""
        raised = self._verdict.raised if self._verdict is not None else ()
        cards = [card for card in self._probe.peers if card.rank in raised]
        give_up = time.monotonic() + _FAILED_LEAVE_S
        while time.monotonic() < give_up and not all(self._probe.look_at_peer(card).state in ENDED for card in cards):
            time.sleep(_POLL_S / 10)

    def _timeout_error(self) -> CollectiveTimeoutError:
        verdict = self._verdict
        assert verdict is not None
        return CollectiveTimeoutError(verdict.answer, findings=verdict.findings, report_folder=verdict.folder)

    def _is_explained(self, is_consequence: bool) -> bool:
        """Whether what ends the run has been told already, and an exception only follows from it."""
        return is_consequence and self.ends_run

    def _may_leave(self, waited_s: float) -> bool:
        # Others may have work of their own left, and then this rank may go; not so soon if somebody waits for it.
        stay_s = self._limits.suspect_after_s if self._open is None else self._limits.longest_s
        return waited_s > stay_s + LINGER_S or self.ends_run or self._off or bool(self._exchange.lost)

    def _ask_who_stays(self) -> None:
        """Once this rank has left, with the store perhaps, nobody can say any more what the others do."""
        if self._open is None and not (self.ends_run or self._off or self._exchange.lost):
            self._is_leaving = True
            self._watchdog.wake()
            self._leaving_is_told.wait(report_deadline_s(self._place.world_size))

    def _settle(self) -> None:
        """An incident that was open a moment ago is over; there is still time to say so."""
        give_up = time.monotonic() + _SETTLE_S
        while self._open is not None and not self._may_leave(0) and time.monotonic() < give_up:
            self._watchdog.wake()
            time.sleep(_POLL_S / 10)

    # What the watchdog calls, on its thread.

    def _tick(self, idle_s: float) -> None:
        self._change_exchange()
        self._phase_kind, batch_idx = self._phase_kind_now()
        self._thresholds.observe(idle_s, self._phase_kind, batch_idx)
        if self._phase_kind.phase is Phase.INIT:
            self._probe.note_memory()
        self._probe.note_machine()
        if self._joined:
            self._local_ranks.meet(self._exchange)
            self._rank_hosts.meet(self._exchange)
            self._on_tick()
        else:
            self._local_ranks.look_around(idle_s)
        # Before there is a store there are only files, on storage that may be the very trouble.
        patience_s = self._thresholds.suspect_after_s(self._phase_kind, joined=False)
        has_reason = self._probe.exception is not None or self._local_ranks.has_lost or idle_s >= patience_s
        if not self._joined and not has_reason:
            return
        entry = self._log.read() or self._write_entry(idle_s)
        if entry is not None:
            self._take_part(entry, idle_s)
            self._log.number += 1

    def _change_exchange(self) -> None:
        if self._next_exchange is not None and not self._joined:
            self._exchange.close()
            self._exchange, self._joined = self._next_exchange, True
            # What was said before was about a start that has succeeded now.
            self._log, self._open, self._verdict = IncidentLog(self._exchange), None, None

    def _write_entry(self, idle_s: float) -> IncidentEntry | None:
        entry = self._recovery(idle_s)
        if entry is None and self._is_leaving and not self._leaving_is_told.is_set():
            entry = IncidentEntry(incident=self._incident(IncidentKind.SUSPECT, idle_s), is_leaving=True)
        if entry is None and (kind := self._reason(idle_s)) is not None:
            entry = IncidentEntry(incident=self._incident(kind, idle_s))
        return self._log.write(entry) if entry is not None else None

    def _recovery(self, idle_s: float) -> IncidentEntry | None:
        """The end of the incident, if this rank stood still with it and moves again."""
        ended_s, self._ended_s = self._ended_s, self._idle_s if idle_s < self._idle_s else 0.0
        self._idle_s = idle_s
        # Not only the rank that opened it: that one may be gone.
        if self._open is None or ended_s < max(self._open.suspect_after_s, _POLL_S / 10):
            return None
        # A main thread that unwinds with an exception moves, too; by the tick after it has said so.
        if self._probe.exception is not None:
            return None
        return IncidentEntry(incident=self._open, recovered_after_s=round(ended_s, 1))

    def _reason(self, idle_s: float) -> IncidentKind | None:
        """Why all ranks should say what they do, if there is a reason."""
        if self._probe.exception is not None and not self._exception_is_told.is_set():
            if not (self._probe.exception.is_consequence and self.ends_run):
                return IncidentKind.EXCEPTION
            self._exception_is_told.set()  # its cause has been told meanwhile
        is_time = self._thresholds.is_time_to_look(idle_s, self._phase_kind, joined=self._joined)
        if not is_time and not self._local_ranks.has_lost:
            return None
        facts = self._probe.glance(idle_s)
        doing = activity(facts)
        if self.ends_run and doing.waits_for_peers:
            self._end()
        is_at_limit = self._thresholds.is_out(idle_s, doing, self._phase_kind) and not self._limit_is_told()
        if is_at_limit and (self._limits.on_timeout == "abort" or self._reports_at_limit < MAX_REPORTS_AT_LIMIT):
            return IncidentKind.TIMEOUT
        waits = doing.waits_for_peers or doing.waits_for_data
        may_ask = waits and self._open is None and self._suspicions < MAX_SUSPICIONS
        return IncidentKind.SUSPECT if may_ask and not self._is_expected(idle_s, facts) else None

    def _is_expected(self, idle_s: float, facts: RankFacts) -> bool:
        """Whether a standstill that was unusual so far is none to ask about, for what this rank itself knows."""
        if self._thresholds.is_quiet:
            return True
        if not self._limits.learned or idle_s >= min(LONG_S, self._thresholds.limit_s(self._phase_kind) / 2):
            return False
        if self._quiet_rounds >= MAX_QUIET_ROUNDS or is_compiling(facts.stack):
            return True
        # Lightning lets the others wait for prepare_data without limit; but not for a rank that is gone.
        return activity(facts).exempt and not self._local_ranks.has_lost

    def _limit_is_told(self) -> bool:
        return self._verdict is not None and self._verdict.incident.kind is IncidentKind.TIMEOUT

    def _incident(self, kind: IncidentKind, idle_s: float) -> Incident:
        rank, idle_s = self._place.rank, round(idle_s, 1)
        if kind is IncidentKind.TIMEOUT and self._open is not None:
            limit_s = self._thresholds.limit_s(self._phase_kind)
            return replace(self._open, kind=kind, opened_by=rank, idle_s=idle_s, timeout_s=limit_s)
        return Incident(
            number=self._incidents.last + 1,
            kind=kind,
            opened_by=rank,
            opened_ns=time.time_ns(),
            idle_s=idle_s,
            suspect_after_s=round(self._thresholds.suspect_after_s(self._phase_kind, joined=True), 3),
            timeout_s=self._thresholds.limit_s(self._phase_kind),
        )

    def _take_part(self, entry: IncidentEntry, idle_s: float) -> None:
        incident = entry.incident
        if entry.recovered_after_s is not None:
            self._end_incident(incident, entry.recovered_after_s)
            return
        # In such a tick nothing else is noted of this rank's own standstill.
        self._idle_s = max(self._idle_s, idle_s)
        before, self._open = self._open, incident
        ends = incident.kind is IncidentKind.TIMEOUT and self._limits.on_timeout == "abort"
        if ends:
            # Whatever the report is written to may be what hangs.
            self._ending.exit_within(AT_LIMIT_S)
        verdict = self._gather(incident, idle_s)
        if verdict is not None and not verdict.ends_run:
            self._ending.go_on()
        self._incidents.note(incident.number if verdict is not None and verdict.is_told else 0)
        if entry.is_leaving:
            # Nobody waits, and what ranks that work on are told about is no incident of theirs.
            self._open = before
            self._leaving_is_told.set()
            return
        if verdict is not None and verdict.is_joint and not verdict.ends_run:
            # Nor here: no rank is left that could be waited for.
            self._open, self._verdict = before, verdict
            return
        if verdict is not None and verdict.quiet_s > 0:
            self._open, self._quiet_rounds = before, self._quiet_rounds + 1
            self._thresholds.be_quiet_for(verdict.quiet_s)
            return
        self._suspicions += incident.kind is IncidentKind.SUSPECT
        self._reports_at_limit += incident.kind is IncidentKind.TIMEOUT
        self._verdict = verdict or self._verdict
        self._tell_on_other_hosts(verdict)
        # Where the cause is fatal before the limit, each rank first makes sure that it still waits: see _reason.
        if self.ends_run and incident.kind is IncidentKind.TIMEOUT:
            self._end()

    def _end_incident(self, incident: Incident, after_s: float) -> None:
        was_told, self._open, self._verdict = self._open is not None, None, None
        if self._place.rank == 0 and was_told:
            self._say(f"recovered after {after_s:.0f} s (incident {incident.number})")

    def _tell_on_other_hosts(self, verdict: Verdict | None) -> None:
        """The report is printed on one host; on each of the others nobody would know why its ranks end."""
        is_first, here = self._place.local_rank == 0, self._probe.card.host
        if verdict is not None and verdict.ends_run and is_first and verdict.told_on not in ("", here):
            where = f"; report on {verdict.told_on}: {verdict.folder}" if verdict.folder else ""
            self._say(f"rank {self._place.rank}: the run is ended: {verdict.answer}{where}")

    def _gather(self, incident: Incident, idle_s: float) -> Verdict | None:
        if incident.kind is IncidentKind.EXCEPTION and not activity(self._probe.glance(idle_s)).waits_for_peers:
            # Often the same is about to be raised here, a moment later.
            self._main_thread_left.wait(_SAME_EXCEPTION_S)
        # Of those that have left their cards it finds none anew.
        self._local_ranks.search()
        facts = self._probe.look(idle_s)
        gathering = Gathering(
            self._exchange,
            round_number=self._log.number,
            rank=self._place.rank,
            world_size=self._place.world_size,
            peers=self._probe.peers,
            witness=self._probe.witness,
            is_dropped=lambda: self._off or (self._next_exchange is not None and not self._joined),
            leave_cards=self._joined,
        )
        try:
            gathering.publish(facts)
            verdict = gathering.hold(incident, self._report)
            if not self._joined:
                with suppress(ExchangeError):
                    self._came = gathering.answered()
            return verdict
        except ExchangeError as error:
            if self._off:
                return None
            alone = JobFacts(
                incident=incident, world_size=self._place.world_size, ranks=(facts,), missing=(str(error),)
            )
            return self._report(alone)
        finally:
            if facts.exception is not None:
                self._exception_is_told.set()

    def _report(self, job: JobFacts) -> Verdict:
        job = replace(job, tried=try_addresses(job, self._probe.card.host))
        told = self._verdict
        is_same = told is not None and told.incident.number == job.incident.number
        verdict = self._reporter.report(self._rank_hosts.complete(job), told=told if is_same else None)
        return replace(verdict, told_on=self._probe.card.host)

    def _end(self) -> None:
        """Ends the run on this rank; unless its main thread is on its way out already, and the limit not reached."""
        if self._main_thread_left.is_set() and not self._limit_is_told():
            return
        if self._verdict is not None and self._verdict.incident.opened_ns < self._began_ns:
            # Those who waited have said why, on ranks that may be on other hosts; this one only wonders.
            self._say(f"rank {self._place.rank} has come too late, the others gave up: {self._verdict.answer}")
        self._ending.close(self._timeout_error)
        self._let_the_failed_leave()
        end_run(
            ending=self._ending,
            make_error=self._timeout_error,
            exchange=self._exchange,
            rank=self._place.rank,
            world_size=self._place.world_size,
            write_logs=self._write_logs,
            logging_ranks=self._verdict.logging_ranks if self._verdict is not None else (),
            end_frozen=self._end_frozen,
            before_exit=self._before_exit,
            may_others_come=self._may_others_come,
        )

    def _may_others_come(self) -> bool:
        """Whether a rank is on its way, and has to learn that the others have given up."""
        if self._joined:
            return False
        place = self._place
        first = place.rank - place.local_rank
        here = range(first, first + place.local_world_size)
        # Of this host, those are whose processes were found when they were last asked for, and are there still.
        alive = {card.rank for card in self._probe.peers if self._probe.look_at_peer(card).state not in ENDED}
        return any(rank in alive or rank not in here for rank in {*range(place.world_size)} - self._came)

    def _end_frozen(self) -> None:
        """All ranks of a host do it, as with the first of them connections break and some may leave before that."""
        frozen = self._verdict.frozen if self._verdict is not None else ()
        end_frozen((card for card in self._probe.peers if card.rank in frozen), self._say)

    def _switch_off(self, error: Exception) -> None:
        self._off = True
        self._ending.go_on()
        self._exception_is_told.set()
        self._leaving_is_told.set()
        with suppress(ExchangeError):
            self._exchange.set(f"off/{self._place.rank}", b"")
        say_own_failure(error, lambda text: self._say(f"rank {self._place.rank}: {text}"))


def _is_success(error: BaseException) -> TypeGuard[SystemExit]:
    """Whether it would end the process with status 0; not where all stop on SIGTERM."""
    return isinstance(error, SystemExit) and not error.code and not _is_orderly(error)


def _is_orderly(error: BaseException) -> bool:
    """Whether an exception is the guard's, Lightning's or the user's way to stop on all ranks."""
    orderly = (KeyboardInterrupt, CollectiveTimeoutError, DatasetMismatchError)
    return isinstance(error, orderly) or type(error).__name__ in ("SIGTERMException", "_TunerExitException")
