"""Which loaders can have other workers than the user's, and why others cannot.

Forked processes share the offset of an open file, and have none of the threads of the process they are forked from: the
first mixes up samples, the second waits forever. Neither raises anything, so the dataset is searched for such objects.
"""

import io
import multiprocessing
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.pool import Pool
from typing import Any

from lightning_ncclsafe._torch import loading
from lightning_ncclsafe.loaders import iteration

# Lightning's seed_everything sets it, also for processes that it starts.
_SEED = "PL_GLOBAL_SEED"

# A user with this many workers shows that several processes can use the dataset.
_SEVERAL = 2

# A few milliseconds at most, at about 2 µs an object.
MOST_OBJECTS = 2000
MOST_LEVELS = 5

# Items of one container that are looked at: most lists of a dataset hold one kind of thing.
_MOST_ITEMS = 64

# Datasets that only wrap others, in any number: torch's Subset and ConcatDataset, for instance.
_CHAINED = ("dataset", "datasets")
_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.TextIOWrapper)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore)
_ITEMED: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_ATOMS = (str, bytes, bytearray, int, float, complex, range, type, types.ModuleType, types.FunctionType, type(None))

# Python renews their locks in a forked process.
_SAFE_MODULES = frozenset({"logging", "numpy", "weakref"})

# Every worker has a copy and draws the same numbers from it.
_GENERATORS = frozenset(
    {("numpy", "Generator"), ("numpy", "RandomState"), ("random", "Random"), ("torch", "Generator")}
)

Check = Callable[[Any], bool]
What = Callable[[Any], str | None]


def _always(_: Any) -> bool:
    return True


def _has(name: str, value: Any) -> Check:
    return lambda found: bool(_attributes(found).get(name) is value)


# By top-level module and name of a class or one of its bases: what it is, and whether an object still is one.
_KINDS: dict[tuple[str, str], tuple[str, Check]] = {
    ("h5py", "File"): ("an open HDF5 file", bool),
    ("h5py", "Group"): ("an open HDF5 file", bool),
    ("h5py", "Dataset"): ("an open HDF5 file", bool),
    ("sqlite3", "Connection"): ("a database connection", _always),
    ("sqlite3", "Cursor"): ("a database connection", _always),
    ("zipfile", "ZipFile"): ("an open zip file", lambda found: _attributes(found).get("fp") is not None),
    ("tarfile", "TarFile"): ("an open tar file", _has("closed", False)),
    ("lmdb", "Environment"): ("an open LMDB environment", _always),
    ("builtins", "Environment"): ("an open LMDB environment", _always),  # as lmdb's C extension names it
    ("socket", "socket"): ("a socket", _has("_closed", False)),
    ("pyarrow", "NativeFile"): ("an open Arrow file", lambda found: not found.closed),
    ("pyarrow", "ParquetFile"): ("an open Parquet file", _always),
    ("subprocess", "Popen"): ("a subprocess", _has("returncode", None)),
    ("queue", "Queue"): ("a thread queue", _always),
    ("_queue", "SimpleQueue"): ("a thread queue", _always),
    ("torch", "Tensor"): ("a CUDA tensor", lambda found: _module(type(found)) == "torch" and bool(found.is_cuda)),
}


def is_resizable(loader: Any) -> bool:
    """Whether the workers of a ``DataLoader`` can be changed while it is read."""
    # The number of batches of an iterable dataset depends on the number of workers.
    if loading.has_iterable_dataset(loader):
        return False
    return all(method.__module__ == iteration.__name__ for method in loading.iterates_its_own_way(loader))


def is_safe(loader: Any) -> bool:
    """Whether other workers than the user's neither lose nor mix up samples of a ``DataLoader``."""
    # A state_dict counts batches that are drawn ahead.
    is_stateful = any(callable(getattr(type(part), "state_dict", None)) for part in parts_of(loader))
    return not is_stateful and not unforkable_dataset(loader)


def unforkable_dataset(loader: Any) -> str:
    """Why more processes cannot read the dataset of a ``DataLoader``; empty if they can, or do already."""
    what = unforkable(loader.dataset) if loader.num_workers < _SEVERAL and forks(loader) else ""
    return what and f"{what}, which several processes cannot use at once"


def parts_of(loader: Any) -> list[Any]:
    """A loader and its samplers, however they are wrapped: Lightning wraps them for several ranks."""
    parts = [loader]
    for part in parts:
        own = (getattr(part, "__dict__", {}).get(name) for name in ("batch_sampler", "sampler", "_sampler"))
        parts.extend(each for each in own if each is not None and all(each is not known for known in parts))
    return parts


def is_seeded(loader: Any) -> bool:
    """Whether a loader's batches depend on a seed: that of the run, or of a generator that the user gave it."""
    own = (getattr(part, "__dict__", {}).get("generator") for part in parts_of(loader))
    return _SEED in os.environ or loading.is_seeded() or any(generator is not None for generator in own)


def forks(loader: Any) -> bool:
    """Whether the workers of a ``DataLoader`` are forked; others take seconds to start, and copy everything.

    This does not fix the default start method, as Python does when it is asked for it.
    """
    context = loader.multiprocessing_context
    if context is not None:
        return bool(context.get_start_method() == "fork")
    method = multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


def unforkable(dataset: Any) -> str:
    """What a dataset holds that several processes cannot use at once; empty if nothing is found.

    Looks at attributes, 5 levels deep, and at items of containers, about 2,000 objects in all. None of the user's
    code is called.
    """
    with suppress(Exception):  # what cannot be looked at shows nothing
        return next(_found(dataset, _what), "")
    return ""


def holds_generator(dataset: Any) -> bool:
    """Whether a dataset holds a random generator, of which each worker process would have a copy."""
    with suppress(Exception):
        return any(_found(dataset, _generator))
    return False


def _found(dataset: Any, what_of: What) -> Iterator[str]:
    seen = {id(dataset)}
    ahead: deque[tuple[Any, str, int]] = deque([(dataset, type(dataset).__name__, 0)])
    looked_at = 0
    while ahead and looked_at < MOST_OBJECTS:
        holder, path, level = ahead.popleft()
        for name, value in _parts(holder):
            looked_at += 1
            if issubclass(type(value), _ATOMS) or id(value) in seen:
                continue
            seen.add(id(value))
            what = what_of(value)
            if what:
                yield f"its dataset holds {what} ({path}{name})"
            deeper = level + (name.startswith(".") and name[1:] not in _CHAINED)
            if what is None and deeper < MOST_LEVELS and _module(type(value)) not in _SAFE_MODULES:
                ahead.append((value, path + name, deeper))


def _parts(holder: Any) -> Iterable[tuple[str, Any]]:
    """What an object holds, each with its path from there."""
    if issubclass(type(holder), dict):
        # Not by a method that a subclass may override; the same below.
        pairs = islice(dict.items(holder), _MOST_ITEMS)
        return ((f"[{repr(key) if type(key) in (str, int) else '…'}]", value) for key, value in pairs)
    if issubclass(type(holder), types.MethodType):
        return ((".__self__", holder.__self__),)
    kind = next((kind for kind in _ITEMED if issubclass(type(holder), kind)), None)
    items: Iterable[Any] = () if kind is None else islice(kind.__iter__(holder), _MOST_ITEMS)
    return chain(
        ((f"[{index}]", value) for index, value in enumerate(items)),
        ((f".{name}", value) for name, value in _attributes(holder).items()),
    )


def _attributes(holder: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with suppress(AttributeError):
        found.update(object.__getattribute__(holder, "__dict__"))
    for kind in type(holder).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if issubclass(type(slot), types.MemberDescriptorType):
                with suppress(AttributeError):  # it is not set
                    found[name] = slot.__get__(holder)
    return found


def _what(value: Any) -> str | None:
    """What the object is; empty if it does no harm, or no longer does; None if that depends on its content."""
    # Not isinstance(), here and elsewhere, which asks the object for its __class__.
    if issubclass(type(value), _FILES):
        return "an open file" if _is_open(value) else ""
    if issubclass(type(value), _LOCKS):
        return "a thread lock"
    if issubclass(type(value), threading.Thread):
        return "a thread" if threading.Thread.is_alive(value) else ""
    if issubclass(type(value), (Executor, Pool)):
        return "" if _attributes(value).get("_shutdown") is True else "a pool of threads or processes"
    for kind in type(value).__mro__:
        what, check = _KINDS.get((_module(kind), kind.__name__), ("", _always))
        if what:
            return what if check(value) else ""
    return None


def _generator(value: Any) -> str | None:
    kinds = {(_module(kind), kind.__name__) for kind in type(value).__mro__}
    return "a random generator" if kinds & _GENERATORS else None


def _is_open(file: Any) -> bool:
    with suppress(Exception):  # a file in memory has no number
        is_shared_anyway = any(file is stream for stream in (sys.stdin, sys.stdout, sys.stderr))
        return not file.closed and file.fileno() >= 0 and not is_shared_anyway
    return False


def _module(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]
