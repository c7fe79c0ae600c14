"""What decides which samples a rank reads; a sampler of the user's is never iterated."""

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_ncclsafe.facts import SamplerFacts
from lightning_ncclsafe.probes.data.dataset_chain import chain, hugging_face
from lightning_ncclsafe.probes.data.fingerprints import is_listed
from lightning_ncclsafe.probes.data.reading import Reader, class_name, stored, whole_number

# Lightning's, around the batch sampler of a loader to predict with.
_WRAPPER = "_IndexBatchSamplerWrapper"


class Samplers(NamedTuple):
    """The samplers of a loader.

    Attributes:
        batch: Its batch sampler, without Lightning's wrapper.
        inner: The sampler of that.
        plain: The loader's own sampler.
    """

    batch: Any
    inner: Any
    plain: Any

    @property
    def decides(self) -> Any:
        """The one that decides, where none splits the data among ranks."""
        if self.has_torch_batches:
            return self.inner
        return self.plain if self.batch is None else self.batch

    @property
    def has_torch_batches(self) -> bool:
        """Whether the batches are made by PyTorch's own ``BatchSampler``."""
        return type(self.batch) is BatchSampler


def iterates_plainly(loader: Any) -> bool:
    """Whether a loader is iterated as PyTorch's own; a subclass may do anything around that."""
    return getattr(type(loader), "__iter__", None) is DataLoader.__iter__


def samplers_of(loader: Any, reader: Reader) -> Samplers:
    """Asks a loader for its samplers."""
    batch = reader.attribute(loader, "batch_sampler", "loader")
    if class_name(batch) == _WRAPPER:
        batch = reader.attribute(batch, "_batch_sampler", "batch_sampler")
    inner = reader.attribute(batch, "sampler", "batch_sampler")
    return Samplers(batch, inner, reader.attribute(loader, "sampler", "loader"))


def sampler_facts(samplers: Samplers, reader: Reader) -> SamplerFacts | None:
    """The sampler that splits the data among ranks, or else the one that decides which samples are read."""
    asked = [_facts(sampler, reader) for sampler in samplers if sampler is not None]
    splits = (facts for facts in asked if facts.replicas is not None)
    decides = samplers.decides
    return next(splits, None if decides is None else _facts(decides, reader))


def split_facts(dataset: Any) -> SamplerFacts | None:
    """How Hugging Face's ``split_dataset_by_node`` has split a dataset that is iterated; None where it has not."""
    for one in chain(dataset):
        split = stored(one, "_distributed") if hugging_face(one) == "IterableDataset" else None
        replicas = whole_number(getattr(split, "world_size", None))
        rank = whole_number(getattr(split, "rank", None))
        if replicas is not None and rank is not None:
            return SamplerFacts(name="split_dataset_by_node", replicas=replicas, rank=rank)
    return None


def _facts(sampler: Any, reader: Reader) -> SamplerFacts:
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
        # Of one that does not split it is about the last batch.
        drop_last=reader.flag(sampler, "drop_last", "sampler") if splits else None,
        order=_order(sampler),
    )


def _order(sampler: Any) -> str:
    if is_listed(sampler):
        return "listed"
    if type(sampler) is RandomSampler:
        # With a generator of its own torch's random state does not tell the order. Of PyTorch's others neither indices
        # nor weights are compared.
        return "random" if sampler.generator is None else ""
    return "sequential" if type(sampler) is SequentialSampler else ""
