"""The thread of one rank that reads its recorder, shares what it read and, on rank 0, analyses all ranks' calls."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.code.own_work import OwnWork
from lightning_ncclsafe.code.patching import WrappedMethod
from lightning_ncclsafe.code.this_host import host_boot_id
from lightning_ncclsafe.collectives.clocks import ClockSync
from lightning_ncclsafe.collectives.mispaired import mispairing_words, own_call_words
from lightning_ncclsafe.collectives.recording import PhaseHistory, Recording
from lightning_ncclsafe.collectives.results import TimingScalars, print_trace, save
from lightning_ncclsafe.collectives.tree import TimingReport, Tree
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for
from lightning_ncclsafe.facts import Straggler
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.recorder.model import MOST_ENTRIES
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.report.times import straggler_sentence
from lightning_ncclsafe.settings import TimerSettings
from lightning_ncclsafe.timing.analysis import TRACE_BYTES, Analysis
from lightning_ncclsafe.timing.matching import Mispairing
from lightning_ncclsafe.timing.summary import LOG_METRICS
from lightning_ncclsafe.timing.windows import Window, joined

_SHORTEST_S = 0.5
# The share of one core for reading and analysis: reading a full recorder takes some milliseconds, with the GIL held.
_MOST_OF_A_CORE = 0.02
_LONGEST_S = 5.0
# A recorder is read before this share of it is new.
_FULL = 0.6
# All ranks together ask the store a few hundred times a second; each asks for a few values at a time.
_RANKS_PER_S = 100.0

RECORDER_SIZE = 1000
"""Size of a recorder that is read all the time; reading takes 7 µs per entry, new or not."""

# What all ranks together share at a time: some 10 MB.
_MOST_CALLS = 400_000
_LEAST_CALLS = 128
_MOST_CALLS_OF_A_RANK = 20_000
# How long rank 0 waits for the others' last windows; they end at the same time.
_LAST_S = 2.0


class Pace:
    """Decides how often to read and share, from what was seen before.

    Args:
        every_n_steps: After how many steps results are wanted.
        recorder_size: Entries that the recorder keeps.
    """

    def __init__(self, *, world_size: int, every_n_steps: int, recorder_size: int) -> None:
        self.share_s = max(_SHORTEST_S, world_size / _RANKS_PER_S)
        """Seconds between two times that ranks share what they have read."""
        self._every_n_steps = every_n_steps
        self._recorder_size = recorder_size

    def pause_s(self, *, took_s: float, cpu_s: float, new: int, steps: int) -> float:
        """Seconds until the next reading.

        Args:
            took_s: Seconds since the last one.
            cpu_s: Processor time of the last one, seconds.
            new: Entries that were new.
            steps: Steps since the last one.
        """
        # What one rank reads reaches rank 0 a turn later: so twice per result.
        wanted_s = self._every_n_steps * took_s / steps / 2 if steps else _LONGEST_S
        full_s = _LONGEST_S
        if new and self._recorder_size:
            # Half at once if it was full, and so has probably lost some.
            is_full = new >= self._recorder_size
            full_s = took_s / 2 if is_full else _FULL * self._recorder_size * took_s / new
        least_s = max(self.share_s, cpu_s / _MOST_OF_A_CORE)
        return max(min(max(wanted_s, least_s), full_s, max(_LONGEST_S, least_s)), _SHORTEST_S / 10)


class Timer:
    """Times the collectives of one call of the Trainer, on one rank.

    It never delays training: nothing waits for it before the end, and then for at most 2 seconds plus 10 ms per rank,
    while the exchange answers. If it fails, it prints that once and stops.

    Args:
        boot_id: Equal on processes that share a clock.

    Attributes:
        stragglers: Ranks that keep others waiting, by rank 0's last report.
        analysis: The results; on rank 0, complete once the timer has ended.
        is_off: Whether it has failed.
    """

    def __init__(
        self,
        settings: TimerSettings,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        phase_history: PhaseHistory,
        boot_id: str,
        say: Callable[[str], None] = say_on_stderr,
    ) -> None:
        self.settings = settings
        self.stragglers: tuple[Straggler, ...] = ()
        self.analysis = Analysis(world_size if rank == 0 else 1, trace_bytes=TRACE_BYTES if settings.trace else 0)
        self._exchange = exchange
        self._rank = rank
        self._world_size = world_size
        self._say = say
        most_calls = min(max(_MOST_CALLS // world_size, _LEAST_CALLS), _MOST_CALLS_OF_A_RANK)
        self._recording = Recording(rank, phase_history, since_ns=time.time_ns())
        self._tree = Tree(exchange, rank=rank, world_size=world_size, most_calls=most_calls)
        self._clocks = ClockSync(exchange, rank=rank, world_size=world_size, boot_id=boot_id)
        self._scalars = TimingScalars(world_size) if rank == 0 else None
        self._pace = Pace(
            world_size=world_size,
            every_n_steps=settings.every_n_steps,
            recorder_size=recorders.size(RECORDER_SIZE),
        )
        # The longest pause; the others' last windows are most often milliseconds behind.
        self._poll_s = poll_interval_s(world_size)
        self._unsent: list[Window] = []
        self._shared_at = time.monotonic()
        self._unreadable = 0
        self._is_unsent = self._mispairing_told = False
        self._last: set[int] = set()
        self._ready: dict[str, float] = {}
        self._lock = threading.Lock()
        self.is_off = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclsafe-timer", daemon=True)
        # A separate thread: a rank that measures for its host sometimes waits for rank 0; the recorder must not.
        self._clock_thread = threading.Thread(target=self._align, name="ncclsafe-clocks", daemon=True)

    def start(self) -> None:
        """Starts the threads."""
        size = recorders.size(RECORDER_SIZE)
        if not 0 < size <= MOST_ENTRIES:
            found = f"keeps {size:,} entries, too many to be read continuously" if size else "is off"
            self._recording.say(
                f"the Flight Recorder {found}, so no collective is timed; unset TORCH_FR_BUFFER_SIZE or set it to 2000."
            )
        self._thread.start()
        try:
            self._clock_thread.start()
        except RuntimeError:  # too many threads; the first would continue
            self.end()
            raise

    def scalars(self) -> dict[str, float]:
        """Scalars since the last call, by name; on rank 0. Never waits."""
        with self._lock:
            ready, self._ready = self._ready, {}
        return ready

    @marked(Mark.STORE)
    def end(self) -> None:
        """Shares what is left, on rank 0 waits for what the others share, and ends the thread."""
        self._ending.set()
        self._clocks.stop()
        for thread, most_s in ((self._thread, _LAST_S + self._world_size / 100 + 5.0), (self._clock_thread, _LAST_S)):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(most_s)

    def _run(self) -> None:
        try:
            read_at, pause_s = time.monotonic(), 0.1
            while not self._ending.wait(pause_s):
                now, cpu_s = time.monotonic(), time.thread_time()
                steps = self._turn()
                cpu_s = time.thread_time() - cpu_s
                pause_s = self._pace.pause_s(took_s=now - read_at, cpu_s=cpu_s, new=self._recording.new, steps=steps)
                read_at = now
            self._turn(last=True)
            self._await_others()
        except Exception as error:
            self.is_off = True
            say_own_failure(error, what="the timing of collectives")

    def _align(self) -> None:
        try:
            self._clocks.run(self._ending)
        except Exception as error:
            say_own_failure(error, what="the alignment of clocks")

    def _turn(self, *, last: bool = False) -> int:
        """Reads, and shares if that is due; returns the number of steps since the last time."""
        before = self._recording.steps
        with OwnWork():
            self._unsent.append(self._recording.read(self._clocks.clock(), last=last))
        if last or time.monotonic() - self._shared_at >= 0.9 * self._pace.share_s:
            self._share()
        return self._recording.steps - before

    def _share(self) -> None:
        self._shared_at = time.monotonic()
        window, self._unsent = joined(self._unsent), []
        try:
            found = self._tree.pass_on(window)
            if found is not None:
                self._judge(found)
            else:
                report = self._tree.newest_report()
                self.stragglers = report.stragglers
                self._tell_mispairing(report.mispairing)
        except ExchangeError as error:
            # It is kept and shared later; if the exchange is lost, this rank quietly continues alone.
            self._recording.say(f"some timings could not be shared in time: {error}")
        if self._tree.unreadable > self._unreadable:
            self._recording.say(f"{self._tree.unreadable} messages of ranks could not be read.")
            self._unreadable = self._tree.unreadable

    def _judge(self, window: Window) -> None:
        self._last |= window.last
        assert self._scalars is not None
        with OwnWork():
            changed = self.analysis.add(window)
            for calls, late in self.analysis.take_fresh():
                self._scalars.add(calls, late)
        with self._lock:
            # Scalars that were not taken yet stay; the rest is collected for the next time.
            self._ready = self._ready or self._scalars.take()
        mispairing = self.analysis.mispairing
        is_mispaired = mispairing is not None and not self._mispairing_told
        if changed or is_mispaired or self._is_unsent:
            self._report(changed)
            self._is_unsent = True  # until the exchange has taken it
            if mispairing is not None and is_mispaired:
                self._say(mispairing_words(mispairing))
                self._tell_mispairing(mispairing)
            self._tree.send_report(TimingReport(stragglers=self.stragglers, mispairing=mispairing))
            self._is_unsent = False

    def _tell_mispairing(self, found: Mispairing | None) -> None:
        """Prints, once, where this rank has made its call."""
        if found is not None and not self._mispairing_told:
            self._mispairing_told = True
            with OwnWork():
                words = own_call_words(found, self._rank)
            if words:
                self._say(words)

    def _report(self, changed: list[Straggler]) -> None:
        for straggler in changed:
            self._say(straggler_sentence(straggler))
        self.stragglers = self.analysis.summary().stragglers

    def _await_others(self) -> None:
        """Waits on rank 0 for all last windows; elsewhere until this rank's, and a leader's members', are sent."""
        tree, world_size = self._tree, self._world_size

        def is_done() -> bool:
            return len(self._last) >= world_size if tree.is_root else tree.is_done and not tree.holds

        wait_for(
            lambda: is_done() or not self._relay(),
            deadline_s=_LAST_S + world_size / 100 if tree.is_root else _LAST_S / 2,
            poll_s=self._poll_s / 10,
            longest_poll_s=self._poll_s,
        )
        if tree.is_root:
            self._report(self.analysis.finish())

    def _relay(self) -> bool:
        """Passes on what others sent; whether the exchange still answers."""
        try:
            found = self._tree.relay()
            if found is not None:
                self._judge(found)
        except ExchangeError:
            return not self._exchange.lost
        return True


class AttachedTimer:
    """The timer of one call of the Trainer.

    Attributes:
        timer: The timer.
        trace: A line with the trace's path; empty before the end, and without a trace.
    """

    def __init__(
        self,
        trainer: Any,
        tracker: ActionTracker,
        exchange: Exchange,
        settings: TimerSettings,
        *,
        rank: int,
        world_size: int,
        report_dir: Path,
    ) -> None:
        self.trace = ""
        self._has_ended = False
        self._settings = settings
        self._report_dir = report_dir
        self._tracker = tracker
        self._phase_history = PhaseHistory()
        self.timer = Timer(
            settings,
            exchange,
            rank=rank,
            world_size=world_size,
            phase_history=self._phase_history,
            boot_id=host_boot_id(),
        )
        # Before anything is changed: the process may have too many threads to start another.
        self.timer.start()
        self._is_root = rank == 0
        connector = getattr(trainer, "_logger_connector", None)
        self._log_metrics = (
            WrappedMethod(connector, LOG_METRICS, self._log) if hasattr(connector, LOG_METRICS) else None
        )
        tracker.listeners += (self._phase_history,)

    def end(self) -> None:
        """Brings all ranks' last recordings together, once; rank 0 keeps the results."""
        if self._has_ended:
            return
        self._has_ended = True
        self.timer.end()
        summary = self.timer.analysis.summary()
        if self._is_root and not self.timer.is_off and summary.ops:
            self.trace = save(self.timer.analysis, summary, self._report_dir, self._settings)

    def detach(self) -> None:
        """Stops listening. If it was not ended before, there was an error: the trace is written all the same."""
        self._tracker.listeners = tuple(
            listen for listen in self._tracker.listeners if listen is not self._phase_history
        )
        if self._log_metrics is not None:
            self._log_metrics.remove()
        if not self._has_ended:
            self.end()
            print_trace(self.timer.analysis.summary(), self.trace)

    def _log(self, log_metrics: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Logs scalars; not a hook, so Lightning's profiler does not see it."""
        with self._tracker.action(LOG_METRICS):
            return log_metrics(*args, **kwargs)
