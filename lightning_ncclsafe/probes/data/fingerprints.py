"""Short hashes that show whether two ranks have the same data, without drawing, iterating or changing anything."""

import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

from lightning_ncclsafe.facts import RoundedArray, RoundedValues
from lightning_ncclsafe.probes.data.plain_values import (
    FULL,
    SAMPLE,
    HashLimits,
    UnknownValueError,
    ValueDigest,
    base_name,
    batches_as_bytes,
    digest,
    is_array,
    is_counter,
    is_shaped,
    kind_of,
    numbers_as_bytes,
    pick,
    positions,
)
from lightning_ncclsafe.probes.data.random_state import random_states_kept, seed_all
from lightning_ncclsafe.probes.data.reading import Reader, hugging_face, is_iterable, nested_datasets, plain_attribute
from lightning_ncclsafe.probes.data.rounded_values import rounded_array

_FILE_LISTS = ("samples", "imgs", "files", "urls", "paths", "filenames", "image_files")
# Hashing a name takes as long as hashing this many numbers. Up to 4,096 names are all hashed.
_NAME_WIDTH = 16
_READING = "Reading samples for a fingerprint"

_TABLE_ROWS = 16
# This many equal rows are no coincidence.
_COMPARED_ROWS = 64

# More arrays are compared exactly: what ranks present is small.
_MOST_ARRAYS = 8
_ITEMS = 8
_DEADLINE_S = 1.0
_MOST_LEVELS = 8
_MOST_ELEMENTS = 64


class Fingerprints(NamedTuple):
    """Hashes by kind, as in ``LoaderFacts.fingerprints``, and a sentence about each that could not be made.

    Attributes:
        rounded: As in ``LoaderFacts``.
    """

    found: dict[str, str]
    problems: tuple[str, ...]
    rounded: RoundedValues | None = None


def fingerprints(dataset: Any, *, content: str, batches: Any = None, items: bool = True) -> Fingerprints:
    """All hashes that can be made of a dataset. Equal data has equal hashes in every process, on every host.

    Args:
        dataset: The dataset, or the loader itself if it is not a ``DataLoader``.
        content: ``"sample"`` hashes parts of long lists; ``"full"`` all indices and names, and more values, and reads
            a few samples, see :func:`item_fingerprints`; ``"off"`` hashes nothing.
        batches: A batch sampler or sampler that is a plain list.
        items: Whether ``content="full"`` may index the dataset.
    """
    if content == "off":
        return Fingerprints({}, ())
    reader = Reader()
    datasets = reader.attempt("Reading the dataset", lambda: nested_datasets(dataset)) or []
    kinds: dict[str, Callable[[], str | None]] = {
        "indices": lambda: _of_all(datasets, lambda one: _indices(one, content)),
        "files": lambda: _of_all(datasets, lambda one: _files(one, content)),
        "paths": lambda: _of_all(datasets, lambda one: _paths(one, content)),
        "batches": lambda: None if batches is None else digest(batches_as_bytes(batches, content)),
    }
    found = {kind: reader.attempt(f'The fingerprint "{kind}"', make) for kind, make in kinds.items()}
    hashed = reader.attempt('The fingerprint "values"', lambda: _hashed_values(datasets, content)) or []
    kinds_of_values = dict.fromkeys(one.kind for one in hashed)
    found |= {kind: digest(*(one.digest for one in hashed if one.kind == kind)) for kind in kinds_of_values}
    rounded = reader.attempt("Measuring the values", lambda: _rounded_values(hashed))
    if content == "full" and items:
        found |= reader.attempt(_READING, lambda: _items(dataset, reader)) or {}
    return Fingerprints({kind: text for kind, text in found.items() if text}, tuple(reader.problems), rounded)


def digest_of_batch(batch: Any) -> int:
    """A hash of a batch as a positive number of 63 bits; 0 for a batch with values of unknown types.

    Also 0 for a batch of a few whole numbers only: if a loader just counts steps, and samples are drawn elsewhere,
    these are the same on all ranks.
    """
    try:
        # Batches are compared to find equal ones, and files of one name in two folders are not equal.
        return 0 if is_counter(batch) else int(_hash(batch, whole_paths=True), 16) >> 1
    except Exception:
        return 0


def file_names(dataset: Any) -> Any:
    """The dataset's own list of files, with or without classes; None if it has none."""
    for name in _FILE_LISTS:
        names = plain_attribute(dataset, name)
        if isinstance(names, (str, PurePath)):
            return [names]
        if (type(names) in (list, tuple) or _is_flat_array(names)) and len(names) and _is_file(names[0]):
            return names
    return None


def is_listed(batches: Any) -> bool:
    """Whether a batch sampler or sampler is a plain list of numbers, or of lists of numbers."""
    if not _may_be_numbers(batches):
        return False
    try:
        batches_as_bytes([batches[position] for position in positions(len(batches), 64)], "sample")
    except (TypeError, OverflowError):
        return False
    return True


def _of_all(datasets: list[Any], part: Callable[[Any], bytes | None]) -> str | None:
    parts = [found for one in datasets if (found := part(one)) is not None]
    return digest(*parts) if parts else None


def _indices(dataset: Any, content: str) -> bytes | None:
    is_table = _is_table(dataset)
    indices = plain_attribute(dataset, "_indices" if is_table else "indices")
    if is_table and indices is not None:
        # An Arrow table with one column; its elements are not Python numbers.
        column = indices.column(0)
        numbers = [number if isinstance(number, int) else number.as_py() for number in pick(column, content)]
        return len(column).to_bytes(8, "little") + numbers_as_bytes(numbers, "full")
    try:
        return numbers_as_bytes(indices, content) if _may_be_numbers(indices) else None
    except (TypeError, OverflowError):
        return None


def _may_be_numbers(value: Any) -> bool:
    return type(value) in (list, tuple, range) or _is_flat_array(value)


def _is_flat_array(value: Any) -> bool:
    return is_array(value) and len(value.shape) == 1


def _files(dataset: Any, content: str) -> bytes | None:
    """The base names of the files, with what is listed beside them."""
    entries = _picked_files(dataset, content)
    return _as_bytes(dataset, [(base_name(os.fsdecode(_file_of(one))), *_classes(one)) for one in entries])


def _paths(dataset: Any, content: str) -> bytes | None:
    """The files' full names; None if these alone do not identify files of this host."""
    paths = [os.fsdecode(_file_of(one)).partition("?")[0] for one in _picked_files(dataset, content)]
    return _as_bytes(dataset, paths) if all(os.path.isabs(path) or "://" in path for path in paths) else None


def _picked_files(dataset: Any, content: str) -> list[Any]:
    """Entries of the dataset's list of files; none if it has no such list, or other entries are in it."""
    names = file_names(dataset)
    entries = [] if names is None else pick(names, content, width=_NAME_WIDTH)
    return entries if all(map(_is_file, entries)) else []


def _as_bytes(dataset: Any, entries: list[Any]) -> bytes | None:
    return repr((len(file_names(dataset)), entries)).encode("utf-8", "surrogatepass") if entries else None


def _is_file(entry: Any) -> bool:
    first = entry[0] if type(entry) in (list, tuple) and entry else entry
    return isinstance(first, (str, os.PathLike))


def _file_of(entry: Any) -> Any:
    return entry[0] if type(entry) in (list, tuple) else entry


def _classes(entry: Any) -> tuple[str, ...]:
    """What is listed with a file: its class, or the name of another file, such as its mask."""
    beside = entry[1:] if type(entry) in (list, tuple) else ()
    return tuple(base_name(str(part)) for part in beside if isinstance(part, (str, int)))


def _items(dataset: Any, reader: Reader) -> dict[str, str]:
    length = None if is_iterable(dataset) else reader.length(dataset, "dataset")
    try:
        return item_fingerprints(dataset, length) if length else {}
    except ItemsTakeTooLongError as error:
        reader.problems.append(f"{_READING} was abandoned: {error}")
        return {}


class _Hashed(NamedTuple):
    """A dataset with accessible values, how much of it is hashed, and of which kind that is."""

    dataset: Any
    limits: HashLimits
    kind: str
    digest: bytes


def _hashed_values(datasets: list[Any], content: str) -> list[_Hashed]:
    known = [dataset for dataset in datasets if _is_known(dataset)]
    limits = (FULL if content == "full" else SAMPLE).shared(max(1, len(known)))
    found = (_Hashed(dataset, limits, *_digest(dataset, limits)) for dataset in known)
    return [one for one in found if one.digest]


def _rounded_values(hashed: list[_Hashed]) -> RoundedValues | None:
    """The arrays of floating-point numbers among the values, each on its own; None if there are none."""
    arrays: list[RoundedArray] = []
    rest: list[bytes] = []
    for one in hashed:
        parts = () if one.kind != "values" or _is_table(one.dataset) else _parts(one.dataset)
        rounded = [rounded_array(part, one.limits) for part in parts]
        arrays += [array for array in rounded if array is not None]
        if not any(rounded):
            rest += [one.digest] if one.kind == "values" else []
            continue
        exact = zip(parts, rounded, strict=True)
        rest += [_hash_of(part, one.limits) if array is None else kind_of(part).encode() for part, array in exact]
    return RoundedValues(rest=digest(*rest), arrays=tuple(arrays)) if 0 < len(arrays) <= _MOST_ARRAYS else None


def _hash_of(part: Any, limits: HashLimits) -> bytes:
    hashed = ValueDigest(limits)
    hashed.rows(part)
    return hashed.hexdigest().encode()


def all_alike(datasets: list[Any]) -> bool:
    """Whether, in each dataset with accessible values, all rows are the same."""
    known = [dataset for dataset in datasets if _is_known(dataset)]
    rows = [rows for dataset in known for rows in _parts(dataset)]
    try:
        return bool(rows) and all(map(_is_uniform, rows))
    except UnknownValueError:
        return False


def _is_known(dataset: Any) -> bool:
    return type(dataset) in (list, tuple, range) or is_array(dataset) or bool(_tensors(dataset)) or _is_table(dataset)


def _digest(dataset: Any, limits: HashLimits) -> tuple[str, bytes]:
    """The kind and the hash of one dataset; no hash if it has values of unknown types."""
    hashed, parts = ValueDigest(limits), _parts(dataset)
    try:
        if _is_table(dataset):
            _take_table(hashed, dataset, max(2, _TABLE_ROWS * limits.rows // SAMPLE.rows))
        for rows in () if _is_table(dataset) else parts:
            hashed.rows(rows)
    except UnknownValueError:
        return "", b""
    # One list of numbers may just count steps.
    is_count = len(parts) == 1 and is_counter(parts[0], dimensions=1)
    kind = "counts" if is_count else "names" if hashed.names_files else "values"
    return kind, hashed.hexdigest().encode()


def _is_uniform(rows: Any) -> bool:
    if _is_table(rows) or (is_array(rows) and not len(rows.shape)) or len(rows) < 2:
        return False
    return len({_hash(rows[position]) for position in positions(len(rows), _COMPARED_ROWS)}) == 1


def _is_table(dataset: Any) -> bool:
    return hugging_face(dataset) == "Dataset"


def _tensors(dataset: Any) -> tuple[Any, ...]:
    """The tensors of a ``TensorDataset``."""
    tensors = plain_attribute(dataset, "tensors")
    return tensors if type(tensors) is tuple and all(map(is_array, tensors)) else ()


def _parts(dataset: Any) -> tuple[Any, ...]:
    """What a dataset takes its samples from: itself, or its tensors."""
    return _tensors(dataset) or (dataset,)


def _take_table(hashed: ValueDigest, dataset: Any, most: int) -> None:
    # A copy that shares the table: with_format() would also copy the user's transform, with all its data.
    plain = copy.copy(dataset)
    plain.set_format("arrow")
    hashed.value(list(plain.column_names))
    hashed.value(int(plain.num_rows))
    if plain.num_rows:
        hashed.value(plain[positions(plain.num_rows, most)].to_pydict())


class ItemsTakeTooLongError(Exception):
    """The samples could not be read within their time."""


def item_fingerprints(dataset: Any, length: int) -> dict[str, str]:
    """Hashes of up to 8 samples: ``"shapes"``, and ``"items"`` if reading them again gave the same bytes.

    The global random number generators are restored. Other side effects of ``dataset[i]`` (a file that it opens, a
    generator of its own) remain: this is only for users who asked for it.

    Raises:
        ItemsTakeTooLongError: If they cannot all be read within about a second. There is no hash of only some of
            them: another rank may get further.
        Exception: Whatever ``dataset[i]`` raises.
    """
    with random_states_kept():
        reads = list(_reads(dataset, length))
    (shapes, values), *others = [tuple(zip(*read, strict=True)) for read in zip(*reads, strict=True)]
    found = {}
    if all(other[0] == shapes for other in others):
        found["shapes"] = digest(*(shape.encode() for shape in shapes))
    if all(other[1] == values for other in others) and "" not in values:
        found["items"] = digest(*(value.encode() for value in values))
    return found


def _reads(dataset: Any, length: int) -> Iterator[list[tuple[str, str]]]:
    """Shape and hash of each sample, in each of two reads."""
    deadline = time.monotonic() + _DEADLINE_S
    for number, position in enumerate(positions(length, _ITEMS)):
        read = []
        for seed in (2 * number, 2 * number + 1):
            if time.monotonic() > deadline:
                raise ItemsTakeTooLongError(f"{number} samples were read in {_DEADLINE_S:g} s")
            # Two seeds, so that random values differ; fixed ones, so that values that happen to be equal are equal on
            # every rank.
            seed_all(seed)
            item = dataset[position]
            try:
                read.append((shape_of(item), _hash(item)))
            except UnknownValueError:
                read.append((shape_of(item), ""))
        yield read


def shape_of(value: Any, level: int = 0) -> str:
    """Types, keys, element types and shapes in a sample, as text."""
    name = type(value).__qualname__
    if is_shaped(value):
        return kind_of(value)
    if level == _MOST_LEVELS:
        return name
    if type(value) is dict:
        first = itertools.islice(value.items(), _MOST_ELEMENTS)
        pairs = sorted((f"{key!s:.80}", shape_of(item, level + 1)) for key, item in first)
        return f"{name} {len(value)} {pairs}"
    if type(value) in (list, tuple):
        return f"{name} {len(value)} {[shape_of(item, level + 1) for item in value[:_MOST_ELEMENTS]]}"
    return name


def _hash(value: Any, *, whole_paths: bool = False) -> str:
    hashed = ValueDigest(SAMPLE, whole_paths=whole_paths)
    hashed.value(value)
    return hashed.hexdigest()
