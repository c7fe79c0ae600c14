"""SIGTERM in epochs in which ranks vote before each batch: the vote carries it, and all ranks stop before the same one.

Lightning broadcasts one element from rank 0 before every training batch for this, and once more in the handler of the
signal, wherever that strikes. Next to a vote that is one wait too many, so the vote takes the broadcast's place.
"""

from collections.abc import Callable
from typing import Any

from lightning_ncclsafe.loaders.lockstep import Flag, Votes
from lightning_ncclsafe.loaders.standin import StandIn

_STOP = int(Flag.STOP)
_CHECK, _HANDLER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"


class StopSignal:
    """Takes the place of Lightning's handling of SIGTERM while ranks vote; else that is left as it is.

    Args:
        trainer: The ``Trainer``.
        error: What Lightning raises on SIGTERM, ``SIGTERMException``.

    Attributes:
        votes: Whether ranks vote before each training batch.
    """

    def __init__(self, trainer: Any, error: type[BaseException]) -> None:
        self._trainer = trainer
        self._error = error
        self._received = False
        self._agreed = False
        self._standins: list[StandIn] = []
        self.votes = False

    def attach(self) -> None:
        """Stands in; a Lightning that does not broadcast has nothing to stand in for."""
        loop, connector = self._trainer.fit_loop.epoch_loop, self._trainer._signal_connector
        if hasattr(loop, _CHECK) and hasattr(connector, _HANDLER):
            self._standins = [StandIn(loop, _CHECK, self._check), StandIn(connector, _HANDLER, self._handle)]

    def detach(self) -> None:
        """Lightning is as it was."""
        while self._standins:
            self._standins.pop().remove()

    def carried_by(self, votes: Votes) -> Votes:
        """The same votes, with the signal on board."""
        return _Carrier(self, votes) if self._standins else votes

    def _check(self) -> None:
        """Called before each training batch."""
        if not self.votes:
            self._standins[0].original()
        elif self._agreed:
            self._trainer._signal_connector.received_sigterm = True
            raise self._error

    def _handle(self, signum: int, frame: Any) -> None:
        """Called when the signal has struck. To tell Lightning now would end this rank before the others."""
        if not self.votes:
            self._standins[1].original(signum, frame)
            return
        launcher = self._trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(signum)
        self._received = True


class _Carrier:
    """Adds one more flag to every vote."""

    def __init__(self, signal: StopSignal, votes: Votes) -> None:
        self._signal = signal
        self._votes = votes
        self.gather = votes.gather

    def start(self, flags: int) -> Callable[[], int]:
        wait = self._votes.start(flags | _STOP if self._signal._received else flags)

        def result() -> int:
            outcome = wait()
            if outcome & _STOP:
                self._signal._agreed = True
            return outcome

        return result
