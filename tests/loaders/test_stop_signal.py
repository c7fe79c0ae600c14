"""SIGTERM rides on the votes while ranks vote, and is Lightning's own business otherwise."""

import copy
import pickle
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe.loaders.lockstep import Flag
from lightning_ncclsafe.loaders.stop_signal import StopSignal
from lightning_ncclsafe.methods import ReplacedMethod

GOES_ON = int(Flag.GOES_ON)


class Stopped(SystemExit):
    """Stands for Lightning's ``SIGTERMException``."""


class Loop:
    def __init__(self) -> None:
        self.broadcasts = 0

    def _broadcast_sigterm_tensor(self) -> None:
        self.broadcasts += 1


class Connector:
    def __init__(self) -> None:
        self.received_sigterm = False
        self.handled: list[int] = []

    def _sigterm_notifier_fn(self, signum: int, frame: Any) -> None:
        self.handled.append(signum)


class Trainer:
    """As much of Lightning's as matters here."""

    def __init__(self) -> None:
        self.fit_loop = SimpleNamespace(epoch_loop=Loop())
        self._signal_connector = Connector()
        self.training = True
        self.killed: list[int] = []
        self.strategy = SimpleNamespace(launcher=SimpleNamespace(kill=self.killed.append))

    @property
    def loop(self) -> Loop:
        return self.fit_loop.epoch_loop  # type: ignore[no-any-return]

    def signal(self) -> None:
        self._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)


class Everybody:
    """Votes in which another rank says what ``others`` are."""

    def __init__(self) -> None:
        self.others = GOES_ON

    def start(self, flags: int) -> Callable[[], int]:
        return lambda: flags | self.others

    def gather(self, *values: int) -> list[list[int]]:
        return [list(values)]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def stop(trainer: Trainer) -> StopSignal:
    stop = StopSignal(trainer, Stopped)
    stop.attach()
    return stop


def test_where_ranks_do_not_vote_all_is_as_lightning_has_it(trainer: Trainer, stop: StopSignal) -> None:
    trainer.signal()
    trainer.loop._broadcast_sigterm_tensor()
    assert trainer._signal_connector.handled == [signal.SIGTERM]
    assert trainer.loop.broadcasts == 1
    assert trainer.killed == []


def test_the_signal_is_carried_by_the_next_vote_and_stops_before_the_batch_after(
    trainer: Trainer, stop: StopSignal
) -> None:
    stop.votes = True
    votes = stop.carried_by(Everybody())
    first = votes.start(GOES_ON)
    trainer.signal()
    assert first() == GOES_ON
    trainer.loop._broadcast_sigterm_tensor()
    assert votes.start(GOES_ON)() & GOES_ON
    with pytest.raises(Stopped):
        trainer.loop._broadcast_sigterm_tensor()
    assert trainer._signal_connector.received_sigterm
    assert trainer._signal_connector.handled == []
    assert trainer.loop.broadcasts == 0


def test_the_signal_of_another_rank_stops_this_one(trainer: Trainer, stop: StopSignal) -> None:
    stop.votes = True
    everybody = Everybody()
    votes = stop.carried_by(everybody)
    everybody.others = GOES_ON | Flag.STOP
    assert votes.start(GOES_ON)() & GOES_ON
    with pytest.raises(Stopped):
        trainer.loop._broadcast_sigterm_tensor()


def test_this_rank_alone_does_not_stop(trainer: Trainer, stop: StopSignal) -> None:
    """Lightning ends a rank at the end of its batch once it knows: too soon, before the others know."""
    stop.votes = True
    trainer.signal()
    trainer.loop._broadcast_sigterm_tensor()
    assert not trainer._signal_connector.received_sigterm


def test_validation_ends_after_its_batch(trainer: Trainer, stop: StopSignal) -> None:
    """It may take long, and has no votes of its own."""
    stop.votes, trainer.training = True, False
    trainer.signal()
    assert trainer._signal_connector.received_sigterm
    assert trainer._signal_connector.handled == [], "there is nobody to broadcast to"


def test_a_vote_of_validation_tells_it(trainer: Trainer, stop: StopSignal) -> None:
    stop.votes, trainer.training = True, False
    everybody = Everybody()
    everybody.others = GOES_ON | Flag.STOP
    stop.carried_by(everybody).start(GOES_ON)()
    assert trainer._signal_connector.received_sigterm


def test_what_came_too_late_for_a_vote_is_known_afterwards(trainer: Trainer, stop: StopSignal) -> None:
    stop.votes = True
    trainer.signal()
    stop.detach()
    assert trainer._signal_connector.received_sigterm


def test_launched_processes_are_told_once(trainer: Trainer, stop: StopSignal) -> None:
    stop.votes = True
    trainer.signal()
    trainer.signal()
    assert trainer.killed == [signal.SIGTERM]


def test_a_rank_that_launched_nobody(trainer: Trainer, stop: StopSignal) -> None:
    stop.votes = True
    trainer.strategy.launcher = None
    trainer.signal()


def test_lightning_is_as_it_was_afterwards(trainer: Trainer, stop: StopSignal) -> None:
    stop.detach()
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert "_broadcast_sigterm_tensor" not in vars(trainer.loop)


def test_a_lightning_that_does_not_broadcast_is_left_alone(trainer: Trainer) -> None:
    trainer.fit_loop.epoch_loop = SimpleNamespace()
    stop = StopSignal(trainer, Stopped)
    stop.attach()
    votes = Everybody()
    assert stop.carried_by(votes) is votes
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
def test_a_copy_has_its_own_method_again(copied: Callable[[Loop], Loop]) -> None:
    loop = Loop()
    ReplacedMethod(loop, "_broadcast_sigterm_tensor", print)
    other = copied(loop)
    other._broadcast_sigterm_tensor()
    assert (loop.broadcasts, other.broadcasts) == (0, 1)


def test_what_stood_there_before_stands_there_again() -> None:
    loop = Loop()
    loop._broadcast_sigterm_tensor = (before := lambda: None)  # type: ignore[method-assign]
    ReplacedMethod(loop, "_broadcast_sigterm_tensor", print).remove()
    assert loop._broadcast_sigterm_tensor is before
