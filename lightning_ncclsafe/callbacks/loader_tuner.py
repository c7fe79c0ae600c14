"""The callback that gives loaders more workers where that pays."""

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.settings import TunerSettings
from lightning_ncclsafe.strategies.guarded import guards


class LoaderTunerHooks:
    """Gives dataloaders more workers where that makes training faster, and takes back what would kill the host.

    Training begins with what the user has set. From the start, and the same in every run, there are no more batches
    ahead than half of the free memory, /dev/shm and open files have room for, and no more than four workers for each
    core of the rank's share. In a run that is not seeded, where whole epochs have shown that waiting for data costs
    more than workers would, more of them are tried for one epoch (or for two minutes of a longer one). They stay if it
    was faster, all that starting them costs included, and are never tried again if it was not. All ranks have the same.
    The loader objects themselves are not changed, nor is the order of samples.

    A seed is a promise: random augmentation depends on which worker makes a batch. Where the run is seeded
    (``seed_everything``, ``torch.manual_seed``), or the loader, its sampler or its dataset has a random generator,
    nothing is changed from timing, and one line says what would be gained.

    Changed are loaders of map-style datasets in a ``torch.utils.data.DataLoader`` whose workers do not persist; others
    are left as they are, and advised on.

    Args:
        apply: False only advises: one line for each loader for which more workers would pay.
        apply_to_iterables: Whether loaders of iterable datasets are set, too; by default they are advised on. How many
            batches such a dataset gives may depend on its workers. All ranks have the same in each epoch.
        apply_to_seeded: Whether more workers are tried in seeded runs, too. Two runs of one seed may differ then.

    Raises:
        ValueError: When a Trainer has two of these callbacks.
        TypeError: When a Trainer is run with a strategy that does not tune.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[LoaderTuner()])
    """

    def __init__(self, *, apply: bool = True, apply_to_iterables: bool = False, apply_to_seeded: bool = False) -> None:
        self.settings = TunerSettings(
            apply=apply, apply_to_iterables=apply_to_iterables, apply_to_seeded=apply_to_seeded
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy is one that tunes, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(LoaderTunerHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                f"LoaderTuner needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
