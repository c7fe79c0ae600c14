"""What a strategy asks of the guard, as its next call of the Trainer would hand it on."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

from lightning.pytorch.profilers import PassThroughProfiler

from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.settings import Limits
from lightning_ncclsafe.strategies import guarded, guarded_call
from lightning_ncclsafe.strategies.guarded_call import GuardedCall


class Asked(NamedTuple):
    """Of one call."""

    limits: Limits
    report_dir: str | Path | None
    ending: Ending


def guard_of(strategy: Any) -> Asked:
    """The limits and the folder of reports that a strategy gives to its calls, and its end."""
    with patch.object(guarded, "GuardedCall") as call, strategy.watch(MagicMock()):
        limits, report_dir = call.call_args.args[1:]
        return Asked(limits, report_dir, call.call_args.kwargs["ending"])


def begun(strategy: Any, guard: Any, *, trainer: Any = None, report_dir: Path | None = None) -> GuardedCall:
    """A call of the Trainer whose guard is this one, on the rank that the strategy has been given."""
    call = GuardedCall(
        trainer or MagicMock(callbacks=[], default_root_dir=".", profiler=PassThroughProfiler()),
        Limits(suspect_after_s=1, timeout_s=2, on_timeout="abort"),
        report_dir,
        ending=Ending(),
        combined=object,
        sigterm_error=None,
    )
    # A probe is closed by its guard.
    with patch.object(guarded_call, "Guard", guard), patch.object(guarded_call, "RankProbe"):
        call.begin(strategy)
    return call
