"""A call of the Trainer that is over: what breaks in its last moments is not told as a failure of the guard."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from lightning_ncclsafe import CollectiveTimeoutError, DatasetMismatchError, HostPreflightError, SafeDDP
from lightning_ncclsafe.errors import PlannedStopError
from lightning_ncclsafe.strategies.guarded import refuse_saving
from lightning_ncclsafe.strategies.guarded_call import GuardedCall

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31886. GLHF!")


def left(error: Exception) -> None:
    """A call that has raised and is closed; meanwhile this is raised, by a handler of SIGTERM for instance."""

    def detach(safely: Callable[[Callable[[], Any]], Any]) -> None:
        def strikes() -> None:
            raise error

        safely(strikes)

    call = GuardedCall.__new__(GuardedCall)
    call.features = SimpleNamespace(detach=detach, detach_timer=lambda: None)  # type: ignore[assignment]
    call.tracker = SimpleNamespace(detach=lambda: None)  # type: ignore[assignment]
    call._group_timeouts = SimpleNamespace(restore=lambda: None)  # type: ignore[assignment]
    call._exchanges = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    call._guard, call._listens, call._leaves = None, False, False
    call._leaving(lambda guard: None)
    call.close()


@pytest.mark.parametrize(("error", "said"), [(BROKEN, 0), (ValueError("of ours"), 1)])
def test_a_signal_that_strikes_meanwhile_is_no_failure_of_the_guard(
    error: Exception, said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    left(error)
    assert capsys.readouterr().err.count("the guard failed and is off") == said


@pytest.mark.parametrize(
    ("error", "leaves"),
    [
        (ValueError("of one rank"), True),
        (CollectiveTimeoutError("of all, one after the other"), True),
        (KeyboardInterrupt(), False),
        (SIGTERMException(), False),
        (_TunerExitException(), False),
        (DatasetMismatchError("of all"), False),
        (HostPreflightError("of all"), False),
        (PlannedStopError("of all"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stops_all_ranks_leaves_none_of_them(error: BaseException, leaves: bool) -> None:
    """Lightning's Tuner ends each of its fits with an exception, which never comes to the strategy."""
    call = GuardedCall.__new__(GuardedCall)
    call._guard = SimpleNamespace(leaves_jointly=False)  # type: ignore[assignment]
    assert call.leaves_others(error) is leaves


def test_saving_that_was_refused_in_one_call_is_allowed_in_the_next(tmp_path: Path) -> None:
    """Also where a callback has raised as it heard of the exception, so that the strategy has not."""
    strategy = SafeDDP()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, barebones=True, default_root_dir=tmp_path
    )
    strategy._refused = refuse_saving(trainer, 0, strategy._ending)
    assert "save_checkpoint" in vars(trainer)
    with strategy.watch(trainer):
        assert "save_checkpoint" not in vars(trainer)
