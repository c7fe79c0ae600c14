"""The callback that checks hosts before training starts."""

from pathlib import Path

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.settings import OnProblem, PreflightSettings
from lightning_ncclsafe.strategies.guarded import guards


@without_batch_hooks
class HostPreflightHooks:
    """Checks every rank's host before the first step, within 3 s, and compares the results across ranks.

    It checks cores against workers and threads, memory, swap, /dev/shm, open files, GPUs, versions, settings of NCCL
    and torch, the network interface, the directories of logs and checkpoints, and the hosts' clocks. It prints only
    problems and unwanted differences, each with its remedy. ``ncclsafe preflight`` does the same from the shell.

    Args:
        on_problem: ``"raise"``: a problem that would make the run fail raises
            :class:`~lightning_ncclsafe.HostPreflightError` on all ranks. ``"warn"``: it is printed, and training
            starts.
        data_dir: The directory that data is read from, to be tested, too.

    Raises:
        ValueError: If ``on_problem`` is neither, or if a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[HostPreflight(on_problem="raise")])
    """

    def __init__(self, *, on_problem: OnProblem = "warn", data_dir: str | Path | None = None) -> None:
        self.settings = PreflightSettings(
            on_problem=on_problem, data_dir=str(data_dir) if data_dir is not None else None
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy has the guard, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(HostPreflightHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                "HostPreflight needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
