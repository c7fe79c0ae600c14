"""The facts about a dataloader of any class and its samplers that ranks compare; a sampler is never iterated."""

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_ncclsafe.facts import LoaderFacts, SamplerFacts
from lightning_ncclsafe.probes.data.fingerprints import all_alike, file_names, fingerprints, is_listed
from lightning_ncclsafe.probes.data.reading import (
    Reader,
    class_name,
    hugging_face,
    is_iterable,
    nested_datasets,
    nested_names,
    plain_attribute,
    whole_number,
)

# Lightning's wrapper of the batch sampler in predict.
_WRAPPER = "_IndexBatchSamplerWrapper"

_MOST_PROBLEMS = 16


class Samplers(NamedTuple):
    """The samplers of a loader.

    Attributes:
        batch: Its batch sampler, without Lightning's wrapper.
        inner: The sampler of the batch sampler.
        plain: The loader's own sampler.
    """

    batch: Any
    inner: Any
    plain: Any

    @property
    def decides(self) -> Any:
        """The sampler that determines the samples, if none splits the data among ranks."""
        if self.has_torch_batches:
            return self.inner
        return self.plain if self.batch is None else self.batch

    @property
    def has_torch_batches(self) -> bool:
        """Whether PyTorch's own ``BatchSampler`` makes the batches."""
        return type(self.batch) is BatchSampler


def samplers_of(loader: Any, reader: Reader) -> Samplers:
    """The samplers of a loader."""
    batch = reader.attribute(loader, "batch_sampler", "loader")
    if class_name(batch) == _WRAPPER:
        batch = reader.attribute(batch, "_batch_sampler", "batch_sampler")
    inner = reader.attribute(batch, "sampler", "batch_sampler")
    return Samplers(batch, inner, reader.attribute(loader, "sampler", "loader"))


def sampler_facts(samplers: Samplers, reader: Reader) -> SamplerFacts | None:
    """The sampler that splits the data among ranks, or else the one that determines the samples."""
    asked = [_facts_of(sampler, reader) for sampler in samplers if sampler is not None]
    splits = (facts for facts in asked if facts.replicas is not None)
    decides = samplers.decides
    return next(splits, None if decides is None else _facts_of(decides, reader))


def split_facts(dataset: Any) -> SamplerFacts | None:
    """How Hugging Face's ``split_dataset_by_node`` has split an iterable dataset; None if it has not."""
    for one in nested_datasets(dataset):
        split = plain_attribute(one, "_distributed") if hugging_face(one) == "IterableDataset" else None
        replicas = whole_number(getattr(split, "world_size", None))
        rank = whole_number(getattr(split, "rank", None))
        if replicas is not None and rank is not None:
            return SamplerFacts(name="split_dataset_by_node", replicas=replicas, rank=rank)
    return None


def _facts_of(sampler: Any, reader: Reader) -> SamplerFacts:
    replicas = reader.whole_number(sampler, "num_replicas", "sampler")
    rank = reader.whole_number(sampler, "rank", "sampler")
    splits = replicas is not None and rank is not None
    return SamplerFacts(
        name=class_name(sampler),
        replicas=replicas if splits else None,
        rank=rank if splits else None,
        seed=reader.whole_number(sampler, "seed", "sampler"),
        epoch=reader.whole_number(sampler, "epoch", "sampler"),
        shuffle=reader.flag(sampler, "shuffle", "sampler"),
        # For a sampler that does not split the data, drop_last is about the last batch.
        drop_last=reader.flag(sampler, "drop_last", "sampler") if splits else None,
        order=_order(sampler),
    )


def _order(sampler: Any) -> str:
    if is_listed(sampler):
        return "listed"
    if type(sampler) is RandomSampler:
        # With its own generator, torch's random state does not determine the order. Indices and weights of PyTorch's
        # other samplers are not compared.
        return "random" if sampler.generator is None else ""
    return "sequential" if type(sampler) is SequentialSampler else ""


def loader_facts(loader: Any, *, name: str, limit: int | float | None, content: str) -> LoaderFacts:
    """Reads a loader. Does not raise; ``problems`` lists what could not be determined.

    Args:
        loader: A ``DataLoader``, or anything else that Lightning accepts and iterates.
        name: Its name, see ``LoaderFacts.name``.
        limit: Lightning's ``limit_train_batches`` or that of the loader's stage: an int is a number of batches, a
            float a share of them.
        content: See :func:`~lightning_ncclsafe.probes.data.fingerprints.fingerprints`.
    """
    reader = Reader()
    facts = reader.attempt("Reading the loader", lambda: _facts(loader, reader, name, limit, content))
    if facts is None:
        return LoaderFacts(name=name, loader=class_name(loader), problems=tuple(reader.problems))
    return facts


def _facts(loader: Any, reader: Reader, name: str, limit: int | float | None, content: str) -> LoaderFacts:
    own = reader.attribute(loader, "dataset", "loader")
    dataset = loader if own is None else own
    datasets = nested_datasets(dataset)
    samplers = samplers_of(loader, reader)
    iterable = is_iterable(dataset) or (samplers.batch is None and samplers.plain is None)
    length = reader.length(loader, "loader")
    listed = samplers.decides if is_listed(samplers.decides) else None
    prints = fingerprints(dataset, content=content, batches=listed, items=not iterable)
    num_workers = reader.whole_number(loader, "num_workers", "loader") or 0
    # That of a subclass may do anything.
    has_torchs_iter = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    return LoaderFacts(
        name=name,
        loader=class_name(loader),
        dataset=class_name(dataset),
        datasets=nested_names(datasets),
        iterable=iterable,
        num_workers=num_workers,
        # Samples of a map-style dataset are picked in this process.
        made_by_workers=num_workers > 0 and is_iterable(own) and has_torchs_iter,
        prefetch_factor=reader.whole_number(loader, "prefetch_factor", "loader"),
        length=length,
        no_length_at="" if length is not None else reader.no_length_at,
        batches=reader.attempt("The limit of batches", lambda: limited(length, limit)),
        samples=reader.length(own, "dataset"),
        batch_size=_batch_size(loader, samplers, reader),
        drop_last=_drop_last(loader, samplers, reader),
        sampler=split_facts(dataset) if iterable else sampler_facts(samplers, reader),
        shards=_shards(datasets, reader),
        fingerprints=prints.found,
        rounded=prints.rounded,
        all_alike=content != "off" and bool(reader.attempt("Comparing samples", lambda: all_alike(datasets))),
        problems=tuple(dict.fromkeys((*reader.problems, *prints.problems)))[:_MOST_PROBLEMS],
    )


def limited(length: int | None, limit: int | float | None) -> int | None:
    """Number of batches that Lightning takes from a loader of this length."""
    if length is None or limit is None:
        return length
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _batch_size(loader: Any, samplers: Samplers, reader: Reader) -> int | None:
    own = reader.whole_number(loader, "batch_size", "loader")
    if own is None and samplers.has_torch_batches:
        return reader.whole_number(samplers.batch, "batch_size", "batch_sampler")
    return own


def _drop_last(loader: Any, samplers: Samplers, reader: Reader) -> bool | None:
    if samplers.has_torch_batches:
        return reader.flag(samplers.batch, "drop_last", "batch_sampler")
    # With the user's own batch sampler, the loader's drop_last is always False and has no meaning.
    return reader.flag(loader, "drop_last", "loader") if samplers.batch is None else None


def _shards(datasets: list[Any], reader: Reader) -> int | None:
    """The number of shards of the outermost dataset that has one; otherwise the number of files of all datasets."""
    for dataset in datasets:
        if hugging_face(dataset) == "IterableDataset":
            for name in ("num_shards", "n_shards"):
                if (count := whole_number(reader.attribute(dataset, name, "dataset"))) is not None:
                    return count
    lists = [names for dataset in datasets if (names := file_names(dataset)) is not None]
    return sum(map(len, lists)) if lists else None
