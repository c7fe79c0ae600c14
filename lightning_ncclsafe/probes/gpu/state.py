"""This rank's GPU at the moment of an incident, asked on a thread of its own: a driver that hangs answers nobody."""

import threading
import time
from collections.abc import Callable

from lightning_ncclsafe.facts import GpuStateFacts


class GpuWatch:
    """Asks for the state of a GPU, and does not wait for a driver that does not answer.

    What torch knows of its memory is not asked for: it would wait, with Python's lock held, for the lock that the
    allocator holds while it waits for the device.

    Args:
        ask: Gives the state; None where there is no GPU to ask about.
        clock: Seconds that only grow; for tests.
    """

    def __init__(self, ask: Callable[[], GpuStateFacts | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asked_s = 0.0
        self._thread: threading.Thread | None = None
        self._answer: GpuStateFacts | None = None

    def begin(self) -> None:
        """Asks, unless an earlier question has not been answered yet: then no second one is asked."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._asked_s, self._answer = self._clock(), None
        self._thread = threading.Thread(target=self._run, name="ncclsafe-gpu", daemon=True)
        self._thread.start()

    def read(self, deadline_s: float) -> GpuStateFacts | None:
        """What it answers within the deadline; else for how long it has not. None where there is no GPU.

        Args:
            deadline_s: Seconds to wait for.
        """
        if self._thread is None:
            return None
        self._thread.join(max(deadline_s, 0.0))
        if self._thread.is_alive():
            return GpuStateFacts(no_answer_s=round(self._clock() - self._asked_s, 3))
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception:  # what the driver does not tell is not known, and nothing more
            self._answer = None
