"""Everything in this package, for programs that import Lightning as ``lightning``.

The same classes as in ``lightning_ncclsafe.pytorch_lightning``, for a Trainer of ``lightning.pytorch``.
"""

from collections.abc import Collection

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_ncclsafe.callbacks.collective_timer import CollectiveTimerHooks
from lightning_ncclsafe.callbacks.declared import (
    DatasetAgreementHooks,
    HostPreflightHooks,
    JustInTimeCheckpointHooks,
    LoaderTunerHooks,
)
from lightning_ncclsafe.callbacks.logger_offload import LoggerOffloadHooks
from lightning_ncclsafe.callbacks.recommended import recommended
from lightning_ncclsafe.errors import CollectiveTimeoutError as CollectiveTimeoutError
from lightning_ncclsafe.errors import DatasetMismatchError as DatasetMismatchError
from lightning_ncclsafe.errors import HostPreflightError as HostPreflightError
from lightning_ncclsafe.errors import PlannedStopError as PlannedStopError
from lightning_ncclsafe.errors import UnevenDataError as UnevenDataError
from lightning_ncclsafe.probes.trainer.actions import pause as pause
from lightning_ncclsafe.settings import PhaseTimeouts as PhaseTimeouts
from lightning_ncclsafe.strategies.guarded import GuardedStrategy


class SafeDDP(GuardedStrategy, DDPStrategy):
    """:class:`~lightning.pytorch.strategies.DDPStrategy` that explains why ranks wait, and ends a run that is stuck.

    Refuses to start if ranks disagree about their data; see :class:`~lightning_ncclsafe.DatasetAgreement`. Takes the
    arguments of :class:`~lightning_ncclsafe.strategies.guarded.GuardedStrategy` and all arguments of ``DDPStrategy``.

    Example::

        trainer = Trainer(devices=4, strategy=SafeDDP(timeout=timedelta(minutes=10)))
    """


class SafeFSDP(GuardedStrategy, FSDPStrategy):
    """:class:`~lightning.pytorch.strategies.FSDPStrategy` with the same guard as :class:`SafeDDP`.

    Takes the arguments of :class:`~lightning_ncclsafe.strategies.guarded.GuardedStrategy` and all arguments of
    ``FSDPStrategy``.

    Example::

        trainer = Trainer(accelerator="gpu", devices=8, strategy=SafeFSDP(state_dict_type="sharded"))
    """

    forward_communicates = True


class SafeModelParallel(GuardedStrategy, ModelParallelStrategy):
    """:class:`~lightning.pytorch.strategies.ModelParallelStrategy` with the same guard as :class:`SafeDDP`.

    For FSDP2 and tensor parallelism. Checks before training that tensor-parallel peers, the ranks of one data-parallel
    rank, read the same data. Takes the arguments of
    :class:`~lightning_ncclsafe.strategies.guarded.GuardedStrategy` and all arguments of ``ModelParallelStrategy``.

    Example::

        trainer = Trainer(devices=8, strategy=SafeModelParallel(data_parallel_size=4, tensor_parallel_size=2))
    """

    forward_communicates = True


# Arguments and hooks are those of the first base.
class HostPreflight(HostPreflightHooks, Callback):
    __doc__ = HostPreflightHooks.__doc__


class DatasetAgreement(DatasetAgreementHooks, Callback):
    __doc__ = DatasetAgreementHooks.__doc__


class LoaderTuner(LoaderTunerHooks, Callback):
    __doc__ = LoaderTunerHooks.__doc__


class LoggerOffload(LoggerOffloadHooks, Callback):
    __doc__ = LoggerOffloadHooks.__doc__


class CollectiveTimer(CollectiveTimerHooks, Callback):
    __doc__ = CollectiveTimerHooks.__doc__


class JustInTimeCheckpoint(JustInTimeCheckpointHooks, Callback):
    __doc__ = JustInTimeCheckpointHooks.__doc__


_RECOMMENDED: tuple[type[Callback], ...] = (
    HostPreflight,
    DatasetAgreement,
    LoaderTuner,
    LoggerOffload,
    CollectiveTimer,
)


def safe_callbacks(*own: Callback, without: Collection[type[Callback]] = ()) -> list[Callback]:
    """Returns new instances of the callbacks that are recommended with a strategy of this package.

    These are, in this order: :class:`HostPreflight`, :class:`DatasetAgreement`, :class:`LoaderTuner`,
    :class:`LoggerOffload` and :class:`CollectiveTimer`, each with its defaults, except for
    ``DatasetAgreement(on_mismatch="raise_on_hang")``: as with the strategy alone, different content is a warning, and
    only what would hang is refused. Pass ``DatasetAgreement()`` yourself to refuse different content, too.

    Args:
        *own: Your own callbacks. One of a recommended class, or of a subclass of it, replaces the recommended one; all
            others follow, in the given order.
        without: Recommended classes to leave out; none by default.

    Raises:
        TypeError: If one of ``own`` is not a callback, or ``without`` is not a list.
        ValueError: If ``without`` has a class that is not recommended or is also in ``own``, or if ``own`` has two
            callbacks of one recommended class.

    Example::

        callbacks = safe_callbacks(CollectiveTimer(trace=False), ModelCheckpoint(), without=[LoaderTuner])
        trainer = Trainer(strategy=SafeDDP(), callbacks=callbacks)
    """
    return recommended(_RECOMMENDED, Callback, own, without)


# Lightning has no entry point for strategies: a name must be registered before it is used.
for _strategy in (SafeDDP, SafeFSDP):
    _strategy.register_strategies(StrategyRegistry)
