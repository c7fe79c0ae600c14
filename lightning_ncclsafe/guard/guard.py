"""The guard of one rank, which connects its parts: they watch, ask all ranks, report, and end the run.

Ranks agree through a log of numbered entries: a rank that has waited too long, or that raises, writes the next entry;
every rank then publishes its facts, one of them judges and reports, and all learn the verdict.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_ncclsafe._torch import process_groups
from lightning_ncclsafe.code.side_thread import own_threads
from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.exchange import Exchange, ExchangeError, comes_first, poll_interval_s
from lightning_ncclsafe.facts import NotRecorded, Phase, codec
from lightning_ncclsafe.facts.phase_kinds import PhaseKind
from lightning_ncclsafe.guard.after_verdict import AfterVerdict, Save
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.guard.leaving import Leaving
from lightning_ncclsafe.guard.local_ranks import LocalRanks
from lightning_ncclsafe.guard.participation import Participation
from lightning_ncclsafe.guard.rank_hosts import RankHosts
from lightning_ncclsafe.guard.reporter import Reporter
from lightning_ncclsafe.guard.shared import Connection, GuardedRank, GuardState, Place
from lightning_ncclsafe.guard.stuck import StuckDetector
from lightning_ncclsafe.guard.watchdog import Watchdog
from lightning_ncclsafe.probes.network import own_address_towards
from lightning_ncclsafe.probes.process.environment import launch_words
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.rank_info import RankInfo, info_key
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.rules.unknowns import not_recorded
from lightning_ncclsafe.settings import Limits

# The watchdog checks for progress four times a second, and reads the log as often: all ranks together ask the store for
# it no more than about a thousand times a second.
_POLL_S, _POLLS_PER_S = 0.25, 1000.0
# How long a rank waits for the others of its host to publish their info, once all have joined, and how often it looks.
_MEETING_S, _MEETING_TURNS = 0.5, 10
# Groups of this process, by name, for which it is known whether they are recorded.
_asked_about: set[str] = set()


class Guard:
    """Guards one rank for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    The guard never hurts the run: if it fails itself, it prints that once, on this rank, and is off from then on.

    The strategy calls it on the main thread. :class:`Watchdog` calls it at every tick on another thread; ranks share
    and decide only there.

    Args:
        report_dir: The folder of all incidents; made when the first one is reported.
        exchange: What the ranks share before they have joined the process group.
        ending: Refuses saves and steps once the run is being ended.
        write_logs: Writes what loggers were given to storage, within the seconds that it is given, before this process
            exits.
        before_exit: Called last before this process exits.
        save: Saves the state of a run that ends; see :data:`~lightning_ncclsafe.guard.after_verdict.Save`.
        phase_kind: What kind of phase the Trainer is in, and the index of its batch; costs next to nothing.
        on_tick: Called at the watchdog's pace on its thread, once ranks have joined; it must be quick and not raise.
        incidents: Numbers of the incidents of this process; None for its first call.
        met: The other ranks of this host, kept from call to call of this process; None for its first.
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
        save: Save = lambda cause, raised: lambda: None,
        phase_kind: Callable[[], tuple[PhaseKind, int]] = lambda: (PhaseKind(phase=Phase.INIT), -1),
        on_tick: Callable[[], None] = lambda: None,
        incidents: IncidentNumbers | None = None,
        met: dict[int, RankInfo] | None = None,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self._own = own = GuardedRank(
            place=place,
            limits=limits,
            state=GuardState(),
            connection=Connection(exchange, not_before_ns=int(probe.info.started * 1e9)),
            probe=probe,
            ending=ending or Ending(),
            incidents=incidents or IncidentNumbers(),
            phase_kind=phase_kind,
            say=say,
        )
        self._on_tick = on_tick
        self._local_ranks = LocalRanks(place, probe.peers, host=probe.info.host, met=met)
        self._rank_hosts = RankHosts(
            rank=place.rank, world_size=place.world_size, host=probe.info.host, launch=launch_words()
        )
        after_verdict = AfterVerdict(own, write_logs=write_logs, before_exit=before_exit, save=save)
        self._detector = StuckDetector(own, self._local_ranks, after_verdict.end)
        self._participation = Participation(
            own,
            local_ranks=self._local_ranks,
            rank_hosts=self._rank_hosts,
            detector=self._detector,
            reporter=Reporter(report_dir, limits, say),
            after_verdict=after_verdict,
        )
        self._watchdog = Watchdog(
            position=probe.position,
            tick=self._tick,
            on_failure=self._switch_off,
            poll_s=poll_interval_s(place.world_size, least_s=_POLL_S, polls_per_s=_POLLS_PER_S),
        )
        self._leaving = Leaving(own, after_verdict, self._watchdog.wake)

    # What the strategy calls, on the main thread.

    def start(self) -> None:
        """Starts the watchdog. There may be no process group yet."""
        self._own.state.began_ns = time.time_ns()
        self._watchdog.start()

    def connect(self, exchange: Exchange, *, meets: bool = True) -> None:
        """Changes to another exchange, with its own log: the process group, and so the job's store, exists.

        Args:
            exchange: The exchange.
            meets: Whether the other ranks of this host are about to do the same, and worth a short wait.
        """
        # The watchdog may be in the middle of a round about this very delay; that round is dropped.
        self._own.connection.connect(exchange)
        with suppress(ExchangeError):  # only needed by peers if this rank cannot answer
            self._rank_hosts.announce(
                exchange, own_address_towards(self._own.place.master_address, self._own.place.master_port)
            )
            # By now, the exchange has its thread.
            info = replace(self._own.probe.info, guard_threads=own_threads())
            exchange.set(info_key(self._own.place.rank), codec.encode(info))
        # If a rank ends soon, for instance in its very first collective, only ranks that know it by then learn why.
        for _ in range(_MEETING_TURNS if meets else 0):
            self._watchdog.wake()
            if self._local_ranks.wait_until_met(_MEETING_S / _MEETING_TURNS) or self._own.state.is_off:
                break

    def set_up(self) -> None:
        """Checks whether the process groups that ranks have made are recorded; one rank prints which are not."""
        # The info of all peers is there now, and a peer may end in the first collective of the training.
        self._watchdog.wake()
        rank, used = self._own.place.rank, {call.name for call in process_groups.group_calls() if call.called != 0}
        # Reading a full recorder takes a tenth of a second, and most programs make groups only once.
        if self._own.place.world_size == 1 or used <= _asked_about:
            return
        _asked_about.update(used)
        groups = self._own.probe.snapshot(0.0).unrecorded
        texts = [*not_recorded({rank: [group for group in groups if group.why is not NotRecorded.LOST]})]
        if texts and comes_first(self._own.connection.newest, "unrecorded", rank):
            self._own.say(" ".join(texts))

    def failed(self, error: BaseException) -> CollectiveTimeoutError | None:
        """The Trainer's function raised on this rank; see :meth:`Leaving.failed`."""
        return self._leaving.failed(error)

    def share_last_facts(self, error: BaseException) -> None:
        """This rank leaves with an exception that its program may catch; see :meth:`Leaving.share_last_facts`."""
        self._leaving.share_last_facts(error)

    def finish(self) -> None:
        """The Trainer's function returned on this rank; see :meth:`Leaving.finish`."""
        self._leaving.finish()

    def close(self) -> None:
        """Ends the watch; closes threads, connections and files, and restores signal handlers."""
        self._own.state.is_off = True
        self._own.ending.lift_deadline()
        self._watchdog.stop()
        self._own.probe.close()
        self._own.connection.close()

    @property
    def leaves_jointly(self) -> bool:
        """Whether all ranks have raised the same."""
        return self._own.place.world_size == 1 or (
            self._own.state.verdict is not None and self._own.state.verdict.is_joint
        )

    def check(self) -> None:
        """Called where this rank waits for others that may never come.

        Raises:
            CollectiveTimeoutError: The run cannot continue.
        """
        if self._own.state.ends_run:
            raise self._own.state.error()

    @property
    def ends_run(self) -> bool:
        """Whether the run cannot continue, and is being ended."""
        return self._own.state.ends_run

    # What the watchdog calls, on its thread.

    def _tick(self, idle_s: float) -> None:
        connection = self._own.connection
        if connection.change_over():
            # Earlier reports were about a start that has succeeded now.
            self._own.forget_incident()
        self._detector.observe(idle_s)
        if self._detector.phase is Phase.INIT:
            self._own.probe.note_memory()
        self._own.probe.note_machine()
        self._own.probe.note_place(idle_s)
        if connection.has_joined:
            self._local_ranks.meet(connection.exchange)
            self._rank_hosts.meet(connection.exchange)
            self._on_tick()
        else:
            self._local_ranks.look_around(idle_s)
            if not self._detector.has_reason_before_joining(idle_s):
                return
        entry = connection.log.read()
        if entry is None and (own := self._detector.entry(idle_s)) is not None:
            entry = connection.log.write(own)
        if entry is not None:
            self._participation.take_part(entry, idle_s)
            connection.log.number += 1

    def _switch_off(self, error: Exception) -> None:
        state = self._own.state
        state.is_off = True
        self._own.probe.forget_place()
        self._own.ending.lift_deadline()
        state.exception_is_reported.set()
        state.leaving_is_reported.set()
        with suppress(ExchangeError):
            self._own.connection.exchange.set(f"off/{self._own.place.rank}", b"")
        say_own_failure(error, lambda text: self._own.say(f"rank {self._own.place.rank}: {text}"))
