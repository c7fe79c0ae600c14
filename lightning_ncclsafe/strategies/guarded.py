"""What all guarded strategies share: they only connect Lightning's hooks with the guard."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lightning_ncclsafe._lightning import known, lightnings, package_of, refuse_other_caller
from lightning_ncclsafe._torch import build
from lightning_ncclsafe._torch.process_groups import distributed_is_initialized
from lightning_ncclsafe.code.patching import ReplacedMethod, WrappedMethod
from lightning_ncclsafe.collectives.timer import AttachedTimer
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.probes.process.stacks import drop_passing_frames
from lightning_ncclsafe.report.terminal import say_on_stderr
from lightning_ncclsafe.settings import BACKSTOP_S, OnTimeout, PhaseTimeouts, check_limits
from lightning_ncclsafe.strategies.guarded_call import GuardedCall
from lightning_ncclsafe.strategies.guarded_save import GuardedSave
from lightning_ncclsafe.strategies.launchers import guarded

_SUFFIX = "_ncclsafe"
Call = TypeVar("Call", bound=GuardedCall)


if TYPE_CHECKING:

    class _ParallelStrategy:
        """The members of Lightning's strategies, of either of its packages."""

        _launcher: Any
        _checkpoint_io: Any
        checkpoint_io: Any
        model: Any
        global_rank: int
        world_size: int
        _configure_launcher: Any
        setup_environment: Any
        barrier: Any
        save_checkpoint: Any
        remove_checkpoint: Any
        lightning_module_state_dict: Any
        optimizer_state: Any
        optimizer_step: Any
        training_step: Any
        validation_step: Any
        test_step: Any
        predict_step: Any
        backward: Any
        process_dataloader: Any
        on_exception: Any

        def __getstate__(self) -> dict[str, Any]: ...

else:
    _ParallelStrategy = object


def _save_whole(io: Any, ending: Ending, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    """Saves as Lightning does, but to a temporary name first: the file is complete, or as it was before."""
    with ending.written(path) as temporary:
        type(io).save_checkpoint(io, checkpoint, temporary, storage_options)


def _remove(io: Any, ending: Ending, path: Any) -> None:
    ending.check()
    type(io).remove_checkpoint(io, path)


def refuse_saving(trainer: Any, rank: int, ending: Ending) -> list[ReplacedMethod]:
    """Stops callbacks from saving on an exception that not all ranks have: they would wait forever for the others.

    Returns:
        The replaced methods, to restore after the callbacks' hooks.
    """

    def refuse(kind: str) -> None:
        say_on_stderr(f"rank {rank}: {kind} saves nothing, because that needs all ranks and not all of them failed")

    refused = []
    for callback in trainer.callbacks:
        saves = isinstance(callback, known("ModelCheckpoint")) and getattr(callback, "save_on_exception", False)
        if saves or isinstance(callback, known("OnExceptionCheckpoint")):
            act = partial(lambda kind, *args: refuse(kind), type(callback).__name__)
            refused.append(ReplacedMethod(callback, "on_exception", act))
    # If the run is being ended, every save raises anyway.
    if not ending.is_closed:
        act = partial(lambda kind, *args, **keys: refuse(kind), "trainer.save_checkpoint()")
        refused.append(ReplacedMethod(trainer, "save_checkpoint", act))
    return refused


class GuardedStrategy(_ParallelStrategy):
    """A Lightning strategy with the guard: explains why ranks wait, and ends a run that is stuck.

    A class inherits from this one first, then from a strategy of either of Lightning's packages.

    Args:
        suspect_after: How long a rank may wait without progress before all ranks are asked what they are doing and a
            report is written: a ``timedelta``, or seconds. Training is left alone. None: learned from the run, several
            times what is usual in that phase, at least 10 s, at most half of the hard limit.
        on_timeout: What happens when a rank has waited for ``timeout``. ``"abort"``: the guard writes the final report,
            then every rank exits with status 124. ``"report"``: the guard only writes the report, and the back end's
            own timeout, 15 s later, ends the run.
        report_dir: The folder for reports, with one subfolder for each incident; created at the first one. None
            means ``<trainer.default_root_dir>/ncclsafe``.
        phase_timeouts: A hard limit for each phase; see :class:`~lightning_ncclsafe.PhaseTimeouts`. None means
            ``timeout`` for all.
        sigterm_broadcast: True keeps Lightning's own handling of SIGTERM, with a broadcast before every training
            batch. By default, ranks agree outside of the training on the batch before which all of them stop.
        *args: Positional arguments of Lightning's own strategy.
        **kwargs: All arguments of Lightning's own strategy. ``timeout`` (a ``timedelta``; by default, and for None, 30
            minutes) is still the hard limit, for every process group that the strategy creates.

    Attributes:
        forward_communicates: Whether ranks need each other in a forward pass, because the model is sharded. If so, all
            ranks must predict, too, with the same number of batches.
        is_on_all_ranks: Whether the program itself has chosen the guard, so that every rank has it.

    Raises:
        ValueError: If ``suspect_after`` is not longer than 0, or not shorter than ``timeout``, or if ``on_timeout``
            is unknown.
    """

    forward_communicates: ClassVar[bool] = False
    is_on_all_ranks: ClassVar[bool] = True
    _timeout: timedelta | None
    _guarded_call: GuardedCall | None = None
    _refused: list[ReplacedMethod]

    def __init__(
        self,
        *args: Any,
        suspect_after: float | timedelta | None = None,
        on_timeout: OnTimeout = "abort",
        report_dir: str | Path | None = None,
        phase_timeouts: PhaseTimeouts | None = None,
        sigterm_broadcast: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.take_guard(
            suspect_after=suspect_after,
            on_timeout=on_timeout,
            report_dir=report_dir,
            phase_timeouts=phase_timeouts,
            sigterm_broadcast=sigterm_broadcast,
        )

    def take_guard(
        self,
        *,
        suspect_after: float | timedelta | None = None,
        on_timeout: OnTimeout = "abort",
        report_dir: str | Path | None = None,
        phase_timeouts: PhaseTimeouts | None = None,
        sigterm_broadcast: bool = False,
    ) -> None:
        """Sets up the guard in a strategy that Lightning has made, and may have configured; arguments as above."""
        phases_s = phase_timeouts.as_seconds() if phase_timeouts is not None else {}
        self._limits = check_limits(suspect_after, self._timeout, on_timeout, phases_s)
        self._report_dir = report_dir
        self._sigterm_broadcast = sigterm_broadcast
        self._ending = Ending()
        self._refused = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers each name of the guarded strategy once more, with ``_ncclsafe`` appended."""
        # As soon as there is a Trainer, Lightning requires a GPU for some names, those of FSDP.
        for_gpus = getattr(cls, "_registered_strategies", [])
        for name, entry in [*strategy_registry.items()]:
            if issubclass(cls, entry["strategy"]) and not name.endswith(_SUFFIX):
                # Notebooks may load the package twice.
                strategy_registry.register(
                    f"{name}{_SUFFIX}",
                    cls,
                    description=f"{entry['description']}, and reports why ranks wait",
                    override=True,
                    **entry["init_params"],
                )
                if name in for_gpus and f"{name}{_SUFFIX}" not in for_gpus:
                    for_gpus.append(f"{name}{_SUFFIX}")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # The guard watches the function that the launcher calls in each process, from beginning to end: it sees an
        # exception before Lightning's own handlers, which may call collectives.
        self._launcher = guarded(self._launcher)

    def setup_environment(self) -> None:
        """Creates the process group, with the guard already on: the creation waits for all ranks, too."""
        call = self._guarded_call
        if call is None:
            super().setup_environment()
            return
        call.begin(self)
        timeout = self._timeout
        # The guard enforces the limit of each phase; a back end with a fixed timeout must not end a phase early.
        limit_s = self._limits.limit_s("init") if build.GLOO_TIMEOUT_CHANGES else self._limits.longest_s
        self._timeout = timedelta(seconds=limit_s + BACKSTOP_S)
        try:
            with call.tracker.action("init_process_group"), call.recorder():
                super().setup_environment()
        finally:
            self._timeout = timeout
        call.connect(self)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; the barrier's name, which Lightning gives but does not use, shows the purpose."""
        self._ending.check()
        name = args[0] if args else kwargs.get("name")
        call = self._guarded_call
        with call.tracker.action(f"barrier:{name or ''}") if call else nullcontext():
            super().barrier(*args, **kwargs)
        # An abort may have ended the wait.
        self._ending.check()
        # Trainer._run_stage calls this barrier once everything is set up.
        if call is not None and name == "run-stage":
            call.set_up()
        if call is not None and name == "Trainer.save_checkpoint":
            call.saved()

    @property
    def checkpoint_io(self) -> Any:
        """The plugin that writes checkpoints; Lightning's own is made to write to a temporary name, and then rename."""
        outer: Any = super().checkpoint_io
        inner = outer
        # AsyncCheckpointIO and others wrap another plugin, which writes in a thread of theirs.
        while (wrapped := getattr(inner, "checkpoint_io", None)) is not None:
            inner = wrapped
        if type(inner) in known("TorchCheckpointIO"):
            for name, act in (("save_checkpoint", _save_whole), ("remove_checkpoint", _remove)):
                vars(inner)[name] = partial(act, inner, self._ending)
        return outer

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's hook for every checkpoint, of the Trainer, ModelCheckpoint and OnExceptionCheckpoint.

        Raises:
            CollectiveTimeoutError: The run is being ended, even if that began during the save.
        """
        self._ending.check()
        if self._guarded_call is not None:
            self._guarded_call.saves(args[1] if len(args) > 1 else kwargs.get("filepath"))
        super().save_checkpoint(*args, **kwargs)
        self._ending.check()

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's hook with which ModelCheckpoint removes older checkpoints."""
        self._ending.check()
        super().remove_checkpoint(*args, **kwargs)

    def lightning_module_state_dict(self) -> Any:
        """Lightning's hook for the model state to save; strategies that shard the model call collectives in it."""
        self._ending.check()
        return super().lightning_module_state_dict()

    def optimizer_state(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for the state of an optimizer to save."""
        self._ending.check()
        return super().optimizer_state(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each step of an optimizer."""
        self._ending.check()
        call = self._guarded_call
        if call is None:
            return super().optimizer_step(*args, **kwargs)
        call.step_begins()
        output = super().optimizer_step(*args, **kwargs)
        call.stepped(args[0] if args else kwargs.get("optimizer"))
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each batch of training."""
        self._ending.check()
        return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each backward pass; records which batches had none."""
        self._ending.check()
        call = self._guarded_call
        if call is None:
            return super().backward(*args, **kwargs)
        # DDP's own flag; strategies that shard the model have none.
        is_reduced = getattr(self.model, "require_backward_grad_sync", True)
        loss = args[0] if args else kwargs.get("closure_loss")
        call.steps.backward(loss, is_reduced=is_reduced)
        try:
            output = super().backward(*args, **kwargs)
            call.steps.passed()
            return output
        except Exception as error:
            # With manual optimization, no action of Lightning's shows the exception.
            call.raised(error, "backward")
            raise

    def process_dataloader(self, dataloader: object) -> object:
        """Lightning's hook for each loader, before its workers start; ranks compare their loaders."""
        dataloader = super().process_dataloader(dataloader)
        return self._guarded_call.features.prepared(dataloader) if self._guarded_call is not None else dataloader

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each batch of validation; on SIGTERM, ranks may stop here, as in the two below."""
        self._before_evaluation_batch()
        if self._guarded_call is not None:
            self._guarded_call.steps.validates()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each batch of testing."""
        self._before_evaluation_batch()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's hook for each batch of prediction."""
        self._before_evaluation_batch()
        return super().predict_step(*args, **kwargs)

    def _before_evaluation_batch(self) -> None:
        self._ending.check()
        if self._guarded_call is not None:
            self._guarded_call.features.before_evaluation_batch()

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's hook for an exception that ends a call of the Trainer, above the last of our frames."""
        drop_passing_frames(exception)
        # The callbacks' hooks have run before this one.
        self._allow_saving()
        super().on_exception(exception)

    def _allow_saving(self) -> None:
        while self._refused:
            self._refused.pop().remove()

    def __repr__(self) -> str:
        # The only method that a Trainer of Lightning's other package calls, in its error about an unknown strategy.
        refuse_other_caller(self, sys._getframe(1).f_globals.get("__name__", ""))
        return super().__repr__()

    def __getstate__(self) -> dict[str, Any]:
        """Without the guard, which belongs to this process: a Trainer may be copied or sent away while it runs."""
        return {name: value for name, value in super().__getstate__().items() if name != "_guarded_call"}

    @contextmanager
    def watch(self, trainer: Any) -> Iterator[None]:
        """Watches one call of ``fit``, ``validate``, ``test`` or ``predict`` in this process."""
        self._ending.note_thread()
        # If a callback raises in its on_exception, that of the strategy is not called.
        self._allow_saving()
        call = self._guarded_call = self._make_call(GuardedCall, trainer)
        try:
            yield
        except BaseException as error:
            replacement = call.failed(error)
            if call.leaves_others(error):
                self._refused = refuse_saving(trainer, self.global_rank, self._ending)
            drop_passing_frames(error)
            if replacement is not None:
                raise replacement from error
            raise
        else:
            call.finish()
        finally:
            self._guarded_call = None
            call.close()
            self._watch_saves(trainer)

    def _watch_saves(self, trainer: Any) -> None:
        """From now on, a call of ``save_checkpoint`` outside of those is watched, too: it needs all ranks as well."""
        if self.world_size > 1 and "save_checkpoint" not in vars(trainer):
            WrappedMethod(trainer, "save_checkpoint", partial(self._save, trainer))

    def _save(self, trainer: Any, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        is_guarded = self._guarded_call is not None or self._ending.is_closed or not distributed_is_initialized()
        with nullcontext() if is_guarded else self._watch_save(trainer):
            save(*args, **kwargs)

    @contextmanager
    def _watch_save(self, trainer: Any) -> Iterator[None]:
        self._ending.note_thread()
        call = self._guarded_call = self._make_call(GuardedSave, trainer)
        call.begin(self)
        try:
            yield
        except BaseException as error:
            replacement = call.failed(error)
            drop_passing_frames(error)
            if replacement is not None:
                raise replacement from error
            raise
        finally:
            self._guarded_call = None
            call.close()

    def _make_call(self, kind: type[Call], trainer: Any) -> Call:
        package = package_of(type(self))
        return kind(
            trainer,
            self._limits,
            self._report_dir,
            ending=self._ending,
            combined=lightnings(package, "CombinedLoader"),
            sigterm_error=None if self._sigterm_broadcast else lightnings(package, "SIGTERMException"),
            weights=super().lightning_module_state_dict,
        )


def timer_of(strategy: object) -> AttachedTimer | None:
    """The timer of the call that a strategy is in; None if collectives are not timed."""
    call = strategy._guarded_call if isinstance(strategy, GuardedStrategy) else None
    return call.features.timer if call is not None else None


def guards(strategy: object) -> bool:
    """Whether a strategy is one of this package."""
    return isinstance(strategy, GuardedStrategy)
