"""The wall clocks of all hosts beside rank 0's, so that ranks on different hosts can be compared."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lightning_ncclsafe.collectives.alignment import Monotonic, NowNs, oscillator_s
from lightning_ncclsafe.collectives.clock_follower import Follower
from lightning_ncclsafe.collectives.clock_keys import Surroundings
from lightning_ncclsafe.collectives.clock_reference import Reference
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.timing.windows import Clock


class ClockSync:
    """Aligns a rank's wall clock with rank 0's over the exchange, and says how well.

    Ranks of one host share a clock; one of them, whoever asks first, measures for all. Rank 0 invites hosts, eight at
    a time; a rank that finds itself invited waits in its tick until rank 0's next tick, which answers its messages.
    Keys are used again, so that they do not grow with time; a host that does not come is left out.

    Args:
        exchange: Shared by all ranks.
        rank: Global rank.
        world_size: Number of ranks.
        boot_id: What the ranks on this host have in common and others do not; see
            :func:`~lightning_ncclsafe.probes.host.boot_id.host_boot_id`.
        now_ns: The wall clock by which collectives are timed.
        sleep: Waits for some seconds.
        monotonic: A steady clock that all processes on the host share, seconds.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        boot_id: str,
        now_ns: NowNs = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Monotonic = oscillator_s,
    ) -> None:
        around = Surroundings(exchange, rank, world_size, boot_id, now_ns, sleep, monotonic)
        self._stopped = False
        self._reference = Reference(around) if rank == 0 else None
        self._follower = Follower(around, lambda: self._stopped)

    def tick(self) -> None:
        """Does what is to be done now; to be called every 0.5 to 10 s, by a thread that may wait.

        On rank 0 it takes 0.3 s at most beside the exchange's own calls. On a rank that measures for its host it
        takes, once a minute, as long as rank 0 takes from tick to tick. An exchange that does not answer is asked
        again at the next tick.
        """
        if self._stopped:
            return
        with suppress(ExchangeError):
            (self._reference or self._follower).tick()

    def run(self, ended: threading.Event, every_s: float = 1.0) -> None:
        """Ticks until the event is set: for a thread of its own, which is best, as a tick may wait."""
        while not self._stopped:
            self.tick()
            if ended.wait(every_s):
                break

    def clock(self) -> Clock:
        """How much this rank's wall clock is ahead of rank 0's now, and a bound of the error of that.

        Both are 0 on rank 0's host. The bound is negative while nothing is known: before the first alignment, and
        from when either clock was set until the next one. That rank 0's clock was set is known a tick later.
        """
        if self._reference is not None:
            return Clock(offset_ns=0, uncertainty_ns=0)
        return self._follower.clock()

    def stop(self) -> None:
        """Ends a tick that waits, within some milliseconds, and makes later ones do nothing."""
        self._stopped = True
