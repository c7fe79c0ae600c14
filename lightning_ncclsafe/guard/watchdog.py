"""One thread that notices missing progress."""

import threading
import time
from collections.abc import Callable, Hashable

# A process whose next tick is this much later than planned, and that computed for this little of that time, was stopped
# as a whole: by SIGSTOP, a debugger, a frozen control group. If only the GIL or a core was missing, it computes.
_STOPPED_S = 10.0
_COMPUTES = 0.01


class Watchdog:
    """Calls ``tick(idle_s)`` at a steady pace from its own thread until it is stopped.

    Args:
        position: The position of the training; any change of its value is progress. It must be cheap.
        tick: Called with the seconds since the position last changed. It may take its time; nothing else waits for it.
        on_failure: Called once if ``position`` or ``tick`` raises; the watch is then over.
        poll_s: Seconds between two calls.
        cpu_clock: Processor time of this process, seconds; for tests.
    """

    def __init__(
        self,
        *,
        position: Callable[[], Hashable],
        tick: Callable[[float], None],
        on_failure: Callable[[Exception], None],
        poll_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._position = position
        self._tick = tick
        self._on_failure = on_failure
        self._poll_s = poll_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._last_position: Hashable = None
        self._last_moved = clock()
        self._stopped = False
        self._was_late = False
        self._awake = threading.Event()
        # A daemon: if it hangs in a call that the system does not return from, the process can still end.
        self._thread = threading.Thread(target=self._run, name="ncclsafe-watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._last_moved = self._clock()
        self._thread.start()

    def wake(self) -> None:
        """Makes the next tick come at once."""
        self._awake.set()

    def stop(self, wait_s: float = 5.0) -> None:
        """Ends the watch and waits for the thread, at most ``wait_s`` seconds; may be called from the thread itself."""
        self._stopped = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(wait_s)

    def idle_s(self) -> float:
        """Seconds since the position last changed, as of now."""
        position = self._position()
        if position != self._last_position:
            self._last_position, self._last_moved = position, self._clock()
        return self._clock() - self._last_moved

    def poll(self) -> None:
        """Checks for progress once, and ticks; the thread does this over and over."""
        try:
            self._tick(self.idle_s())
        except Exception as error:
            self._stopped = True
            self._on_failure(error)

    def pause(self) -> None:
        """Waits for the next tick. The time for which the process was stopped meanwhile does not count as idle.

        A process that is late at every tick was not stopped: it starves, as on a host that is out of memory.
        """
        began, cpu_s = self._clock(), self._cpu_clock()
        self._awake.wait(self._poll_s)
        self._awake.clear()
        late_s = self._clock() - began - self._poll_s
        was_late, self._was_late = self._was_late, late_s >= _STOPPED_S
        if self._was_late and not was_late and self._cpu_clock() - cpu_s < _COMPUTES * late_s:
            self._last_moved += late_s

    def _run(self) -> None:
        while not self._stopped:
            self.pause()
            if not self._stopped:
                self.poll()
