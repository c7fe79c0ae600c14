"""The callback that has hosts looked at before training starts."""

from pathlib import Path

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.settings import OnProblem, PreflightSettings
from lightning_ncclsafe.strategies.guarded import guards


class HostPreflightHooks:
    """Looks at every rank's host before the first step, within 3 s, and compares what was found across ranks.

    Cores against workers and threads, memory, swap, /dev/shm, open files, GPUs, versions, settings of NCCL and torch,
    the network interface, the directories of logs and checkpoints, the hosts' clocks. Said is only what is bad, or
    differs between ranks where it must not, each with its remedy. ``ncclsafe preflight`` does the same from the shell.

    Args:
        on_problem: ``"raise"``: with a problem with which the run would fail, all ranks raise
            :class:`~lightning_ncclsafe.HostPreflightError`. ``"warn"``: it is printed, and training starts.
        data_dir: The directory that data is read from, to be tried out, too.

    Raises:
        ValueError: If ``on_problem`` is neither, or when a Trainer has two of these callbacks.
        TypeError: When a Trainer is run with a strategy that looks at nothing.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[HostPreflight(on_problem="raise")])
    """

    def __init__(self, *, on_problem: OnProblem = "warn", data_dir: str | Path | None = None) -> None:
        self.settings = PreflightSettings(
            on_problem=on_problem, data_dir=str(data_dir) if data_dir is not None else None
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy is one that looks, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(HostPreflightHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                f"HostPreflight needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
