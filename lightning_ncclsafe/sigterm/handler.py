"""Replaces Lightning's handling of SIGTERM, so that all ranks stop before the same batch; and SLURM's requeue.

Since 2.5.2, Lightning broadcasts one element from rank 0 before every training batch for this, and once more in the
signal handler, wherever that interrupts. In earlier versions, the rank that received the signal left alone.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning_ncclsafe.code.patching import ReplacedMethod, WrappedMethod
from lightning_ncclsafe.exchange import Exchange, ExchangeError, first_rank
from lightning_ncclsafe.sigterm.agreement import StopAgreement

_BATCH, _EPOCH_END = "advance", "on_advance_end"
_BROADCAST, _HANDLER, _SLURMS = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"

_attached: list["StopSignal"] = []
"""Those of this process; a forked process would inherit their handlers."""
_held = threading.local()
"""The signals that were blocked before a fork on this thread."""


class _Wakeup:
    """Learns about signals while Python runs no handler, because the main thread is in a call that does not return.

    Python's handler in C writes the signal's number into a pipe, if there is one. A process can have only one; if
    something else uses it, such as an event loop, nothing is learned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards against reading after closing: another file may have the number by then."""
        self._pipe: tuple[int, int] | None = None

    def open(self) -> None:
        """Begins to listen; on the main thread."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(os, "pipe2"):
            return
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before == -1:
            self._pipe = read, write
            return
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)

    def heard(self) -> set[int]:
        """The signals since the last call."""
        with self._lock, suppress(BlockingIOError):
            return {*os.read(self._pipe[0], 4096)} if self._pipe is not None else set()
        return set()

    def close(self) -> None:
        """Closes the pipe."""
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            now = signal.set_wakeup_fd(-1)
            if now not in (-1, pipe[1]):
                signal.set_wakeup_fd(now)
            for end in pipe:
                os.close(end)


class StopSignal:
    """Counts the batches of one rank, and ends its call before the batch that the ranks have agreed on.

    The end of a training epoch, where Lightning would stop as well, counts as one more batch of evaluation.

    Lightning's loops check ``received_sigterm`` in several places, where a rank would leave alone: so it is set only at
    the end.

    Args:
        agreement: Decides which batches may begin.
        error: What Lightning raises on SIGTERM, ``SIGTERMException``.
        takes_slurms: Whether SLURM's signal before a requeue has the same effect as SIGTERM; Lightning would save
            wherever the signal interrupts.

    Attributes:
        is_to_requeue: Whether SLURM is to queue the job again.
    """

    def __init__(
        self, trainer: Any, agreement: StopAgreement, error: type[BaseException], *, takes_slurms: bool = False
    ) -> None:
        self._trainer = trainer
        self._agreement = agreement
        self._error = error
        self._training = 0
        self._evaluation = 0
        self._methods: list[ReplacedMethod] = []
        self._wakeup = _Wakeup()
        self._takes_slurms = takes_slurms
        self._handler: ReplacedMethod | None = None
        self._has_failed = False
        self.is_to_requeue = False

    def attach(self) -> None:
        """Replaces Lightning's methods; what a version of Lightning lacks is left out."""
        epochs, connector = self._trainer.fit_loop, self._trainer._signal_connector
        loop = epochs.epoch_loop
        self._methods += [
            WrappedMethod(loop, _BATCH, self._train),
            WrappedMethod(epochs, _EPOCH_END, self._end_epoch),
        ]
        if hasattr(loop, _BROADCAST):
            self._methods.append(ReplacedMethod(loop, _BROADCAST, lambda: None))
        if hasattr(connector, _HANDLER):
            self._handler = ReplacedMethod(connector, _HANDLER, self._handle)
            self._methods.append(self._handler)
        if self._takes_slurms and hasattr(connector, _SLURMS):
            self._methods.append(ReplacedMethod(connector, _SLURMS, self._handle_slurms))
        self._wakeup.open()
        _attached.append(self)

    def poll(self) -> None:
        """Called on the watchdog's thread: handles signals while the main thread is stuck and runs no handler."""
        for signum in self._wakeup.heard():
            handlers = getattr(signal.getsignal(signum), "signal_handlers", ())
            for method in [*self._methods]:
                if any(method is handler for handler in handlers):
                    method(signum, None)

    def fail(self) -> None:
        """Called when this rank's call has failed, before :meth:`detach`: from then on, SIGTERM is only noted.

        A launcher sends it to the remaining ranks while their exceptions are still being printed. Lightning's handler
        would broadcast it, although some ranks are gone: on gloo, the broadcast raises amid whatever it interrupts; on
        NCCL, it would wait (not tried).
        """
        self._has_failed = True

    def detach(self) -> None:
        """Restores Lightning's methods, and lets Lightning know whether SIGTERM was received."""
        if self._agreement.is_asked:
            self._trainer._signal_connector.received_sigterm = True
        self._wakeup.close()
        while self._methods:
            method = self._methods.pop()
            method.remove(then=self._note if self._has_failed and method is self._handler else None)
        if self in _attached:
            _attached.remove(self)

    def before_evaluation_batch(self) -> None:
        """Called before each batch of validation, test and prediction.

        Raises:
            BaseException: Lightning's error, if this rank stops here.
        """
        self._evaluation += 1
        self._check()

    def _train(self, train: Callable[..., Any], *args: Any) -> Any:
        """Replaces the method that trains on the next batch, beginning with its fetch."""
        self._training += 1
        self._evaluation = 0
        self._check()
        return train(*args)

    def _end_epoch(self, end_epoch: Callable[[], None]) -> None:
        """Replaces the method that calls the hooks at the end of an epoch; after the last one nothing is checked."""
        end_epoch()
        self._evaluation += 1
        self._check()

    def _check(self) -> None:
        if not self._agreement.may_pass((self._training, self._evaluation)):
            self._trainer._signal_connector.received_sigterm = True
            raise self._error

    def _handle(self, signum: int, frame: Any) -> None:
        """Handles SIGTERM, which may interrupt the main thread anywhere, even while it holds one of our locks."""
        launcher = self._trainer.strategy.launcher
        self._agreement.receive((lambda: launcher.kill(signum)) if launcher is not None else lambda: None)

    def _note(self, signum: int, frame: Any) -> None:
        """Handles SIGTERM after a failed call, as Lightning does, but without the broadcast."""
        connector, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)
        connector.received_sigterm = True

    def _handle_slurms(self, signum: int, frame: Any) -> None:
        """Handles SLURM's signal some time before the job's limit; a SIGTERM that follows changes nothing."""
        # SLURM may send it to all processes of a job; a process forked by the user's code is not a rank.
        if self in _attached:
            self.is_to_requeue = True
            self._handle(signum, frame)

    def handler_before(self) -> Any:
        """The handler of the signal before that of the Trainer."""
        before = getattr(self._trainer._signal_connector, "_original_handlers", {}).get(signal.SIGTERM)
        return signal.SIG_DFL if before is None else before


# A process that the user's code forks is not a rank, and must end on SIGTERM, which a pool sends to its processes. With
# the handler of a rank, it would not; and a signal that comes before the new process runs Python would be lost, as
# Python forgets pending signals there: the pool would wait forever.


def _before_fork() -> None:
    _held.signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if _attached else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.signals)


def _after_fork_in_child() -> None:
    try:
        if _attached:
            # The signals of this process do not concern the rank.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, _attached[0].handler_before())
            _attached.clear()
    finally:
        _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


# The controller answers within a second or so; a scheduler does not wait for longer than its grace period.
_DEADLINE_S = 10.0


def requeue_once(
    exchange: Exchange, rank: int, say: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> None:
    """Has SLURM queue the job again; only one of the ranks that call it does so."""
    try:
        is_mine = first_rank(exchange, "requeue", rank) == rank
    except ExchangeError:
        is_mine = rank == 0
    job = environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    if not is_mine or not job:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, timeout=_DEADLINE_S)
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None)
        reason = printed.decode(errors="replace").strip() if printed else str(error)
        say(f"rank {rank} could not requeue SLURM job {job}: {reason}")
    else:
        say(f"rank {rank} requeued SLURM job {job}")
