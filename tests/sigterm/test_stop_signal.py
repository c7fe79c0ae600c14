"""What stands in for Lightning's handling of SIGTERM: counts batches, asks before each, and ends at the right one."""

import copy
import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ncclsafe.code.patching import ReplacedMethod
from lightning_ncclsafe.exchange import MemoryExchange, wait_for
from lightning_ncclsafe.sigterm.agreement import Position, StopAgreement
from lightning_ncclsafe.sigterm.handler import StopSignal


class Stopped(SystemExit):
    """Stands for Lightning's ``SIGTERMException``."""


class Loop:
    def __init__(self) -> None:
        self.broadcasts = 0
        self.trained: list[str] = []

    def advance(self, batch: str) -> str:
        self._broadcast_sigterm_tensor()
        self.trained.append(batch)
        return "advanced"

    def _broadcast_sigterm_tensor(self) -> None:
        self.broadcasts += 1


class FitLoop:
    def __init__(self) -> None:
        self.epoch_loop: Any = Loop()
        self.epochs = 0

    def on_advance_end(self) -> None:
        self.epochs += 1


class Handlers:
    """Lightning's, which calls several."""

    def __init__(self, *handlers: Any) -> None:
        self.signal_handlers = handlers

    def __call__(self, signum: int, frame: Any) -> None:
        for handler in self.signal_handlers:
            handler(signum, frame)


class Connector:
    def __init__(self) -> None:
        self.received_sigterm = False
        self.handled: list[int] = []
        self._original_handlers: dict[int, Any] = {}

    def _sigterm_notifier_fn(self, signum: int, frame: Any) -> None:
        self.handled.append(signum)


class Trainer:
    """As much of Lightning's as matters here."""

    def __init__(self) -> None:
        self.fit_loop = FitLoop()
        self._signal_connector = Connector()
        self.killed: list[int] = []
        self.strategy = SimpleNamespace(launcher=SimpleNamespace(kill=self.killed.append))

    @property
    def loop(self) -> Loop:
        return self.fit_loop.epoch_loop  # type: ignore[no-any-return]

    def signal(self) -> None:
        self._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)


class Agreement(StopAgreement):
    """Of a rank without others; notes what is asked."""

    def __init__(self) -> None:
        super().__init__(MemoryExchange(), rank=0, world_size=1, say=lambda _: None)
        self.positions: list[Position] = []

    def may_pass(self, position: Position) -> bool:
        self.positions.append(position)
        return super().may_pass(position)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def agreement() -> Agreement:
    return Agreement()


@pytest.fixture
def stop(trainer: Trainer, agreement: Agreement) -> Iterator[StopSignal]:
    stop = StopSignal(trainer, agreement, Stopped)
    stop.attach()
    yield stop
    stop.detach()


def test_nothing_is_broadcast(trainer: Trainer, stop: StopSignal) -> None:
    assert trainer.loop.advance("batch") == "advanced"
    assert trainer.loop.trained == ["batch"]
    assert trainer.loop.broadcasts == 0


def test_evaluation_batches_are_counted_from_zero_per_training_batch(
    trainer: Trainer, agreement: Agreement, stop: StopSignal
) -> None:
    stop.before_evaluation_batch()
    trainer.loop.advance("batch")
    trainer.loop.advance("batch")
    stop.before_evaluation_batch()
    stop.before_evaluation_batch()
    trainer.loop.advance("batch")
    assert agreement.positions == [(0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_training_stops_before_a_batch(trainer: Trainer, agreement: Agreement, stop: StopSignal) -> None:
    trainer.loop.advance("first")
    trainer.signal()
    assert not trainer._signal_connector.received_sigterm, "or Lightning would end this rank alone"
    agreement.poll()
    assert not trainer._signal_connector.received_sigterm
    with pytest.raises(Stopped):
        trainer.loop.advance("second")
    assert trainer.loop.trained == ["first"]
    assert trainer._signal_connector.received_sigterm
    assert trainer._signal_connector.handled == []


def test_evaluation_stops_before_a_batch(trainer: Trainer, agreement: Agreement, stop: StopSignal) -> None:
    stop.before_evaluation_batch()
    trainer.signal()
    agreement.poll()
    with pytest.raises(Stopped):
        stop.before_evaluation_batch()
    assert trainer._signal_connector.received_sigterm


def test_training_stops_after_an_epoch(trainer: Trainer, agreement: Agreement, stop: StopSignal) -> None:
    trainer.loop.advance("last")
    trainer.fit_loop.on_advance_end()
    trainer.loop.advance("last")
    trainer.signal()
    agreement.poll()
    with pytest.raises(Stopped):
        trainer.fit_loop.on_advance_end()
    assert trainer.fit_loop.epochs == 2, "the end of the epoch is completed"
    assert agreement.positions == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_signal_while_our_lock_is_held_does_not_deadlock(
    trainer: Trainer, agreement: Agreement, stop: StopSignal
) -> None:
    with agreement._lock:
        struck = threading.Thread(target=trainer.signal, daemon=True)
        struck.start()
        struck.join(5)
        assert not struck.is_alive()
    assert agreement.is_asked


def test_a_late_signal_is_passed_to_lightning_on_detach(trainer: Trainer, stop: StopSignal) -> None:
    trainer.signal()
    stop.detach()
    assert trainer._signal_connector.received_sigterm


def test_without_a_signal_lightning_sees_none(trainer: Trainer, stop: StopSignal) -> None:
    trainer.loop.advance("batch")
    stop.detach()
    assert not trainer._signal_connector.received_sigterm


def test_launched_processes_get_the_signal_once(trainer: Trainer, agreement: Agreement, stop: StopSignal) -> None:
    trainer.signal()
    trainer.signal()
    agreement.poll()
    agreement.poll()
    assert trainer.killed == [signal.SIGTERM]


def test_a_rank_without_a_launcher_accepts_the_signal(trainer: Trainer, agreement: Agreement, stop: StopSignal) -> None:
    trainer.strategy.launcher = None
    trainer.signal()
    assert agreement.is_asked


def test_detaching_restores_lightning(trainer: Trainer, stop: StopSignal) -> None:
    handler = trainer._signal_connector._sigterm_notifier_fn
    stop.detach()
    assert {*vars(trainer._signal_connector)} == {*vars(Connector())}
    assert {*vars(trainer.loop)} == {*vars(Loop())}
    assert {*vars(trainer.fit_loop)} == {*vars(FitLoop())}
    trainer.loop.advance("batch")
    handler(signal.SIGTERM, None)
    assert trainer.loop.broadcasts == 1
    assert trainer._signal_connector.handled == [signal.SIGTERM], "a kept reference to the handler is Lightning's again"


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_signal_after_a_failed_call_is_only_noted(trainer: Trainer, stop: StopSignal, has_failed: bool) -> None:
    """Lightning's handler, which the process still has, would broadcast to ranks that are gone."""
    handler = trainer._signal_connector._sigterm_notifier_fn
    if has_failed:
        stop.fail()
    stop.detach()
    assert not trainer._signal_connector.received_sigterm
    handler(signal.SIGTERM, None)
    assert trainer._signal_connector.handled == ([] if has_failed else [signal.SIGTERM])
    assert trainer._signal_connector.received_sigterm is has_failed
    # What Lightning's handler does besides.
    handler(signal.SIGTERM, None)
    assert trainer.killed == ([signal.SIGTERM] if has_failed else []), "it is passed on once"


def test_a_lightning_without_broadcast_is_supported(trainer: Trainer, agreement: Agreement, stop: StopSignal) -> None:
    stop.detach()
    trainer.fit_loop.epoch_loop = SimpleNamespace(advance=lambda batch: batch)
    stop.attach()
    assert trainer.loop.advance("batch") == "batch"
    assert not hasattr(trainer.loop, "_broadcast_sigterm_tensor")
    trainer.signal()
    agreement.poll()
    with pytest.raises(Stopped):
        trainer.loop.advance("batch")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))])
def test_a_copy_has_the_original_method(copied: Callable[[Loop], Loop]) -> None:
    loop = Loop()
    ReplacedMethod(loop, "_broadcast_sigterm_tensor", print)
    other = copied(loop)
    other._broadcast_sigterm_tensor()
    assert (loop.broadcasts, other.broadcasts) == (0, 1)


def test_an_instance_attribute_is_restored() -> None:
    loop = Loop()
    loop._broadcast_sigterm_tensor = (before := lambda: None)  # type: ignore[method-assign]
    ReplacedMethod(loop, "_broadcast_sigterm_tensor", print).remove()
    assert loop._broadcast_sigterm_tensor is before


@pytest.fixture
def handled(trainer: Trainer, stop: StopSignal) -> Iterator[None]:
    """SIGTERM is handled as a Trainer handles it."""
    before = signal.signal(signal.SIGTERM, trainer._signal_connector._sigterm_notifier_fn)
    yield
    signal.signal(signal.SIGTERM, before)
    stop.detach()


@pytest.mark.usefixtures("handled")
def test_a_pool_forked_by_a_hook_can_be_terminated(trainer: Trainer) -> None:
    """Its processes would inherit the rank's handler, which does not end a process."""
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    child = fork.Process(target=lambda: runs.set() or threading.Event().wait(60.0))
    child.start()
    assert runs.wait(20.0)
    child.terminate()
    child.join(20.0)
    code = child.exitcode
    child.kill()
    assert code == -signal.SIGTERM
    assert not trainer.killed


@pytest.mark.usefixtures("handled")
def test_a_forked_process_terminated_at_once_ends() -> None:
    """Python drops pending signals in a process it has just forked if it handles them itself."""
    fork = multiprocessing.get_context("fork")
    for _ in range(20):
        child = fork.Process(target=threading.Event().wait, args=(60.0,))
        child.start()
        child.terminate()
        child.join(20.0)
        code = child.exitcode
        child.kill()
        assert code == -signal.SIGTERM


@pytest.mark.usefixtures("handled")
def test_a_fork_does_not_change_the_ranks_signals() -> None:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(20.0)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.usefixtures("handled")
def test_a_forked_process_has_the_original_handler(trainer: Trainer) -> None:
    trainer._signal_connector._original_handlers[signal.SIGTERM] = signal.SIG_IGN
    fork = multiprocessing.get_context("fork")
    is_ignored = fork.Value("b", False)

    def look() -> None:
        is_ignored.value = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    child = fork.Process(target=look)
    child.start()
    child.join(20.0)
    assert is_ignored.value


@pytest.fixture
def composed(trainer: Trainer, stop: StopSignal) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, Handlers(trainer._signal_connector._sigterm_notifier_fn))
    yield
    signal.signal(signal.SIGTERM, before)


def within_c(act: Callable[[], None]) -> None:
    """Does something on another thread while this one is in a call in C that no signal interrupts."""
    libc, mutex, is_locked = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event()

    def run() -> None:
        libc.pthread_mutex_lock(mutex)
        is_locked.set()
        try:
            act()
        finally:
            libc.pthread_mutex_unlock(mutex)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_locked.wait(30)
    libc.pthread_mutex_lock(mutex)
    thread.join(30)


def test_a_signal_is_noticed_while_the_main_thread_is_stuck(
    composed: None, trainer: Trainer, agreement: Agreement, stop: StopSignal
) -> None:
    """In a collective, for instance: a job that hangs is ended by its scheduler's SIGTERM."""
    asked: list[bool] = []

    def be_watched() -> None:
        stop.poll()
        asked.append(agreement.is_asked)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stop.poll() or agreement.is_asked, deadline_s=20)
        asked.append(agreement.is_asked)
        agreement.poll()

    within_c(be_watched)
    assert asked == [False, True]
    assert trainer.killed == [signal.SIGTERM]
    with pytest.raises(Stopped):
        trainer.loop.advance("next")


def test_a_signal_with_a_replaced_handler_is_ignored(agreement: Agreement, stop: StopSignal) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.poll()
        assert not agreement.is_asked
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_wakeup_fd_of_an_event_loop_is_kept(trainer: Trainer, agreement: Agreement) -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    try:
        stop = StopSignal(trainer, agreement, Stopped)
        stop.attach()
        stop.poll()
        stop.detach()
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def test_no_file_is_left_open_and_a_fork_has_none(trainer: Trainer, agreement: Agreement) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stop = StopSignal(trainer, agreement, Stopped)
    stop.attach()
    if (child := os.fork()) == 0:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    assert os.waitpid(child, 0)[1] == 0
    stop.detach()
    assert len(os.listdir("/proc/self/fd")) == before
    assert signal.set_wakeup_fd(-1) == -1
