"""The callback that fits loader workers to the host and to the step."""

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.guarded_strategy import guards
from lightning_ncclsafe.settings import TunerSettings


class LoaderTunerHooks:
    """Sets ``num_workers`` and ``prefetch_factor`` of the dataloaders to what the host has and the training needs.

    Every rank's loaders together get at most its share of the host's cores (its affinity mask divided among the ranks
    that share each core, and what quotas of control groups leave) and half of its share of the memory and of /dev/shm
    that are free. Within that they get what it takes to stay ahead of the step: found from the first batches of
    training, with one worker, then corrected while training goes on. Order and coverage of samples stay what they are.
    All ranks get the same. The loader objects themselves are not changed.

    Resized are map-style datasets in a ``torch.utils.data.DataLoader``; a subclass with an ``__iter__`` of its own and
    other iterables are left as they are, and advised on. Random augmentations depend on which worker makes a batch, and
    so on the number of workers, as ever.

    Args:
        apply: False only advises: one line for each loader, once it has been measured.
        apply_to_iterables: Whether loaders of iterable datasets are set, too; by default they are advised on. How many
            batches such a dataset gives may depend on its workers. Then they are set at the beginning of an epoch, of
            the same one on all ranks.

    Raises:
        ValueError: When a Trainer has two of these callbacks.
        TypeError: When a Trainer is run with a strategy that does not tune.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[LoaderTuner()])
    """

    def __init__(self, *, apply: bool = True, apply_to_iterables: bool = False) -> None:
        self.settings = TunerSettings(apply=apply, apply_to_iterables=apply_to_iterables)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy is one that tunes, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(LoaderTunerHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                f"LoaderTuner was given to a Trainer with {type(trainer.strategy).__name__}, which tunes nothing; "
                "use a strategy of lightning_ncclsafe: Trainer(strategy=SafeDDP(), ...)."
            )
