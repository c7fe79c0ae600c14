"""Lightning's strategies with the guard plugged in."""

from typing import Any

from lightning_ncclsafe._lightning import DDPStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning_ncclsafe.guarded_strategy import GuardedStrategy


class SafeDDP(GuardedStrategy, DDPStrategy):
    """:class:`~lightning.pytorch.strategies.DDPStrategy` that says why ranks wait, and ends a run that cannot go on.

    Ranks that disagree about their data do not start; see :class:`~lightning_ncclsafe.DatasetAgreement`. Takes the
    arguments of :class:`~lightning_ncclsafe.guarded_strategy.GuardedStrategy`, and all of ``DDPStrategy``.

    Example::

        trainer = L.Trainer(devices=4, strategy=SafeDDP(timeout=timedelta(minutes=10)))
    """


class SafeFSDP(GuardedStrategy, FSDPStrategy):
    """:class:`~lightning.pytorch.strategies.FSDPStrategy` with the same guard as :class:`SafeDDP`.

    Takes the arguments of :class:`~lightning_ncclsafe.guarded_strategy.GuardedStrategy`, and all of ``FSDPStrategy``.

    Example::

        trainer = L.Trainer(accelerator="gpu", devices=8, strategy=SafeFSDP(state_dict_type="sharded"))
    """

    forward_communicates = True

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``"fsdp_ncclsafe"`` and ``"fsdp_cpu_offload_ncclsafe"``."""
        super().register_strategies(strategy_registry)
        # Lightning says of these, as soon as there is a Trainer, that they need a GPU.
        known = FSDPStrategy._registered_strategies
        known.extend(
            name for name, entry in strategy_registry.items() if entry["strategy"] is cls and name not in known
        )


class SafeModelParallel(GuardedStrategy, ModelParallelStrategy):
    """:class:`~lightning.pytorch.strategies.ModelParallelStrategy` with the same guard as :class:`SafeDDP`.

    For FSDP2 and tensor parallelism. Tensor-parallel peers, ranks of one data-parallel rank, have to read the same
    data, which is checked before they do. Takes the arguments of
    :class:`~lightning_ncclsafe.guarded_strategy.GuardedStrategy`, and all of ``ModelParallelStrategy``.

    Example::

        trainer = L.Trainer(devices=8, strategy=SafeModelParallel(data_parallel_size=4, tensor_parallel_size=2))
    """

    forward_communicates = True


# Lightning has no entry point for strategies: a name exists once somebody has registered it.
for _strategy in (SafeDDP, SafeFSDP):
    _strategy.register_strategies(StrategyRegistry)
