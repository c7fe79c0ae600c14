"""Small builders of presented data: a job is a line of ranks, each with loaders whose data is shared or its own."""

from collections.abc import Callable
from dataclasses import replace

from incidents import before_training

from lightning_ncclsafe.facts import (
    DataFacts,
    IncidentKind,
    JobFacts,
    LoaderFacts,
    ProcessFacts,
    RandomState,
    SamplerFacts,
)

NAMES = ("python", "numpy", "torch")


def states(rank: int, *, differ: str = "python numpy", drawn: str = "") -> tuple[RandomState, ...]:
    """The generators; Python's and numpy's differ on unseeded ranks by themselves."""
    return tuple(
        RandomState(name=name, digest=f"{name}-{rank if name in differ else 'same'}", drawn=name in drawn)
        for name in NAMES
    )


def split_loader(rank: int, world: int, **more: object) -> LoaderFacts:
    """A loader whose data a DistributedSampler splits among the ranks."""
    sampler = SamplerFacts(
        name="DistributedSampler", replicas=world, rank=rank, seed=0, epoch=0, shuffle=True, drop_last=False
    )
    options: dict[str, object] = {
        "name": "train_dataloader",
        "loader": "DataLoader",
        "dataset": "Subset",
        "datasets": ("Subset", "ImageFolder"),
        "length": 20,
        "batches": 20,
        "samples": 20 * 32 * world,
        "batch_size": 32,
        "drop_last": False,
        "sampler": sampler,
        "fingerprints": {"indices": "a1b2c3d4e5f6"},
    }
    return LoaderFacts(**options | more)  # type: ignore[arg-type]


def own_loader(rank: int, world: int = 4, **more: object) -> LoaderFacts:
    """A loader of a rank's own shard."""
    sampler = SamplerFacts(name="SequentialSampler", order="sequential")
    options: dict[str, object] = {
        "sampler": sampler,
        "samples": 640,
        "fingerprints": {"files": f"files of {rank}", "values": f"values of {rank}"},
    }
    return split_loader(rank, world, **options | more)


def stream_loader(rank: int, world: int = 4, **more: object) -> LoaderFacts:
    """A loader of an IterableDataset with a length."""
    options: dict[str, object] = {
        "dataset": "Stream",
        "datasets": ("Stream",),
        "iterable": True,
        "samples": None,
        "sampler": None,
        "fingerprints": {},
        "num_workers": 2,
    }
    return split_loader(rank, world, **options | more)


def presenting(
    world: int,
    *make: Callable[[int, int], LoaderFacts],
    silent: tuple[int, ...] = (),
    witnessed: tuple[ProcessFacts, ...] = (),
    missing: tuple[str, ...] = (),
    **more: object,
) -> JobFacts:
    """A job in which every rank presents what is made for it."""

    def told(rank: int) -> dict[str, object]:
        return {"data": DataFacts(**_options(rank, world, make) | more)}  # type: ignore[arg-type]

    return before_training(IncidentKind.DATA, world, told, silent=silent, witnessed=witnessed, missing=missing)


def _options(rank: int, world: int, make: tuple[Callable[[int, int], LoaderFacts], ...]) -> dict[str, object]:
    return {
        "stage": "train_dataloader",
        "loaders": tuple(one(rank, world) for one in make or (split_loader,)),
        "mode": "max_size_cycle",
        "val_check_batch": 20,
        "data_rank": rank,
        "data_ranks": world,
        "random": states(rank),
    }


def but(job: JobFacts, change: Callable[[int, DataFacts], DataFacts], *only: int) -> JobFacts:
    """The same job with other data on some ranks, or on all."""
    ranks = tuple(
        replace(facts, data=change(facts.rank, facts.data))
        if facts.data is not None and (not only or facts.rank in only)
        else facts
        for facts in job.ranks
    )
    return replace(job, ranks=ranks)


def with_data(job: JobFacts, *only: int, **changes: object) -> JobFacts:
    """The same job with some fields of the data replaced on some ranks, or on all."""
    return but(job, lambda rank, data: replace(data, **_given(rank, changes)), *only)  # type: ignore[arg-type]


def with_loader(job: JobFacts, *only: int, index: int = 0, **changes: object) -> JobFacts:
    """The same with fields of a loader; a function gets the rank."""

    def change(rank: int, data: DataFacts) -> DataFacts:
        loader = replace(data.loaders[index], **_given(rank, changes))  # type: ignore[arg-type]
        return replace(data, loaders=(*data.loaders[:index], loader, *data.loaders[index + 1 :]))

    return but(job, change, *only)


def with_sampler(job: JobFacts, *only: int, **changes: object) -> JobFacts:
    """The same with fields of the first loader's sampler."""

    def change(rank: int, data: DataFacts) -> DataFacts:
        loader = data.loaders[0]
        assert loader.sampler is not None
        sampler = replace(loader.sampler, **_given(rank, changes))  # type: ignore[arg-type]
        return replace(data, loaders=(replace(loader, sampler=sampler), *data.loaders[1:]))

    return but(job, change, *only)


def _given(rank: int, changes: dict[str, object]) -> dict[str, object]:
    return {name: value(rank) if callable(value) else value for name, value in changes.items()}
