"""What one rank presents about its dataloaders before they are used."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFacts:
    """What decides which samples a rank reads, and in which order: a sampler or a batch sampler.

    Attributes:
        name: Class name.
        replicas: Among how many ranks it splits the data; None where it does not split.
        rank: Which share it gives to this rank, from 0; None where it does not split.
        seed: Its seed; None where it has none.
        epoch: The epoch that it was set to; None where it has none.
        shuffle: Whether it shuffles; None where it does not say.
        drop_last: Whether it drops the tail that does not divide evenly among ranks; None where it does not say.
        order: How one that does not split goes through the data: ``"sequential"``, the same on every rank that calls
            it; ``"random"``, drawn from torch's global random state; ``"listed"``, its batches are a list that is made
            beforehand and part of the fingerprints; ``""`` where that is not known, as of classes of the user's own,
            of those with a generator of their own, and of those with weights or indices.
    """

    name: str
    replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    order: str = ""


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
        batches: Number of batches after ``limit_*_batches``; None if the loader has no length.
        samples: ``len(dataset)``; None if the dataset has no length.
        batch_size: Samples in a batch; None if the user's own batch sampler decides.
        drop_last: Whether an incomplete last batch is dropped; None if the loader does not tell.
        sampler: What decides which samples are read; None for iterable data.
        shards: Files or shards that the dataset reads; None if it does not tell.
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
    batches: int | None = None
    samples: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    sampler: SamplerFacts | None = None
    shards: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    all_alike: bool = False
    problems: tuple[str, ...] = ()
    read: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """A global random number generator at the moment when the loaders had been made.

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
    """The loaders of one stage, as one rank presents them.

    Attributes:
        stage: Lightning's name of the hook that gave them: ``"train_dataloader"``, ``"val_dataloader"``,
            ``"test_dataloader"`` or ``"predict_dataloader"``.
        loaders: The loaders in the order in which Lightning flattens lists, dicts and ``CombinedLoader``.
        mode: How Lightning combines them: ``"max_size_cycle"``, ``"sequential"``, …
        val_check_batch: Number of training batches after which validation starts; None where that is not known
            beforehand. Of the stage ``"train_dataloader"`` only.
        data_rank: Which share of the data this rank is to read, from 0: its rank among the data-parallel ranks.
        data_ranks: Number of data-parallel ranks.
        random: The global random number generators.
        forward_communicates: Whether ranks need one another for a forward pass, as the model is split among them, or
            DDP sends its buffers (those of a BatchNorm) before each.
        on_mismatch: What the user has set, see ``DatasetAgreement``.
        content: What the user has set.
        on_uneven: What the user has set.
    """

    stage: str
    loaders: tuple[LoaderFacts, ...] = ()
    mode: str = ""
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
    """How an epoch of one loader ends, as ranks have agreed.

    Attributes:
        votes: Whether ranks vote before each batch on whether all of them have one: its length is not known, or an
            ``IterableDataset`` claims different ones. An equal claim is believed, as Lightning believes it.
        looks_ahead: Whether they vote one batch ahead, as on every rank worker processes alone make the batches. What a
            rank's own process takes part in may depend on what has been trained when it is fetched.
        ends_independently: Whether ranks that have called no collective meanwhile may end at different batches, as in
            an evaluation.
        hides_length: Whether the loader claims no length from now on, as ranks would not claim the same.
        length: The number of batches it has on every rank from now on; None for as many as it says itself.
        ends_at: The batch before which it ends in an error on all ranks, as the shortest has no more; None for none.
        lengths: Its length on each rank, by rank, where it ends in an error.
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
        """Whether the loader stays as it is, and costs nothing."""
        return self == EpochEnd()
