"""Hashes of data that lies in memory or in a table, without the transforms that a dataset applies to it."""

import copy
from collections import defaultdict
from typing import Any

from lightning_ncclsafe.probes.data.arrays import is_array
from lightning_ncclsafe.probes.data.dataset_chain import hugging_face
from lightning_ncclsafe.probes.data.plain_values import FULL, SAMPLE, Limits, UnknownValueError, ValueDigest, is_counter
from lightning_ncclsafe.probes.data.reading import stored
from lightning_ncclsafe.probes.data.sampling import digest, positions

_TABLE_ROWS = 16
# So many that are alike are no coincidence.
_COMPARED_ROWS = 64


def values_digests(datasets: list[Any], content: str) -> dict[str, str]:
    """By kind, one hash of those datasets whose values lie open: ``"values"``, ``"names"`` or ``"counts"``.

    Args:
        datasets: A dataset and those below it.
        content: See :func:`~lightning_ncclsafe.probes.data.fingerprints.fingerprints`.
    """
    known = [dataset for dataset in datasets if _is_known(dataset)]
    limits = (FULL if content == "full" else SAMPLE).shared(max(1, len(known)))
    hashes: dict[str, list[bytes]] = defaultdict(list)
    for dataset in known:
        kind, found = _digest(dataset, limits)
        hashes[kind] += [found] if found else []
    return {kind: digest(*parts) for kind, parts in hashes.items() if parts}


def all_alike(datasets: list[Any]) -> bool:
    """Whether the rows of those datasets whose values lie open are all the same, in each of them.

    Args:
        datasets: A dataset and those below it.
    """
    known = [dataset for dataset in datasets if _is_known(dataset)]
    rows = [rows for dataset in known for rows in _tensors(dataset) or (dataset,)]
    try:
        return bool(rows) and all(map(_is_uniform, rows))
    except UnknownValueError:
        return False


def _is_known(dataset: Any) -> bool:
    return type(dataset) in (list, tuple, range) or is_array(dataset) or bool(_tensors(dataset)) or _is_table(dataset)


def _digest(dataset: Any, limits: Limits) -> tuple[str, bytes]:
    """The kind and the hash of one; no hash where something in it is unknown."""
    hashed = ValueDigest(limits)
    try:
        if _is_table(dataset):
            _take_table(hashed, dataset, max(2, _TABLE_ROWS * limits.rows // SAMPLE.rows))
        for rows in () if _is_table(dataset) else _tensors(dataset) or (dataset,):
            hashed.rows(rows)
    except UnknownValueError:
        return "", b""
    if _is_counter(dataset):
        return "counts", hashed.hexdigest().encode()
    return "names" if hashed.names_files else "values", hashed.hexdigest().encode()


def _is_counter(dataset: Any) -> bool:
    """Whether a dataset is a list of numbers that may count steps; of two lists one tells something of the other."""
    rows = _tensors(dataset) or (dataset,)
    return len(rows) == 1 and is_counter(rows[0], dimensions=1)


def _is_uniform(rows: Any) -> bool:
    if _is_table(rows) or (is_array(rows) and not len(rows.shape)) or len(rows) < 2:
        return False
    digests = set()
    for position in positions(len(rows), _COMPARED_ROWS):
        hashed = ValueDigest(SAMPLE)
        hashed.value(rows[position])
        digests.add(hashed.hexdigest())
    return len(digests) == 1


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
