"""Short hashes that say whether two ranks have the same data, without a random number, an iteration or a change."""

import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple

from lightning_ncclsafe.probes.data.arrays import is_array
from lightning_ncclsafe.probes.data.dataset_chain import chain, hugging_face, is_iterable
from lightning_ncclsafe.probes.data.in_memory import values_digests
from lightning_ncclsafe.probes.data.items import ItemsTakeTooLongError, item_fingerprints
from lightning_ncclsafe.probes.data.plain_values import SAMPLE, ValueDigest, base_name, is_counter
from lightning_ncclsafe.probes.data.reading import Reader, stored
from lightning_ncclsafe.probes.data.sampling import batches_as_bytes, digest, numbers_as_bytes, pick, positions

_FILE_LISTS = ("samples", "imgs", "files", "urls", "paths", "filenames", "image_files")
# A name takes as long as so many numbers: 4,096 names are hashed whole.
_NAME_WIDTH = 16
_READING = "Reading samples for a fingerprint"


class Fingerprints(NamedTuple):
    """Hashes by kind, as ``LoaderFacts.fingerprints`` has them, and a sentence about each that could not be made."""

    found: dict[str, str]
    problems: tuple[str, ...]


def fingerprints(dataset: Any, *, content: str, batches: Any = None, items: bool = True) -> Fingerprints:
    """The hashes that can be had of a dataset. Equal data give equal hashes in every process, on every host.

    Args:
        dataset: The dataset, or whatever a loader that is no ``DataLoader`` is.
        content: ``"sample"`` looks at some of what is long; ``"full"`` at all indices and names, at more values, and
            reads a few samples, see :func:`~lightning_ncclsafe.probes.data.items.item_fingerprints`; ``"off"`` at
            nothing.
        batches: A batch sampler or sampler that is a plain list.
        items: Whether ``content="full"`` may index the dataset.
    """
    if content == "off":
        return Fingerprints({}, ())
    reader = Reader()
    datasets = reader.attempt("Reading the dataset", lambda: chain(dataset)) or []
    kinds: dict[str, Callable[[], str | None]] = {
        "indices": lambda: _of_all(datasets, lambda one: _indices(one, content)),
        "files": lambda: _of_all(datasets, lambda one: _files(one, content)),
        "paths": lambda: _of_all(datasets, lambda one: _paths(one, content)),
        "batches": lambda: None if batches is None else digest(batches_as_bytes(batches, content)),
    }
    found = {kind: reader.attempt(f'The fingerprint "{kind}"', make) for kind, make in kinds.items()}
    found |= reader.attempt('The fingerprint "values"', lambda: values_digests(datasets, content)) or {}
    if content == "full" and items:
        found |= reader.attempt(_READING, lambda: _items(dataset, reader)) or {}
    return Fingerprints({kind: text for kind, text in found.items() if text}, tuple(reader.problems))


def digest_of_batch(batch: Any) -> int:
    """A hash of a batch as a positive number of 63 bits; 0 for a batch that holds something unknown.

    So it is for one that holds nothing but a few whole numbers: where a loader counts steps and samples are drawn
    elsewhere, these are the same on all ranks.
    """
    # Batches are compared to find those that are the same, and files of one name in two folders are not.
    hashed = ValueDigest(SAMPLE, whole_paths=True)
    try:
        if is_counter(batch):
            return 0
        hashed.value(batch)
    except Exception:
        return 0
    return int(hashed.hexdigest(), 16) >> 1


def file_names(dataset: Any) -> Any:
    """The dataset's own list of files, with or without classes; None where it has none."""
    for name in _FILE_LISTS:
        names = stored(dataset, name)
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
    is_table = hugging_face(dataset) == "Dataset"
    indices = stored(dataset, "_indices" if is_table else "indices")
    if is_table and indices is not None:
        # An Arrow table of one column, whose elements are not Python's numbers.
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
    """The last parts of the files' names, with what is listed beside them."""
    entries = _picked_files(dataset, content)
    return _as_bytes(dataset, [(base_name(os.fsdecode(_file_of(one))), *_classes(one)) for one in entries])


def _paths(dataset: Any, content: str) -> bytes | None:
    """The files' whole names; None where these do not say by themselves which files of this host they are."""
    paths = [os.fsdecode(_file_of(one)).partition("?")[0] for one in _picked_files(dataset, content)]
    return _as_bytes(dataset, paths) if all(os.path.isabs(path) or "://" in path for path in paths) else None


def _picked_files(dataset: Any, content: str) -> list[Any]:
    """Entries of the dataset's list of files; none where it has no such list, or one with other things in it."""
    names = file_names(dataset)
    entries = [] if names is None else pick(names, content, width=_NAME_WIDTH)
    return entries if all(map(_is_file, entries)) else []


def _as_bytes(dataset: Any, told: list[Any]) -> bytes | None:
    return repr((len(file_names(dataset)), told)).encode("utf-8", "surrogatepass") if told else None


def _is_file(entry: Any) -> bool:
    first = entry[0] if type(entry) in (list, tuple) and entry else entry
    return isinstance(first, (str, os.PathLike))


def _file_of(entry: Any) -> Any:
    return entry[0] if type(entry) in (list, tuple) else entry


def _classes(entry: Any) -> tuple[str, ...]:
    """What is listed with a file: its class, or the name of another file, such as that of its mask."""
    beside = entry[1:] if type(entry) in (list, tuple) else ()
    return tuple(base_name(str(part)) for part in beside if isinstance(part, (str, int)))


def _items(dataset: Any, reader: Reader) -> dict[str, str]:
    length = None if is_iterable(dataset) else reader.length(dataset, "dataset")
    try:
        return item_fingerprints(dataset, length) if length else {}
    except ItemsTakeTooLongError as error:
        reader.problems.append(f"{_READING} was given up: {error}")
        return {}
