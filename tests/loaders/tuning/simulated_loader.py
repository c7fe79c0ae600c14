"""A dataloader with workers, simulated batch by batch: no process, no clock, the same on every run."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import mean, pstdev

from lightning_ncclsafe.loaders.tuning.measures import Measures

RESIZE_S = 0.05  # to stop workers and start others, measured with 6 forked ones
Length = Callable[[random.Random], float]


def constant(_: random.Random) -> float:
    return 1.0


def lognormal(rng: random.Random) -> float:
    """Mean 1, and a standard deviation of as much."""
    return rng.lognormvariate(-0.3466, 0.8326)


def heavy_tailed(rng: random.Random) -> float:
    """Eight items that vary a thousandfold (99.8 % of them), with a mean of 1."""
    return sum(rng.lognormvariate(-0.6272, 1.12) for _ in range(8)) / 8


@dataclass(kw_only=True)
class Host:
    """What is simulated.

    Attributes:
        cores: Cores of this rank.
        cpu_s: Processor time of a batch, seconds.
        sleep_s: What else a batch takes: storage.
        gap_s: What the step takes without contention.
        gap_cpu: Share of it that the main thread is on a core.
        length: What a batch's times are multiplied by.
        batch_bytes: Size of a batch.
        worker_bytes: Memory of a worker.
    """

    cores: float
    cpu_s: float
    sleep_s: float
    gap_s: float
    gap_cpu: float = 0.1
    length: Length = constant
    batch_bytes: int = 1_000_000
    worker_bytes: int = 50_000_000

    @property
    def service_s(self) -> float:
        return self.cpu_s + self.sleep_s


@dataclass
class Batch:
    started_s: float
    finished_s: float
    cpu_s: float


@dataclass
class Loader:
    """Batches are taken in order; worker ``i % workers`` makes batch ``i``, as torch's does with ``in_order=True``.

    Cores are shared evenly among those that want one when a batch, or a step, begins.
    """

    host: Host
    workers: int
    prefetch: int
    seed: int = 0
    now_s: float = 0.0
    queued: deque[Batch] = field(default_factory=deque)
    free_s: list[float] = field(default_factory=list)
    next_worker: int = 0
    gap_cpu_share: float = 0.5

    def __post_init__(self) -> None:
        # Batches and steps apart, so that all settings have the same ones.
        self.batches, self.steps = random.Random(self.seed), random.Random(self.seed + 1)
        self._restart()

    def resize(self, workers: int, prefetch: int) -> None:
        self.workers, self.prefetch = workers, prefetch
        self.now_s += RESIZE_S
        self._restart()

    def _restart(self) -> None:
        self.queued.clear()
        self.free_s = [self.now_s] * self.workers
        self.next_worker = 0
        self._fill()

    def _fill(self) -> None:
        while len(self.queued) < self.workers * self.prefetch:
            worker, self.next_worker = self.next_worker, (self.next_worker + 1) % self.workers
            start_s = max(self.free_s[worker], self.now_s)
            others = sum(free_s > start_s for free_s in self.free_s)
            batch = self._make(start_s, others + 1)
            self.free_s[worker] = batch.finished_s
            self.queued.append(batch)

    def _make(self, start_s: float, loading: int) -> Batch:
        host, length = self.host, self.host.length(self.batches)
        wanted = loading * host.cpu_s / host.service_s + self.gap_cpu_share
        stretch = max(1.0, wanted / host.cores)
        return Batch(start_s, start_s + length * (host.sleep_s + host.cpu_s * stretch), length * host.cpu_s)

    def _take(self) -> Batch:
        batch = self.queued.popleft() if self.workers else self._make(self.now_s, 0)
        self.now_s = max(self.now_s, batch.finished_s)
        if self.workers:
            self._fill()
        return batch

    def _step(self) -> float:
        """Uses a batch; returns how long the step takes."""
        host = self.host
        loading = sum(free_s > self.now_s for free_s in self.free_s) * host.cpu_s / host.service_s
        stretch = max(1.0, (loading + host.gap_cpu) / host.cores)
        # A step's own jitter: a twentieth.
        return host.gap_s * self.steps.uniform(0.95, 1.05) * (1 - host.gap_cpu + host.gap_cpu * stretch)

    def window(self, at_least_s: float = 1.0, batches: int = 20, at_most_s: float = 1.5) -> Measures:
        """Runs for a second, and 20 batches at least."""
        began_s, taken, gaps, waits = self.now_s, [], [], []
        late = 0
        while self.now_s - began_s < at_least_s or (len(taken) < batches and self.now_s - began_s < at_most_s):
            asked_s = self.now_s
            ready = bool(self.queued) and self.queued[0].finished_s <= asked_s
            taken.append(self._take())
            late += not ready
            waits.append(self.now_s - asked_s)
            gaps.append(self._step())
            self.now_s += gaps[-1]
        wall_s = self.now_s - began_s
        own = len(gaps) * self.host.gap_s * self.host.gap_cpu
        self.gap_cpu_share = min(1.0, own / wall_s)
        lengths = sorted(batch.finished_s - batch.started_s for batch in taken)
        loading_cpu = sum(batch.cpu_s for batch in taken)
        # Time on a core that batches had before the window, or will have, is none that there is more of.
        busy = min(self.workers, sum(lengths) / wall_s)
        room = (self.host.cores - own / wall_s) / busy if busy else 1.0
        return Measures(
            workers=self.workers,
            prefetch=self.prefetch if self.workers else 0,
            batches=len(taken),
            wall_s=wall_s,
            gap_s=max(0.0, mean(gaps) - pstdev(gaps)),
            wait_s=mean(waits),
            starved=late / len(taken),
            service_s=mean(lengths),
            service_q97_s=lengths[int(0.97 * (len(lengths) - 1))],
            cpu_share=min(room, loading_cpu / sum(lengths)),
            own_cores=(own + (0 if self.workers else loading_cpu)) / wall_s,
            batch_bytes=self.host.batch_bytes,
            worker_bytes=self.host.worker_bytes,
        )


def throughput(host: Host, workers: int, prefetch: int, *, batches: int = 400, seed: int = 100) -> float:
    """Batches a second with one setting, after the queue was filled."""
    loader = Loader(host, workers, prefetch, seed=seed)
    loader.window(at_least_s=0, batches=30, at_most_s=inf)
    measures = loader.window(at_least_s=0, batches=batches, at_most_s=inf)
    return measures.batches / measures.wall_s
