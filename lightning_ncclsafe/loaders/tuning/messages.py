"""What ranks tell each other about their loaders, over the exchange."""

from dataclasses import dataclass

from lightning_ncclsafe.loaders.tuning.measures import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank has last measured of one loader.

    Attributes:
        loader: Name of the loader: ``"train_dataloader"``, ``"val_dataloader[1]"``.
        number: Counts the windows of this loader on this rank, from 1.
        measures: What was measured.
        frozen: Whether the loader takes no settings on this rank any more.
    """

    loader: str
    number: int
    measures: Measures
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllMeasured:
    """What one rank publishes.

    Attributes:
        loaders: The last of each of its loaders.
    """

    loaders: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all ranks set one loader to.

    Attributes:
        loader: Name of the loader.
        workers: ``num_workers``.
        prefetch: ``prefetch_factor``; 0 without workers.
    """

    loader: str
    workers: int
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What rank 0 publishes.

    Attributes:
        settings: Those of all loaders.
        settled: Whether nothing is being tried.
    """

    settings: tuple[Setting, ...] = ()
    settled: bool = False
