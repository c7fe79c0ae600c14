"""The callback that gives loaders more workers if that pays off."""

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.settings import TunerSettings
from lightning_ncclsafe.strategies.guarded import guards


@without_batch_hooks
class LoaderTunerHooks:
    """Gives dataloaders more workers if that makes training faster, and limits settings that would exhaust the host.

    Training begins with your own setting. From the start, and the same in every run, prefetched batches take at most
    half of the free memory, /dev/shm and open files, and there are at most four workers per core of the rank's share.
    In a run that is not seeded, if whole epochs show that waiting for data costs more than workers would, more
    workers are tried for one epoch (or for two minutes of a longer one). They stay if that epoch was faster, including
    the time to start them; otherwise they are never tried again. All ranks have the same number. The loader objects and
    the order of samples do not change.

    A seed is a promise: random augmentation depends on which worker makes a batch. If the run is seeded
    (``seed_everything``, ``torch.manual_seed``), or the loader, its sampler or its dataset has a random generator,
    measurements of time change nothing, and one line says what could be gained.

    Only loaders of map-style datasets in a ``torch.utils.data.DataLoader`` without persistent workers are changed;
    others are left alone and get advice.

    Args:
        apply: False changes nothing, and prints one line of advice for each loader that would profit from more workers.
        apply_to_iterables: Whether loaders of iterable datasets are changed, too; by default they get advice. The
            number of batches of such a dataset may depend on its workers. All ranks have the same number in each epoch.
        apply_to_seeded: Whether more workers are tried in seeded runs, too. Two runs with one seed may then differ.

    Raises:
        ValueError: If a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[LoaderTuner()])
    """

    def __init__(self, *, apply: bool = True, apply_to_iterables: bool = False, apply_to_seeded: bool = False) -> None:
        self.settings = TunerSettings(
            apply=apply, apply_to_iterables=apply_to_iterables, apply_to_seeded=apply_to_seeded
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy has the guard, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(LoaderTunerHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                "LoaderTuner needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
