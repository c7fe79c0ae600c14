"""Everything of this package for programs that import ``pytorch_lightning``: one of its two names.

The same classes as in ``lightning_ncclsafe.lightning``, for a Trainer of ``pytorch_lightning``.
"""

from collections.abc import Collection

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_ncclsafe.callbacks.collective_timer import CollectiveTimerHooks
from lightning_ncclsafe.callbacks.dataset_agreement import DatasetAgreementHooks
from lightning_ncclsafe.callbacks.host_preflight import HostPreflightHooks
from lightning_ncclsafe.callbacks.just_in_time_checkpoint import JustInTimeCheckpointHooks
from lightning_ncclsafe.callbacks.loader_tuner import LoaderTunerHooks
from lightning_ncclsafe.callbacks.logger_offload import LoggerOffloadHooks
from lightning_ncclsafe.callbacks.recommended import recommended
from lightning_ncclsafe.errors import CollectiveTimeoutError as CollectiveTimeoutError
from lightning_ncclsafe.errors import DatasetMismatchError as DatasetMismatchError
from lightning_ncclsafe.errors import HostPreflightError as HostPreflightError
from lightning_ncclsafe.errors import PlannedStopError as PlannedStopError
from lightning_ncclsafe.errors import UnevenDataError as UnevenDataError
from lightning_ncclsafe.guard.pause import pause as pause
from lightning_ncclsafe.guard.phase_timeouts import PhaseTimeouts as PhaseTimeouts
from lightning_ncclsafe.strategies.guarded import GuardedStrategy


class SafeDDP(GuardedStrategy, DDPStrategy):
    """:class:`~pytorch_lightning.strategies.DDPStrategy` that says why ranks wait, and ends a run that cannot go on.

    Ranks that disagree about their data do not start; see :class:`~lightning_ncclsafe.DatasetAgreement`. Takes the
    arguments of :class:`~lightning_ncclsafe.strategies.guarded.GuardedStrategy`, and all of ``DDPStrategy``.

    Example::

        trainer = Trainer(devices=4, strategy=SafeDDP(timeout=timedelta(minutes=10)))
    """


class SafeFSDP(GuardedStrategy, FSDPStrategy):
    """:class:`~pytorch_lightning.strategies.FSDPStrategy` with the same guard as :class:`SafeDDP`.

    Takes the arguments of :class:`~lightning_ncclsafe.strategies.guarded.GuardedStrategy`, and all of ``FSDPStrategy``.

    Example::

        trainer = Trainer(accelerator="gpu", devices=8, strategy=SafeFSDP(state_dict_type="sharded"))
    """

    forward_communicates = True


class SafeModelParallel(GuardedStrategy, ModelParallelStrategy):
    """:class:`~pytorch_lightning.strategies.ModelParallelStrategy` with the same guard as :class:`SafeDDP`.

    For FSDP2 and tensor parallelism. Tensor-parallel peers, ranks of one data-parallel rank, have to read the same
    data, which is checked before they do. Takes the arguments of
    :class:`~lightning_ncclsafe.strategies.guarded.GuardedStrategy`, and all of ``ModelParallelStrategy``.

    Example::

        trainer = Trainer(devices=8, strategy=SafeModelParallel(data_parallel_size=4, tensor_parallel_size=2))
    """

    forward_communicates = True


# The callbacks say what they do and take in the classes that they are derived from.
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
    """The callbacks that are recommended with a strategy of this package, new ones at each call.

    Those are, in this order: :class:`HostPreflight`, :class:`DatasetAgreement`, :class:`LoaderTuner`,
    :class:`LoggerOffload` and :class:`CollectiveTimer`, each with its defaults, but for
    ``DatasetAgreement(on_mismatch="raise_on_hang")``: as with the strategy alone, data that differs in content is a
    warning, and only what would hang is refused. Give ``DatasetAgreement()`` yourself to have the former refused, too.

    Args:
        *own: Callbacks of your own. One of a recommended class, or of a class derived from it, takes that one's place;
            all others follow, in the order given.
        without: Recommended classes to leave out; none by default.

    Raises:
        TypeError: If one of ``own`` is no callback, or ``without`` no list.
        ValueError: If ``without`` has what is not recommended or what is given, or two of a recommended class are
            given.

    Example::

        callbacks = safe_callbacks(CollectiveTimer(trace=False), ModelCheckpoint(), without=[LoaderTuner])
        trainer = Trainer(strategy=SafeDDP(), callbacks=callbacks)
    """
    return recommended(_RECOMMENDED, Callback, own, without)


# Lightning has no entry point for strategies: a name exists once somebody has registered it.
for _strategy in (SafeDDP, SafeFSDP):
    _strategy.register_strategies(StrategyRegistry)
