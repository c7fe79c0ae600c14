"""A call of the Trainer that is over: what breaks in its last moments is not told as a failure of the guard."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe.strategies.guarded_call import GuardedCall

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31886. GLHF!")


def left(error: Exception) -> None:
    """A call that has raised and is closed; meanwhile this is raised, by a handler of SIGTERM for instance."""

    def detach(unharmed: Callable[[Callable[[], Any]], Any]) -> None:
        def strikes() -> None:
            raise error

        unharmed(strikes)

    call = GuardedCall.__new__(GuardedCall)
    call._features = SimpleNamespace(detach=detach, detach_timer=lambda: None)  # type: ignore[assignment]
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
