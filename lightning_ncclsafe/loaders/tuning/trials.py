"""Whether more workers than the user's are worth a trial, and how it ended: plain arithmetic."""

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.measuring import Interval, Measurement

# The promise: over any 20 epochs, at most 2 % slower than with the user's workers. That is 40 % of one epoch. One trial
# may cost most of it, and a failed one is the last.
_MOST_LOSS = 0.35
# The forecast has to save the first share of a step's time, and the trial half of the forecast or the second share.
_LEAST_PROMISE = 0.15
_LEAST_GAIN = 0.05
# Measurements by which a setting is known.
_KNOWN_BY = 3
# If a step waits for the loader for less than this share, its workers are fast enough.
_STARVES = 0.1
# After this many intervals, then twice as many each time, one interval has the user's workers again: what other workers
# gained at first may have become a loss.
_FIRST_CONTROL = 20

# How long starting and ending a worker takes where it is not measured, typically and at most (torch 2.13, two cores,
# idle and with ten programs per core): forked, and otherwise, when each worker imports everything first.
_FORK_S, _SLOW_FORK_S = 0.1, 0.2
_SPAWN_S, _SLOW_SPAWN_S = 5.0, 12.0
# What receiving a batch from a worker costs the training thread: a message, a file for each tensor, pages to map.
_MESSAGE_S, _TENSOR_S, _BYTE_S = 0.001, 0.0002, 0.5e-9
# Workers have to be a tenth faster than the step, or the queue of ready batches never fills up again.
_HEADROOM = 1.1
# More workers have to be faster by this share than fewer.
_WORTH_MORE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Other workers, for one interval.

    Attributes:
        workers: ``num_workers``.
        interval: The first one in which it may begin; later than that of any earlier trial of the loader.
    """

    workers: int
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """How a trial ended.

    Attributes:
        kind: The workers are kept, gained nothing, or have become a loss.
        now: A measurement with the workers from now on.
        other: One with the workers before, or those that were tried.
    """

    kind: Literal["kept", "no gain", "taken back"]
    now: Measurement
    other: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of other workers.

    Attributes:
        workers: How many.
        step_s: How long a step would take, including all that the loader costs; seconds.
        known: The measurement it follows from.
        gain: The share of a step's time that would be saved, 0 to 1.
    """

    workers: int
    step_s: float
    known: Measurement
    gain: float


class Trials:
    """The trials of one loader, for all ranks.

    Other workers are tried for one interval (an epoch, or some minutes of a longer one), and the user's come back. The
    others are kept if that interval was faster than those before and after it, including all that starting them costs.
    What fails once is not tried again.

    Args:
        workers: The user's ``num_workers``, as far as there is room.
        forks: Whether its workers are forked.

    Attributes:
        workers: Workers in force.
        trial: What is being tried; None for nothing.
    """

    def __init__(self, workers: int, *, forks: bool) -> None:
        self.workers = workers
        self.trial: Trial | None = None
        self._users = workers
        self._forks = forks
        self._is_cold = True
        self._is_over = False
        self._recent: deque[Measurement] = deque(maxlen=_KNOWN_BY)
        self._tried: Measurement | None = None
        self._promised = 0.0
        self._spent_s = 0.0
        self._known_users: Measurement | None = None
        self._since_control, self._next_control = 0, _FIRST_CONTROL

    def add(self, measurement: Measurement, room: Budget, *, begins: Interval, may_try: bool) -> TrialOutcome | None:
        """Takes a measurement and decides.

        Args:
            room: What the loader may use.
            begins: When a trial may begin: all ranks know of it by then.
            may_try: Whether one may begin at all.
        """
        # The first interval reads from cold storage, and its first steps are not like the others.
        is_cold, self._is_cold = self._is_cold, False
        if is_cold:
            return None
        trial = self.trial
        if trial is not None and measurement.interval >= trial.interval and measurement.workers == trial.workers:
            self._tried = measurement
            return None
        if measurement.workers != self.workers:
            return None
        change = None
        if trial is not None and measurement.interval >= trial.interval:
            change = self._judge(trial, measurement)
        if change is None or change.kind == "no gain":
            self._recent.append(measurement)
        change = change or self._taken_back()
        self._since_control += 1
        if may_try and change is None and self.trial is None:
            self._try(room, begins)
        return change

    def forecast(self, room: Budget, *, most_loss_s: float = inf) -> Forecast | None:
        """What more workers would gain; None if too little for a trial.

        Args:
            room: What the loader may use.
            most_loss_s: The most that a trial without gain may cost, seconds.
        """
        if len(self._recent) < _KNOWN_BY or self._is_over:
            return None
        known = self._known()
        found = [
            (workers, self._expected_s(known, workers, room.cores))
            for workers in _more(known, room)
            if self._most_loss_s(known, workers) <= most_loss_s
        ]
        if not found:
            return None
        least_s = min(step_s for _, step_s in found)
        workers, step_s = next(each for each in found if each[1] <= (1 + _WORTH_MORE) * least_s)
        gain = 1 - step_s / known.step_s
        if gain < _LEAST_PROMISE:
            return None
        return Forecast(workers=workers, step_s=step_s, known=known, gain=gain)

    def _known(self) -> Measurement:
        return sorted(self._recent, key=lambda measurement: measurement.step_s)[len(self._recent) // 2]

    def _try(self, room: Budget, begins: Interval) -> None:
        if self.workers != self._users and self._since_control >= self._next_control:
            self._begin(self._users, begins)
            return
        if len(self._recent) < _KNOWN_BY:
            return
        known = self._known()
        left_s = _MOST_LOSS * known.batches * known.step_s - self._spent_s
        forecast = self.forecast(room, most_loss_s=left_s)
        if forecast is not None:
            self._promised = forecast.gain
            self._spent_s += self._most_loss_s(known, forecast.workers)
            self._begin(forecast.workers, begins)

    def _begin(self, workers: int, begins: Interval) -> None:
        self._tried = None
        self.trial = Trial(workers=workers, interval=begins)

    def _judge(self, trial: Trial, after: Measurement) -> TrialOutcome | None:
        """Judges a trial once the workers in force are back."""
        tried, self._tried, self.trial = self._tried, None, None
        if tried is None:  # not all ranks knew of it in time
            return None
        base = min(self._known(), after, key=lambda measurement: measurement.step_s)
        if trial.workers == self._users:
            self._since_control, self._next_control = 0, 2 * self._next_control
            self._known_users = tried
            return None
        if tried.step_s > (1 - max(_LEAST_GAIN, self._promised / 2)) * base.step_s:
            self._is_over = True
            return TrialOutcome(kind="no gain", now=base, other=tried)
        self.workers = trial.workers
        self._spent_s = 0.0  # the next interval gains it back
        self._known_users = self._known_users or base
        self._recent.clear()
        return TrialOutcome(kind="kept", now=tried, other=base)

    def _taken_back(self) -> TrialOutcome | None:
        """Goes back to the user's workers if the kept ones are slower by now than those were when last measured."""
        if self.workers == self._users or self._known_users is None or len(self._recent) < _KNOWN_BY:
            return None
        known = self._known()
        if known.step_s <= self._known_users.step_s:
            return None
        self.workers, self._is_over = self._users, True
        self.trial = None
        self._recent.clear()
        return TrialOutcome(kind="taken back", now=self._known_users, other=known)

    def _expected_s(self, known: Measurement, workers: int, cores: float) -> float:
        """How long a step would take with more workers, seconds."""
        # Making a batch: workers that a step waits for are busy all the time.
        step_s, batch_s = known.gap_s + known.wait_s, known.data_s / known.batches
        service_s = known.workers * step_s if known.workers else batch_s
        # All processes share the cores. Workers are assumed to compute all the time.
        cpu_s = known.cpu_s + (service_s if known.workers else 0.0)
        made_s = _HEADROOM * service_s / workers
        used_s = known.gap_s + _handover_s(known)
        start_s = self._starting_s(known, workers, _FORK_S if self._forks else _SPAWN_S)
        return start_s / known.batches + max(made_s, used_s, cpu_s / cores)

    def _most_loss_s(self, known: Measurement, workers: int) -> float:
        """What a trial costs if batches come no faster than before, seconds."""
        start_s = self._starting_s(known, workers, _SLOW_FORK_S if self._forks else _SLOW_SPAWN_S)
        return start_s + known.batches * _handover_s(known)

    def _starting_s(self, known: Measurement, workers: int, each_s: float) -> float:
        measured_s = known.start_s / known.workers if known.workers else 0.0
        return (measured_s or each_s) * workers


def _handover_s(known: Measurement) -> float:
    """What receiving a batch from a worker costs the training thread, seconds."""
    return _MESSAGE_S + _TENSOR_S * known.tensors + _BYTE_S * known.batch_bytes


def _more(known: Measurement, room: Budget) -> range:
    """The numbers of workers that may gain something and fit."""
    if known.persists or known.wait_s < _STARVES * known.step_s:
        return range(0)
    most = room.workers
    if room.memory_bytes is not None and known.process_bytes:
        # In the end a worker may use as much memory as the process it is forked from: reference counts are written to.
        most = min(most, known.workers + room.memory_bytes // known.process_bytes)
    return range(known.workers + 1, most + 1)
