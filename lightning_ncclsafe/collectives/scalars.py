"""What goes to the Trainer's loggers: the collectives and the latest rank since the last time, as plain numbers."""

import re
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torchmetrics import MeanMetric

from lightning_ncclsafe.timing.bandwidth import bandwidth
from lightning_ncclsafe.timing.lateness import Lateness
from lightning_ncclsafe.timing.matching import MatchedCalls

# MLflow takes no other characters in a metric's name.
_REFUSED = re.compile(r"[^\w./\-: ]")
# A program may make groups for as long as it runs, and loggers keep every name that they are given.
_MOST_NAMES = 256


def _mean() -> Any:
    # Never synchronised: all ranks' numbers are here, and torchmetrics would do it with the training's own groups.
    # In double precision, whatever Lightning has set for the model meanwhile.
    return MeanMetric(sync_on_compute=False).set_dtype(torch.float64)


class TimingScalars:
    """Collects between two calls of :meth:`take`; used by one thread.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._means: dict[str, Any] = defaultdict(_mean)
        self._updated: set[str] = set()
        self._late_s = np.zeros(world_size)
        self._steps: set[int] = set()
        self._names: set[str] = set()

    def add(self, calls: MatchedCalls, late: Lateness) -> None:
        """Adds a block of collectives."""
        for number in np.unique(calls.op):
            chosen = calls.op == number
            timed = chosen & (late.transfer_ns >= 0)
            name = self._name(calls.group.name, calls.ops[number])
            self._update(f"{name}/skew_ms", late.skew_ns[chosen] / 1e6)
            self._update(f"{name}/wait_ms", late.wait_ns[:, chosen].mean(axis=0) / 1e6)
            self._update(f"{name}/size_bytes", calls.size_bytes[chosen].astype(float))
            if timed.any():
                self._update(f"{name}/transfer_ms", late.transfer_ns[timed] / 1e6)
                found = bandwidth(
                    calls.ops[number],
                    ranks=len(calls.group.ranks),
                    size_bytes=float(calls.size_bytes[timed].mean()),
                    seconds=float(late.transfer_ns[timed].mean() / 1e9),
                )
                if found is not None:
                    self._update(f"{name}/busbw_gb_per_s", np.array([found.bus / 1e9]))
        np.add.at(self._late_s, np.array(calls.group.ranks), late.late_ns.sum(axis=1) / 1e9)
        self._steps.update(calls.step.tolist())

    def take(self) -> dict[str, float]:
        """Everything since the last call, by name; empty if there was nothing."""
        if not self._updated:
            return {}
        found = {name: float(self._means[name].compute()) for name in sorted(self._updated)}
        latest = int(self._late_s.argmax())
        found["straggler/rank"] = float(latest)
        found["straggler/late_ms_per_step"] = float(self._late_s[latest]) * 1e3 / max(len(self._steps), 1)
        for name in self._updated:
            self._means[name].reset()
        self._updated.clear()
        self._steps.clear()
        self._late_s[:] = 0
        return found

    def _name(self, group: str, op: str) -> str:
        """``"collectives/all_reduce"``; for any other than the default group with its name: ``"collectives/reduce.7"``.

        Later groups have one name together: ``"collectives/reduce.later"``.
        """
        name = _REFUSED.sub("_", f"collectives/{op}" if group == "0" else f"collectives/{op}.{group}")
        if name not in self._names and len(self._names) >= _MOST_NAMES:
            return _REFUSED.sub("_", f"collectives/{op}.later")
        self._names.add(name)
        return name

    def _update(self, name: str, values: Any) -> None:
        # The mean of a block, with its weight: one update costs a tenth of a millisecond.
        self._updated.add(name)
        self._means[name].update(float(values.mean()), weight=len(values))
