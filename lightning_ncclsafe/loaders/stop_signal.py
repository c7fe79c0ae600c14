"""SIGTERM in epochs in which ranks vote before each batch: the vote carries it, and all ranks stop before the same one.

Lightning broadcasts one element from rank 0 before every training batch for this, and once more in the handler of the
signal, wherever that strikes. Next to a vote that is one wait too many, so the vote takes the broadcast's place.
"""

from collections.abc import Callable
from typing import Any

from lightning_ncclsafe.loaders.lockstep import Flag, Votes
from lightning_ncclsafe.methods import ReplacedMethod

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
        self._methods: list[ReplacedMethod] = []
        self.votes = False

    def attach(self) -> None:
        """Stands in; a Lightning that does not broadcast has nothing to stand in for."""
        loop, connector = self._trainer.fit_loop.epoch_loop, self._trainer._signal_connector
        if hasattr(loop, _CHECK) and hasattr(connector, _HANDLER):
            self._methods = [
                ReplacedMethod(loop, _CHECK, self._check),
                ReplacedMethod(connector, _HANDLER, self._handle),
            ]

    def detach(self) -> None:
        """Lightning is as it was, and knows what has been received."""
        if self._received:
            self._trainer._signal_connector.received_sigterm = True
        while self._methods:
            self._methods.pop().remove()

    def carried_by(self, votes: Votes) -> Votes:
        """The same votes, with the signal on board."""
        return _Carrier(self, votes) if self._methods else votes

    def _check(self) -> None:
        """Called before each training batch."""
        if not self.votes:
            self._methods[0].original()
        elif self._agreed:
            self._trainer._signal_connector.received_sigterm = True
            raise self._error

    def _handle(self, signum: int, frame: Any) -> None:
        """Called when the signal has struck. To tell Lightning now would end this rank before the others."""
        if not self.votes:
            self._methods[1].original(signum, frame)
            return
        launcher = self._trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(signum)
        self._received = True
        self._tell_evaluation()

    def _tell_evaluation(self) -> None:
        """Validation may take long, and mostly has no votes of its own: there Lightning looks after each batch."""
        if not self._trainer.training:
            self._trainer._signal_connector.received_sigterm = True

    def agreed(self) -> None:
        """A vote has said that some rank has received the signal."""
        self._agreed = True
        self._tell_evaluation()


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
                self._signal.agreed()
            return outcome

        return result
