"""The facts of a rank's dataloaders, which ranks compare before they are used."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFacts:
    """What decides which samples a rank reads, and in which order: a sampler or a batch sampler.

    Attributes:
        name: Class name.
        replicas: Number of ranks among which it splits the data; None if it does not split.
        rank: The share of this rank, from 0; None if it does not split.
        seed: Its seed; None if it has none.
        epoch: The epoch that it was set to; None if it has none.
        shuffle: Whether it shuffles; None if unknown.
        drop_last: Whether it drops the tail that does not divide evenly among ranks; None if unknown.
        order: The order of one that does not split: ``"sequential"``, the same on every rank that calls
            it; ``"random"``, drawn from torch's global random state; ``"listed"``, its batches are a list that is made
            beforehand and part of the fingerprints; ``""`` if unknown, as for the user's own classes, and samplers with
            a generator of their own, with weights or with indices.
    """

    name: str
    replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    order: str = ""


@dataclass(frozen=True, slots=True)
class RoundedArray:
    """An array of floating-point numbers that are not all whole, as far as it is hashed.

    Attributes:
        numbers: Some of its numbers, and sums of all of them that depend on their order, in units of how far numbers of
            their columns are apart; and these units.
        bounds: How much each of these may differ between arrays that differ by rounding only.
    """

    numbers: tuple[float, ...]
    bounds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedValues:
    """What shows whether the values of two ranks are the same but for rounding, where their fingerprints differ.

    PyTorch rounds a sum by the number of threads. With Lightning's own launcher, rank 0 has more threads than the ranks
    that it starts, when the script makes its data.

    Attributes:
        rest: Hash of all else, and of the arrays' shapes.
        arrays: The arrays, in the order of the datasets.
    """

    rest: str
    arrays: tuple[RoundedArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """One dataloader.

    Attributes:
        name: Its name in Lightning: ``"train_dataloader"``, or ``"val_dataloader[1]"`` if there are several.
        loader: Class name of the loader itself.
        dataset: Class name of the dataset.
        datasets: Class names of the dataset and of those that it wraps, through ``Subset``, ``ConcatDataset``, …, from
            the outside in.
        iterable: Whether the dataset is an ``IterableDataset``, or the loader any other iterable.
        num_workers: Worker processes of this loader.
        made_by_workers: Whether these alone make the batches, and nothing in the rank's own process decides their
            content: an ``IterableDataset`` in a ``DataLoader`` that does not override iteration.
        prefetch_factor: Batches each worker prefetches; None without workers.
        length: ``len(loader)``; None if the loader has no length.
        no_length_at: ``"file:line in __len__"`` of the user's line that raised where there is none; empty if that is
            PyTorch's.
        batches: Number of batches after ``limit_*_batches``; None if the loader has no length.
        samples: ``len(dataset)``; None if the dataset has no length.
        batch_size: Samples in a batch; None if the user's own batch sampler decides.
        drop_last: Whether an incomplete last batch is dropped; None if unknown.
        sampler: What decides which samples are read; None for iterable data.
        shards: Files or shards that the dataset reads; None if unknown.
        fingerprints: Short hashes of the data, by kind: ``"indices"`` (of Subsets and Hugging Face selections),
            ``"files"`` (the last part of each file's name, and classes), ``"paths"`` (whole absolute names),
            ``"batches"`` (a list of batches), ``"values"`` (data in memory), ``"names"`` (the same if it contains
            absolute paths, of which only the last part counts), ``"counts"`` (the same if it is a list of whole
            numbers, which may only count steps), ``"shapes"`` (types, keys and shapes of samples), ``"items"`` (samples
            as the dataset returns them). Only what is available without drawing a random number, iterating, or changing
            anything. If a sampler splits the data, all but ``"paths"`` must be equal; each host or rank may keep its
            copy elsewhere. Two ranks read the same if ``"indices"``, ``"batches"`` or ``"values"`` are equal, or
            ``"paths"`` between ranks of one host; never because of ``"files"``, ``"names"`` or ``"counts"``, which
            shards of different data may share.
        rounded: What shows whether its ``"values"`` are those of another rank but for rounding; None if they have no
            arrays of floating-point numbers, or more than eight.
        all_alike: Whether all its samples, in memory, are the same, as in synthetic data: then equal data on several
            ranks means nothing.
        problems: What could not be determined, one sentence each.
        read: Batches that this rank had read when the data of some rank ended; None before that.
        ended: Whether it was this rank's data that ended.
    """

    name: str = ""
    loader: str = ""
    dataset: str = ""
    datasets: tuple[str, ...] = ()
    iterable: bool = False
    num_workers: int = 0
    made_by_workers: bool = False
    prefetch_factor: int | None = None
    length: int | None = None
    no_length_at: str = ""
    batches: int | None = None
    samples: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    sampler: SamplerFacts | None = None
    shards: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    rounded: RoundedValues | None = None
    all_alike: bool = False
    problems: tuple[str, ...] = ()
    read: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """A global random number generator right after the loaders were created.

    Attributes:
        name: ``"python"`` (the module ``random``), ``"numpy"`` (``np.random``) or ``"torch"`` (its CPU generator).
        digest: Short hash of its state.
        drawn: Whether a number has been drawn from it since it was seeded.
    """

    name: str
    digest: str
    drawn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The loaders of one stage on one rank.

    Attributes:
        stage: Lightning's name of the hook that returned them: ``"train_dataloader"``, ``"val_dataloader"``,
            ``"test_dataloader"`` or ``"predict_dataloader"``.
        loaders: The loaders in the order in which Lightning flattens lists, dicts and ``CombinedLoader``.
        mode: How Lightning combines them: ``"max_size_cycle"``, ``"sequential"``, …
        settings: The Trainer's settings that decide how many steps, validations and collectives it makes, by name, as
            they are written: ``{"limit_train_batches": "1.0", "num_sanity_val_steps": "2"}``.
        val_check_batch: Number of training batches after which validation starts; None if that is not known
            beforehand. Only for the stage ``"train_dataloader"``.
        data_rank: The share of the data that this rank reads, from 0: its rank among the data-parallel ranks.
        data_ranks: Number of data-parallel ranks.
        random: The global random number generators.
        forward_communicates: Whether a forward pass needs other ranks: the model is split among them, or DDP sends its
            buffers (those of a BatchNorm) before each.
        on_mismatch: The user's setting, see ``DatasetAgreement``.
        content: The user's setting.
        on_uneven: The user's setting.
    """

    stage: str
    loaders: tuple[LoaderFacts, ...] = ()
    mode: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    val_check_batch: int | None = None
    data_rank: int = 0
    data_ranks: int = 1
    random: tuple[RandomState, ...] = ()
    forward_communicates: bool = False
    on_mismatch: str = "raise"
    content: str = "sample"
    on_uneven: str = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """How an epoch of one loader ends; ranks agree on it.

    Attributes:
        votes: Whether ranks vote before each batch on whether all of them have one: its length is unknown, or an
            ``IterableDataset`` claims different ones. An equal claim is believed, as Lightning does.
        looks_ahead: Whether they vote one batch ahead: on every rank, worker processes alone make the batches. A batch
            that the rank's own process helps to make may depend on what has been trained when it is fetched.
        ends_independently: Whether ranks that have called no collective meanwhile may end at different batches, as in
            an evaluation.
        hides_length: Whether the loader reports no length from now on, as ranks would report different ones.
        length: The number of batches on every rank from now on; None for the loader's own length.
        ends_at: The batch before which it ends in an error on all ranks, as the shortest has no more; None for none.
        lengths: Its length on each rank, by rank, if it ends in an error.
    """

    votes: bool = False
    looks_ahead: bool = False
    ends_independently: bool = False
    hides_length: bool = False
    length: int | None = None
    ends_at: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        """Whether the loader is left unchanged."""
        return self == EpochEnd()
