"""Corrects a setting while training goes on, from one window of measures to the next."""

from dataclasses import replace

from lightning_ncclsafe.loaders.tuning.budget import Budget
from lightning_ncclsafe.loaders.tuning.choice import Choice, scarcest
from lightning_ncclsafe.loaders.tuning.expected import covering
from lightning_ncclsafe.loaders.tuning.known import Known
from lightning_ncclsafe.loaders.tuning.measures import Measures
from lightning_ncclsafe.loaders.tuning.moves import (
    Kind,
    Limits,
    Move,
    fewer,
    fewer_by_cores,
    fewer_by_quota,
    raises,
    times,
)
from lightning_ncclsafe.loaders.tuning.trends import Drift, gained, is_throttled, lost, overcommits, starves

# Something new is tried if it can be judged before so much time was measured; but so many settings in any case, where
# windows are long.
_TRYING_S = 9.5
_LEAST_TRIES = 2
# Windows that a raise has to show its worth: in the first of them, new workers start and the queue fills.
_RAISE_WINDOWS = 2
# How often less is tried where nothing is wrong.
_MOST_FEWER = 2
# Windows that a setting stays, once settled, before another is tried; four times as many each time, so that measures
# that only vary are followed less and less, but after about ten minutes again in any case.
_FIRST_PATIENCE = 5
_MORE_PATIENCE = 4
_MOST_PATIENCE = 640
# Windows after which, asked again, it is sure that something should be tried.
_SURE = 5
# Windows with another setting than the one in force after which nobody expects it to be set.
_MOST_OTHERS = 2
# One window may show more cores busy than there are: a batch's time counts where it ends.
_OVERCOMMITTED_WINDOWS = 2
# Where every change stops training for seconds: less waiting than this share of the time is not worth one.
_WORTH_A_STOP = 0.2
# A quota that holds the processes nearly as long with fewer workers was not used up by them.
_RELIEF = 0.9


class Controller:
    """Decides for one loader, on behalf of all ranks.

    A change is kept if the next window shows that it was worth it, and is otherwise taken back and not tried again
    until what is measured has changed.

    Args:
        budget: What this loader may use.
        start: The setting that it begins with.
        copies: How often a batch that is ready is held in memory: 2 where it is pinned.
        forks: Whether workers are forked; others take seconds to start, and training waits for them.

    Attributes:
        choice: The setting that is in force.
        settled: Whether nothing is being tried any more; it may be tried again when what is measured changes.
        reason: Why the last change was made, in words for the user.
        budget: What this loader may use; may be set anew before any window.
    """

    def __init__(self, budget: Budget, start: Choice, *, copies: int = 1, forks: bool = True) -> None:
        self.choice = start
        self.settled = False
        self.reason = ""
        self.budget = budget
        self._copies = copies
        self._forks = forks
        self._windows = 0
        self._others = 0
        self._known = Known()
        self._trial: Move | None = None
        self._patience = _FIRST_PATIENCE
        self._open()

    def add(self, measures: Measures) -> Choice | None:
        """Takes a window; returns a new setting, or None to leave it.

        A window that was measured with another setting than the one in force says nothing about it, unless it is the
        first; after some of them, the choice is taken to be final.
        """
        before = self.choice
        self._windows += 1
        if self._windows > 1 and (measures.workers, measures.prefetch) != _pair(before):
            self._others += 1
            self.settled = self.settled or self._others >= _MOST_OTHERS
            return None
        self._others = 0
        self._elapsed_s += measures.wall_s
        measures = self._known.added_to(measures)
        self._decide(measures)
        if not self._limits.admits(self.choice, measures):  # what was gone back to, with a budget that has shrunk
            self.choice = self._limits.shrunk(self.choice, measures)
        return self.choice if _pair(self.choice) != _pair(before) else None

    @property
    def _limits(self) -> Limits:
        return Limits(budget=self.budget, copies=self._copies)

    def _decide(self, measures: Measures) -> None:
        if self._windows == 1:
            self._begin(measures)
        elif not self._limits.admits(self.choice, measures):
            self._shrink(measures)
        elif self._trial is not None and self._trial.kind != "held":
            self._trial_windows += 1
            self._judge(self._trial, measures)
        elif self._hold_back(measures):
            pass
        elif self.settled:
            self._watch(measures)
        else:
            self._go_on(measures)

    def _open(self) -> None:
        self.settled = False
        self._refused: set[Kind] = set()
        self._tries = 0
        self._fewer = 0
        self._known.forget_slow_batches()
        self._overcommitted = 0
        self._trial_windows = 0
        self._elapsed_s = 0.0
        self._drift = Drift()
        self._is_asked_again = False

    def _begin(self, measures: Measures) -> None:
        chosen = self._limits.choose(measures)
        if _pair(chosen) == _pair(self.choice):
            self.choice, self.reason = chosen, times(measures)
            self._go_on(measures)
            return
        move = Move(kind="workers", before=self.choice, choice=chosen, measures=measures, reason=times(measures))
        self._try(move)
        if not starves(measures) or chosen.workers <= move.before.workers:
            self._trial = None  # it is cheaper, or surer: there is no gain to wait for

    def _shrink(self, measures: Measures) -> None:
        before = self.choice
        self.choice = self._limits.shrunk(before, measures)
        self.reason = f"num_workers={before.workers}, prefetch_factor={before.prefetch} is more than there is room for"
        self._trial = None
        self._settle(measures)

    def _hold_back(self, measures: Measures) -> bool:
        """Steps down where cores are short; back up if that was not the workers' doing."""
        trial, self._trial = self._trial, None
        if trial is not None and self._was_in_vain(trial, measures):
            self._take_back(trial, "were no relief")
            self._settle(measures)
            return True
        move = None
        self._overcommitted = self._overcommitted + 1 if overcommits(measures, self.budget) else 0
        if "held" not in self._refused and self._overcommitted >= _OVERCOMMITTED_WINDOWS:
            move = fewer_by_cores(self.choice, measures, self._limits)
        elif "held" not in self._refused and is_throttled(measures):
            move = fewer_by_quota(self.choice, measures, self._limits)
        if move is None:
            return False
        self._refused.update(("workers", "prefetch"))
        self._try(move)
        self._drift = Drift()
        self.settled = self.settled or self._is_late(measures)
        return True

    def _was_in_vain(self, trial: Move, measures: Measures) -> bool:
        eased = measures.throttled < _RELIEF * trial.measures.throttled or not is_throttled(trial.measures)
        return lost(trial.measures, measures) and not eased

    def _judge(self, trial: Move, measures: Measures) -> None:
        has_gained = gained(trial.measures, measures)
        if trial.kind != "fewer" and not has_gained and self._trial_windows < _RAISE_WINDOWS:
            return
        self._trial = None
        if trial.kind == "fewer":
            # Without workers every batch is waited for: what counts is what that costs.
            if (trial.choice.workers and starves(measures)) or lost(trial.measures, measures):
                self._take_back(trial, "were not enough")
                measures = trial.measures  # which are those of the setting that is in force again
            self._go_on(measures)
        elif has_gained:
            if not self._hold_back(measures):
                self._go_on(measures)
        elif not self._forks and not lost(trial.measures, measures):
            self._refused.add(trial.kind)  # going back would cost more
            self._settle(measures)
        else:
            self._take_back(trial, "were no faster")
            self._cover(trial, measures)
            self._go_on(trial.measures)

    def _take_back(self, trial: Move, verdict: str) -> None:
        self._refused.add(trial.kind)
        self.choice = trial.before
        self.reason = f"{trial.choice.workers} workers with {trial.choice.prefetch} batches ahead of each {verdict}"

    def _cover(self, trial: Move, measures: Measures) -> None:
        """Keeps of a longer queue what slow batches need, which one or two windows without any do not disprove."""
        before = trial.before
        prefetch = min(trial.choice.prefetch, covering(before.workers, measures)) if before.workers else 0
        if trial.kind == "prefetch" and prefetch > before.prefetch:
            self.choice = replace(before, prefetch=prefetch)

    def _go_on(self, measures: Measures) -> None:
        move = self._next(measures)
        if move is None or (self._tries >= _LEAST_TRIES and self._is_late(measures)):
            self._settle(measures)
        else:
            self._try(move)

    def _is_late(self, measures: Measures) -> bool:
        return self._elapsed_s + _RAISE_WINDOWS * measures.wall_s > _TRYING_S

    def _next(self, measures: Measures) -> Move | None:
        if not self.choice.workers and not self._limits.choose(measures).workers:
            moves = []  # every batch is waited for, and is cheaper so
        elif starves(measures):
            is_worth = self._forks or measures.wait_s > _WORTH_A_STOP * (measures.gap_s + measures.wait_s)
            moves = raises(self.choice, measures, self._limits) if is_worth else []
        elif self._forks and self._fewer < _MOST_FEWER:
            moves = fewer(self.choice, measures, self._limits)
        else:
            moves = []
        return next((move for move in moves if move.kind not in self._refused), None)

    def _try(self, move: Move) -> None:
        self._tries += 1
        self._trial_windows = 0
        self._fewer += move.kind == "fewer"
        self._trial, self.choice, self.reason = move, move.choice, move.reason

    def _settle(self, measures: Measures) -> None:
        self.settled = True
        self._drift = Drift()
        if starves(measures) and self.choice.bound == "need":
            limits, workers = self._limits, self.choice.workers
            if workers >= self.budget.workers:
                self.choice = replace(self.choice, bound="cores")
            elif limits.most_prefetch(workers + 1, measures) < 1:
                self.choice = replace(self.choice, bound=scarcest(measures, self.budget, copies=self._copies))

    def _watch(self, measures: Measures) -> None:
        """Once settled: whether there is something to be tried, again or for the first time."""
        recent = self._drift.add(measures)
        if self._drift.windows < (_SURE if self._is_asked_again else self._patience):
            return
        if self._drift.has_changed():
            self._refused, self._fewer = set(), 0
        move = self._next(recent)
        if move is None:
            self._is_asked_again = False
        elif not self._is_asked_again:
            # The mean still has much of what was before, and what is tried would not be better than that.
            self._is_asked_again, self._drift = True, Drift()
        else:
            self._patience = min(_MOST_PATIENCE, _MORE_PATIENCE * self._patience)
            self._open()
            self._try(move)


def _pair(choice: Choice) -> tuple[int, int]:
    return choice.workers, choice.prefetch
