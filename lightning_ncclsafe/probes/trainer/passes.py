"""Backward passes and optimizers' steps of each training batch, and the user's lines that call for the passes."""

import ast
import itertools
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

from lightning_ncclsafe.code.libraries import TRAINING_LOOPS
from lightning_ncclsafe.probes.process.stacks import is_user_code
from lightning_ncclsafe.probes.source.scopes import MOST_PLACES, Scope, first_places, scope_of

T = TypeVar("T")

MOST_RUNS = 64
"""The most runs that are kept."""
MOST_CALLS = 8
"""The most calls that are noted of one batch."""
MOST_BATCHES_WITH_CALLS = 16
"""The most batches whose calls are reported."""
# The most user functions that are recorded for one call, and the most frames that are searched for them.
_MOST_CALLERS, _MOST_FRAMES = 4, 26

Batch = tuple[int, int]
"""Epoch and index of a batch; -1 where they are not known."""
Call = tuple[tuple[CodeType, int], ...]
"""Where something was called: the user's functions with their lines, the innermost first."""
# Epoch and index of its first batch, and the counts of each of its batches.
_Run = tuple[int, ...]


class BatchPasses:
    """Counts passes and steps, batch by batch. Consecutive batches with equal counts make one run."""

    def __init__(self) -> None:
        self._batch: Batch = (-1, -1)
        self._last_counted: Batch = (-1, -1)
        # Backward passes, those of them that reduced nothing, and steps by optimizer.
        self._counts: list[int] = [0, 0]
        self._calls: list[Call] = []
        # Each with the calls of its first batch.
        self._runs: deque[tuple[_Run, tuple[Call, ...]]] = deque(maxlen=MOST_RUNS)

    def begin_batch(self, batch: Batch) -> None:
        """Called when the first pass of a batch is about to begin: the batch before is over."""
        if self._counts[0] and self._batch[1] >= 0:
            if self._is_unlike(self._runs):
                self._runs.append((self._run(), tuple(self._calls)))
            self._last_counted = self._batch
        self._counts, self._calls = [0, 0], []
        self._batch = batch

    def backward(self, *, is_reduced: bool, is_manual: bool) -> None:
        """Called when a backward pass begins, by the code that requests it.

        Args:
            is_reduced: Whether ranks exchange its gradients.
            is_manual: Whether the user's code calls for all of them.
        """
        self._counts[0] += 1
        self._counts[1] += not is_reduced
        if len(self._calls) < MOST_CALLS and (is_manual or self._counts[0] > 1):
            # Lightning's own first pass of a batch is that of every batch; an optimizer may ask for more.
            self._calls += [()] * (self._counts[0] - 1 - len(self._calls))
            self._calls.append(self._called_from())

    def take_back(self) -> None:
        """Called if the first pass of a batch has not been made after all."""
        self._counts, self._calls = [0, 0], []

    def stepped(self, optimizer: int) -> None:
        """Called when the optimizer with this index has made a step."""
        self._counts += [0] * (optimizer + 3 - len(self._counts))
        self._counts[optimizer + 2] += 1

    def facts(self, *, is_over: bool) -> dict[str, Any]:
        """What :class:`~lightning_ncclsafe.facts.StepFacts` has of this; for another thread.

        Args:
            is_over: Whether the newest batch is over; what it will have is not known before.
        """
        runs, counted = [*self._runs], self._last_counted
        has_begun = any(self._counts)
        if has_begun and is_over:
            counted = self._batch
            if self._is_unlike(runs):
                runs.append((self._run(), tuple(self._calls)))
        is_under_way = has_begun and self._batch != counted
        calls = [calls for _, calls in runs] + [tuple(self._calls)] * is_under_way
        calls = [*itertools.repeat((), len(calls[:-MOST_BATCHES_WITH_CALLS])), *calls[-MOST_BATCHES_WITH_CALLS:]]
        newest_first = (call for call in itertools.chain(*reversed(calls)) if call)
        newest = [*dict.fromkeys(itertools.islice(newest_first, MOST_BATCHES_WITH_CALLS))]
        ways = {call: _led_around(call, Scope.leads_around) for call in newest}
        return {
            "passes": tuple(run for run, _ in runs),
            "passes_epoch": counted[0],
            "passes_batch": counted[1],
            "under_way": self._run() if is_under_way else (),
            "passes_from": tuple(tuple(map(_place, batch)) for batch in calls) if any(calls) else (),
            "led_around": {_place(call): found for call, found in ways.items()},
            "conditions_around": first_places(
                place for call in newest for place in _led_around(call, Scope.conditions_around)
            ),
            "differs_around": dict(pair for call in newest for pair in _led_around(call, Scope.differs_around)),
            "handlers_around": first_places(
                place for call in newest if not ways[call] for place in _led_around(call, Scope.handlers_around)
            ),
            "skips_steps": first_places(place for call in newest for place in _led_around_steps(call)),
        }

    def _run(self) -> _Run:
        return *self._batch, *_without_zeros(self._counts)

    def _is_unlike(self, runs: Any) -> bool:
        return not runs or runs[-1][0][2:] != _without_zeros(self._counts)

    def _called_from(self) -> Call:
        """The user's calling functions, up to Lightning's loop."""
        found: list[tuple[CodeType, int]] = []
        for frame, line in itertools.islice(traceback.walk_stack(sys._getframe(1)), _MOST_FRAMES):
            code = frame.f_code
            if is_user_code(code.co_filename):
                found.append((code, line or code.co_firstlineno))
            elif found or TRAINING_LOOPS.has(code.co_filename, code.co_name):
                break
        return tuple(found[:_MOST_CALLERS])


def _place(call: Call) -> str:
    return f"{call[0][0].co_filename}:{call[0][1]} in {call[0][0].co_name}" if call else ""


def _led_around(call: Call, asked: Callable[[Scope, int], tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(way for code, line in call for way in asked(scope_of(code), line))[:MOST_PLACES]


def _led_around_steps(call: Call) -> Iterator[str]:
    """The branches that lead around an optimizer's step, and not around the pass before it as well."""
    for code, line in call[:1]:
        scope = scope_of(code)
        steps = [step for step in _lines_that_step(scope) if step > line]
        around = (place for step in steps for place in scope.leads_around(step))
        yield from (place for place in around if place not in scope.leads_around(line))


def _lines_that_step(scope: Scope) -> Iterator[int]:
    """The lines that call the ``step`` of an optimizer, by its name: a scheduler has one, too."""
    return (call.lineno for call in scope.calls(["step"]) if "opt" in ast.unparse(call.func).lower())


def _without_zeros(counts: list[int]) -> tuple[int, ...]:
    """The counts without zeros at the end."""
    return tuple(counts[: max((index + 1 for index, count in enumerate(counts) if count), default=0)])
