"""The callback that configures what ranks do about their data."""

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.callbacks.batch_hooks import without_batch_hooks
from lightning_ncclsafe.settings import AgreementSettings, Content, OnMismatch, OnUneven
from lightning_ncclsafe.strategies.guarded import guards


@without_batch_hooks
class DatasetAgreementHooks:
    """Configures how ranks compare their data before training starts, and what happens if it ends unevenly.

    Every strategy of this package compares the loaders of every stage across ranks. Without this callback, it uses
    ``on_mismatch="raise_on_hang"`` and the other defaults below: unequal data on which stock Lightning trains is only a
    warning. This callback, with its defaults, refuses such data.

    Args:
        on_mismatch: ``"raise"``: if ranks disagree about their data, all of them raise
            :class:`~lightning_ncclsafe.DatasetMismatchError` before their workers start. ``"raise_on_hang"``: they
            raise only if they would wait for each other forever: different numbers of batches or of loaders, a length
            that only some of them know, validation after different batches. Different content (each rank has other
            data, or the same share) is printed once for each stage, with the table, and training continues.
            ``"warn"``: the former are printed, too, and only different numbers of loaders still raise, because
            training cannot continue with them.
        content: How much of the data's content is compared. ``"sample"``: up to 65,536 indices and 4,096 file
            names in full, 1,024 of longer lists, and some rows of what is in memory. ``"full"``: all indices and file
            names, and up to 8 samples of the dataset, each read twice; one that differs the second time counts as
            randomly augmented. ``"off"``: only sizes and settings.
        on_uneven: What happens if the data of one rank ends before that of another. ``"raise"``: all ranks raise
            :class:`~lightning_ncclsafe.UnevenDataError` at the first end. ``"stop_together"``: the epoch ends for all
            ranks with the shortest; no batch is trained on by only some of them. ``"repeat"``: ranks whose data has
            ended start over until the longest has ended. If all ranks know their lengths in advance, unequal lengths
            are a mismatch with ``"raise"``, and are made equal otherwise. In ``predict``, ranks are independent.

    Raises:
        ValueError: If an argument is not one of these words, or if a Trainer has two of these callbacks.
        TypeError: If the Trainer's strategy has no guard.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[DatasetAgreement(on_uneven="stop_together")])
    """

    def __init__(
        self, *, on_mismatch: OnMismatch = "raise", content: Content = "sample", on_uneven: OnUneven = "raise"
    ) -> None:
        self.settings = AgreementSettings(on_mismatch=on_mismatch, content=content, on_uneven=on_uneven)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy has the guard, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(DatasetAgreementHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                "DatasetAgreement needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
