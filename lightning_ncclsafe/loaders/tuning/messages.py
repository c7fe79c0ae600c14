"""What ranks tell each other about their loaders, over the exchange."""

from dataclasses import dataclass

from lightning_ncclsafe.loaders.tuning.stretches import Moment, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank has measured of one loader.

    Attributes:
        loader: Name of the loader: ``"train_dataloader"``, ``"val_dataloader[1]"``.
        stretches: The last ones.
        frozen: Whether the loader takes no settings on this rank any more.
    """

    loader: str
    stretches: tuple[Stretch, ...] = ()
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllMeasured:
    """What one rank publishes.

    Attributes:
        loaders: Its loaders.
    """

    loaders: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Other workers, for one stretch.

    Attributes:
        number: Counts the trials of a loader.
        workers: ``num_workers``.
        epoch: The first epoch in which it may begin; see :class:`Moment`.
        part: The first part of that.
    """

    number: int
    workers: int
    epoch: int
    part: int = 0

    @property
    def moment(self) -> Moment:
        """From when on it may begin."""
        return Moment(self.epoch, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all ranks set one loader to.

    Attributes:
        loader: Name of the loader.
        users: What the user has set, as far as there is room for it.
        workers: ``num_workers``, from the next stretch on.
        trial: What is tried once; None for nothing.
    """

    loader: str
    users: int
    workers: int
    trial: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What rank 0 publishes.

    Attributes:
        settings: Those of all loaders.
        settled: Whether no loader is going to be changed.
    """

    settings: tuple[Setting, ...] = ()
    settled: bool = False
