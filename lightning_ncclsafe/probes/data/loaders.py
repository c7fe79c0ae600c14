"""What a dataloader presents for comparison with those of the other ranks, whatever the user made it of."""

from typing import Any

from lightning_ncclsafe.facts import LoaderFacts, SamplerFacts
from lightning_ncclsafe.probes.data.dataset_chain import chain, chain_names, hugging_face, is_iterable
from lightning_ncclsafe.probes.data.fingerprints import file_names, fingerprints, is_listed
from lightning_ncclsafe.probes.data.in_memory import all_alike
from lightning_ncclsafe.probes.data.reading import Reader, class_name, whole_number
from lightning_ncclsafe.probes.data.samplers import Samplers, iterates_plainly, sampler_facts, samplers_of, split_facts

_MOST_PROBLEMS = 16


def loader_facts(loader: Any, *, name: str, limit: int | float | None, content: str) -> LoaderFacts:
    """Reads a loader. It does not raise; what could not be found out is said in ``problems``.

    Args:
        loader: A ``DataLoader``, or anything else that Lightning accepts and iterates.
        name: What to call it, see ``LoaderFacts.name``.
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
    datasets = chain(dataset)
    samplers = samplers_of(loader, reader)
    iterable = is_iterable(dataset) or (samplers.batch is None and samplers.plain is None)
    length = reader.length(loader, "loader")
    listed = samplers.decides if is_listed(samplers.decides) else None
    prints = fingerprints(dataset, content=content, batches=listed, items=not iterable)
    num_workers = reader.whole_number(loader, "num_workers", "loader") or 0
    return LoaderFacts(
        name=name,
        loader=class_name(loader),
        dataset=class_name(dataset),
        datasets=chain_names(datasets),
        iterable=iterable,
        num_workers=num_workers,
        # What picks samples of a map-style dataset does so in this process.
        made_by_workers=num_workers > 0 and is_iterable(own) and iterates_plainly(loader),
        prefetch_factor=reader.whole_number(loader, "prefetch_factor", "loader"),
        length=length,
        batches=reader.attempt("The limit of batches", lambda: limited(length, limit)),
        samples=reader.length(own, "dataset"),
        batch_size=_batch_size(loader, samplers, reader),
        drop_last=_drop_last(loader, samplers, reader),
        sampler=_sampler(dataset, iterable, samplers, reader),
        shards=_shards(datasets, reader),
        fingerprints=prints.found,
        all_alike=content != "off" and bool(reader.attempt("Comparing samples", lambda: all_alike(datasets))),
        problems=tuple(dict.fromkeys((*reader.problems, *prints.problems)))[:_MOST_PROBLEMS],
    )


def limited(length: int | None, limit: int | float | None) -> int | None:
    """Number of batches that Lightning takes of a loader.

    Args:
        length: ``len(loader)``.
        limit: See :func:`loader_facts`.
    """
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
    # Beside a batch sampler of the user's the loader's own says nothing: it is always False.
    return reader.flag(loader, "drop_last", "loader") if samplers.batch is None else None


def _sampler(dataset: Any, iterable: bool, samplers: Samplers, reader: Reader) -> SamplerFacts | None:
    return split_facts(dataset) if iterable else sampler_facts(samplers, reader)


def _shards(datasets: list[Any], reader: Reader) -> int | None:
    """Shards of the outermost dataset that counts them; otherwise files, of all that list them."""
    for dataset in datasets:
        if hugging_face(dataset) == "IterableDataset":
            for name in ("num_shards", "n_shards"):
                if (count := whole_number(reader.attribute(dataset, name, "dataset"))) is not None:
                    return count
    lists = [names for dataset in datasets if (names := file_names(dataset)) is not None]
    return sum(map(len, lists)) if lists else None
