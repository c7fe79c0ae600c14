"""Hashes of data that lies in memory or in a table, without the transforms that a dataset applies to it."""

import copy
from typing import Any

from lightning_ncclsafe.probes.arrays import is_array
from lightning_ncclsafe.probes.dataset_chain import hugging_face
from lightning_ncclsafe.probes.plain_values import FULL, SAMPLE, Limits, UnknownValueError, ValueDigest
from lightning_ncclsafe.probes.reading import stored
from lightning_ncclsafe.probes.sampling import digest, positions

_TABLE_ROWS = 16


def values_digest(datasets: list[Any], content: str) -> str | None:
    """One hash of those datasets whose values lie open; None where none does.

    Args:
        datasets: A dataset and those below it.
        content: See :func:`~lightning_ncclsafe.probes.fingerprints.fingerprints`.
    """
    known = [dataset for dataset in datasets if _is_known(dataset)]
    limits = (FULL if content == "full" else SAMPLE).shared(max(1, len(known)))
    hashes = [found for dataset in known if (found := _digest(dataset, limits))]
    return digest(*hashes) if hashes else None


def _is_known(dataset: Any) -> bool:
    return type(dataset) in (list, tuple, range) or is_array(dataset) or bool(_tensors(dataset)) or _is_table(dataset)


def _digest(dataset: Any, limits: Limits) -> bytes:
    hashed = ValueDigest(limits)
    try:
        if _is_table(dataset):
            _take_table(hashed, dataset, max(2, _TABLE_ROWS * limits.rows // SAMPLE.rows))
        for rows in () if _is_table(dataset) else _tensors(dataset) or (dataset,):
            hashed.rows(rows)
    except UnknownValueError:
        return b""
    return hashed.hexdigest().encode()


def _is_table(dataset: Any) -> bool:
    return hugging_face(dataset) == "Dataset"


def _tensors(dataset: Any) -> tuple[Any, ...]:
    """Those of a ``TensorDataset``."""
    tensors = stored(dataset, "tensors")
    return tensors if type(tensors) is tuple and all(map(is_array, tensors)) else ()


def _take_table(hashed: ValueDigest, dataset: Any, most: int) -> None:
    # A copy that shares the table: with_format() would copy the user's transform too, with all that it holds.
    plain = copy.copy(dataset)
    plain.set_format("arrow")
    hashed.value(list(plain.column_names))
    hashed.value(int(plain.num_rows))
    if plain.num_rows:
        hashed.value(plain[positions(plain.num_rows, most)].to_pydict())
