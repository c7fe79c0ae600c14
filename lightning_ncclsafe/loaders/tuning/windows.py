"""What was measured of a loader over a few batches, put together."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.worker_clock import Service

# tf.data's ``kGapTimeWindow``, ``kOutlierSigmas`` and ``kTargetTimeSigmas`` (tensorflow/core/framework/model.cc).
GAPS = 100
_OUTLIER_SIGMAS = 2.0
_TARGET_SIGMAS = 1.0
# A window of slow batches ends with so many, once it has taken twice its time.
_LEAST_SLOW_BATCHES = 3


@dataclass(slots=True)
class Window:
    """Sums over the batches of a window.

    Attributes:
        batches: Batches.
        wall_s: Time from one to the next, seconds.
        wait_s: Time of it that was waited for batches.
        own_s: Processor time of this process.
        starved: Batches that were not ready.
        services: How long workers took for batches.
    """

    batches: int = 0
    wall_s: float = 0.0
    wait_s: float = 0.0
    own_s: float = 0.0
    starved: int = 0
    services: list[Service] = field(default_factory=list)

    def add(self, gap_s: float, wait_s: float, own_s: float, *, starved: bool) -> None:
        """Adds a batch."""
        self.batches += 1
        self.wall_s += gap_s + wait_s
        self.wait_s += wait_s
        self.own_s += own_s
        self.starved += starved

    def is_full(self, least_batches: int, window_s: float) -> bool:
        """Whether it has lasted long enough."""
        is_long = self.wall_s >= window_s and self.batches >= least_batches
        return is_long or (self.wall_s >= 2 * window_s and self.batches >= _LEAST_SLOW_BATCHES)

    def measures(
        self,
        setting: tuple[int, int],
        services: Sequence[Service],
        *,
        gap_s: float,
        batch_bytes: int,
        tensors: int = 0,
        worker_bytes: int,
        throttled_s: float,
    ) -> Measures:
        """What the window says.

        Args:
            setting: Workers and prefetch factor.
            services: How long workers took for batches; where none is known, no longer than all of them together
                could take for each.
            gap_s: See :func:`target_gap_s`.
            batch_bytes: Size of a batch.
            tensors: Tensors of a batch.
            worker_bytes: Memory of a worker.
            throttled_s: Seconds for which this rank's processes were held meanwhile.
        """
        workers, prefetch = setting
        wall_s = max(self.wall_s, 1e-9)
        known = services or [Service(max(workers, 1) * wall_s / self.batches, math.inf)]
        took_s = sorted(service.wall_s for service in known)
        return Measures(
            workers=workers,
            prefetch=prefetch,
            batches=self.batches,
            wall_s=self.wall_s,
            gap_s=gap_s,
            wait_s=self.wait_s / self.batches,
            starved=self.starved / self.batches,
            service_s=sum(took_s) / len(took_s),
            service_q97_s=took_s[math.ceil(0.97 * len(took_s)) - 1],
            cpu_share=min(sum(service.cpu_s for service in known) / max(sum(took_s), 1e-9), 1.0),
            own_cores=self.own_s / wall_s,
            batch_bytes=batch_bytes,
            tensors=tensors,
            worker_bytes=worker_bytes,
            throttled=min(max(throttled_s / wall_s, 0.0), 1.0),
        )


def target_gap_s(gaps_s: Collection[float]) -> float:
    """What a loader has to beat to be ahead of 84 % of the steps, seconds: tf.data's ``ComputeTargetTimeNsec``.

    The mean of the gaps without outliers, less one standard deviation; 0 where there is no gap. It is not less than
    half of the mean: of steps that vary by as much as they take, as the first ones may, none would be slow enough.
    """
    mean_s, sigma_s = _mean_and_sigma(gaps_s)
    inside = [gap_s for gap_s in gaps_s if abs(gap_s - mean_s) <= _OUTLIER_SIGMAS * sigma_s]
    mean_s, sigma_s = _mean_and_sigma(inside or gaps_s)
    return max(mean_s - _TARGET_SIGMAS * sigma_s, mean_s / 2)


def _mean_and_sigma(values: Collection[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
