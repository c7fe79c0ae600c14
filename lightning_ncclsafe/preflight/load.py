"""What a run is about to need from its host, for its model and its loaders, both used by duck type.

Apart from ``probe``, which imports no torch: the command measures a host without it.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning_ncclsafe._torch import build
from lightning_ncclsafe.facts import LoadFacts
from lightning_ncclsafe.probes.absent import or_none
from lightning_ncclsafe.probes.data.reading import nested_datasets

# DDP copies gradients into buckets, unless gradient_as_bucket_view is set.
_GRADIENT_COPIES = 2


def model_load(module: Any) -> LoadFacts:
    """The memory of a model as it is now; that of its optimizer is not known yet."""
    trained = or_none(lambda: _bytes(parameter for parameter in module.parameters() if parameter.requires_grad))
    whole = or_none(lambda: _bytes([*module.parameters(), *module.buffers()]))
    replica = whole + _GRADIENT_COPIES * trained if whole is not None and trained is not None else None
    return LoadFacts(
        omp_threads=or_none(build.operation_threads),
        parameter_bytes=whole,
        gradient_bytes=trained,
        replica_bytes=replica,
    )


def loaders_load(loaders: Iterable[Any]) -> LoadFacts:
    """The workers and memory of dataloaders that live at the same time.

    Args:
        loaders: ``DataLoader`` objects; other loaders are ignored.
    """
    workers, in_flight, largest_bytes = 0, 0, 0
    for loader in loaders:
        own = int(getattr(loader, "num_workers", 0) or 0)
        ahead = own * int(getattr(loader, "prefetch_factor", 0) or 0)
        workers, in_flight = workers + own, in_flight + ahead
        largest_bytes = max(largest_bytes, or_none(partial(_batch_bytes, loader)) or 0)
    return LoadFacts(loader_workers=workers, batches_in_flight=in_flight, batch_bytes=largest_bytes or None)


def _batch_bytes(loader: Any) -> int:
    """For data in memory only: other data would have to be read, in a process from which workers are still forked."""
    tensors = nested_datasets(loader.dataset)[-1].tensors
    return _bytes(tensor[:1] for tensor in tensors) * int(loader.batch_size)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
