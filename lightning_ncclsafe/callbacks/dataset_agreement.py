"""The callback that says what ranks do about their data."""

from lightning_ncclsafe._lightning import LightningModule, Trainer, refuse_other_trainer, refuse_second
from lightning_ncclsafe.settings import AgreementSettings, Content, OnMismatch, OnUneven
from lightning_ncclsafe.strategies.guarded import guards


class DatasetAgreementHooks:
    """Says how ranks compare their data before training starts, and what happens where it ends unevenly.

    With any strategy of this package the loaders of every stage are compared across ranks without it, too, with
    ``on_mismatch="raise_on_hang"`` and the other defaults below: what stock Lightning would train on, if on other data
    than was meant, is a warning then. This callback, given by name, refuses it.

    Args:
        on_mismatch: ``"raise"``: where ranks disagree about their data, all of them raise
            :class:`~lightning_ncclsafe.DatasetMismatchError` before their workers start. ``"raise_on_hang"``: they do
            so only where ranks would wait for one another for ever: different numbers of batches or of loaders, a
            length that only some of them know, validation after different batches. Content that differs (each rank
            has other data, or the same share) is printed once for each stage, with the table, and training goes on.
            ``"warn"``: the former are printed, too, and only what cannot be gone on with (different numbers of
            loaders) raises all the same.
        content: How much of the data's content is compared. ``"sample"``: up to 65,536 indices and 4,096 file
            names in full, 1,024 of longer lists, and some rows of what is in memory. ``"full"``: all indices and file
            names, and up to 8 samples as the dataset gives them, each read twice; one that is different the second
            time is taken for randomly augmented. ``"off"``: only sizes and settings.
        on_uneven: What happens where the data of one rank ends before that of another. ``"raise"``: all ranks raise
            :class:`~lightning_ncclsafe.UnevenDataError` at the first end. ``"stop_together"``: the epoch ends for all
            ranks with the shortest; no batch is trained on by only some of them. ``"repeat"``: ranks whose data has
            ended start over until the longest has ended. Where all ranks know their lengths beforehand, unequal ones
            are a mismatch with ``"raise"``, and one common length otherwise. Ranks predict each for itself.

    Raises:
        ValueError: If an argument is not one of these words, or when a Trainer has two of these callbacks.
        TypeError: When a Trainer is run with a strategy that compares nothing.

    Example::

        trainer = L.Trainer(strategy=SafeDDP(), callbacks=[DatasetAgreement(on_uneven="stop_together")])
    """

    def __init__(
        self, *, on_mismatch: OnMismatch = "raise", content: Content = "sample", on_uneven: OnUneven = "raise"
    ) -> None:
        self.settings = AgreementSettings(on_mismatch=on_mismatch, content=content, on_uneven=on_uneven)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the strategy is one that compares, and that this callback is the only one of its class."""
        refuse_other_trainer(self, trainer)
        refuse_second(DatasetAgreementHooks, trainer)
        if not guards(trainer.strategy):
            raise TypeError(
                f"DatasetAgreement needs a strategy of lightning_ncclsafe, but this Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=SafeDDP(), ...)."
            )
