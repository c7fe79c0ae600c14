"""A call of the Trainer that is over: what breaks in its last moments is not told as a failure of the guard."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
from guard_of import begun
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from lightning_ncclsafe import CollectiveTimeoutError, DatasetMismatchError, HostPreflightError, SafeDDP
from lightning_ncclsafe.errors import PlannedStopError
from lightning_ncclsafe.strategies import guarded

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31886. GLHF!")


def left(error: Exception) -> None:
    """A call that has raised and is closed; meanwhile this is raised, by a handler of SIGTERM for instance."""

    def detach(safely: Callable[[Callable[[], Any]], Any]) -> None:
        def strikes() -> None:
            raise error

        safely(strikes)

    call = begun(MagicMock(world_size=1), MagicMock())
    call.finish()
    call.features.detach = detach  # type: ignore[method-assign]
    call.close()


@pytest.mark.parametrize(("error", "said"), [(BROKEN, 0), (ValueError("of ours"), 1)])
def test_a_signal_that_strikes_meanwhile_is_no_failure_of_the_guard(
    error: Exception, said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    left(error)
    assert capsys.readouterr().err.count("the guard failed and is off") == said


class Alarm(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("has_failed", [False, True])
def test_all_is_closed_if_the_handler_of_a_signal_raises_meanwhile(
    has_failed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A watch that goes on after its call would end the process."""

    def handler(signum: int, frame: object) -> None:
        raise Alarm

    def detach(safely: Callable[[Callable[[], Any]], Any]) -> None:
        safely(lambda: signal.raise_signal(signal.SIGUSR1))

    guard = MagicMock()
    call = begun(MagicMock(world_size=1), MagicMock(return_value=guard))
    call.features.detach = detach  # type: ignore[method-assign]
    closed = call._exchanges.close = MagicMock()  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        if has_failed:
            call.failed(ValueError("of the user"))
            call.close()
        else:
            call.finish()
            with pytest.raises(Alarm):
                call.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    guard.close.assert_called_once()
    closed.assert_called_once()
    assert "the guard failed" not in capsys.readouterr().err


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
    call = begun(MagicMock(world_size=1), MagicMock(return_value=MagicMock(leaves_jointly=False)))
    assert call.leaves_others(error) is leaves
    call.close()


def test_saving_that_was_refused_in_one_call_is_allowed_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a callback has raised as it heard of the exception, so that the strategy has not."""
    strategy = SafeDDP()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, barebones=True, default_root_dir=tmp_path
    )
    call = MagicMock()
    call.failed.return_value = None
    monkeypatch.setattr(guarded, "GuardedCall", lambda *_, **__: call)
    with pytest.raises(ValueError, match="of one rank"), strategy.watch(trainer):
        raise ValueError("of one rank")
    assert "save_checkpoint" in vars(trainer)
    with strategy.watch(trainer):
        assert "save_checkpoint" not in vars(trainer)
