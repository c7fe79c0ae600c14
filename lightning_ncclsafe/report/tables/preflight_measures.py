"""What was measured on the hosts of a job, as ranges over the ranks."""

from collections.abc import Callable, Iterator

from lightning_ncclsafe.facts import DirectoryFacts, PreflightFacts
from lightning_ncclsafe.rules.kit.hosts import Checked, in_flight_bytes, tried
from lightning_ncclsafe.rules.kit.wording import ranks_words, size_words

Words = Callable[[float], str]


def _size(value: float) -> str:
    return size_words(int(value))


def _count(value: float) -> str:
    return f"{int(value):,}"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms"


def _share(value: float) -> str:
    return f"{value:.0%}"


_MEASURED: dict[str, tuple[Callable[[PreflightFacts], float | None], Words]] = {
    "memory available": (lambda facts: facts.capacity.memory_available_bytes, _size),
    "memory used by the control group": (lambda facts: facts.capacity.memory_used_bytes, _size),
    "memory the process may allocate": (lambda facts: facts.capacity.process_limit_bytes, _size),
    "free in /dev/shm": (lambda facts: facts.capacity.shm_free_bytes, _size),
    "batches in flight": (lambda facts: in_flight_bytes(facts) or None, _size),
    "model, gradients and optimizer": (lambda facts: facts.load.replica_bytes, _size),
    "swap in use": (lambda facts: facts.swap.used_bytes, _size),
    "swapped out": (lambda facts: facts.swap.swapped_out_bytes, _size),
    "swapped in": (lambda facts: facts.swap.swapped_in_bytes, _size),
    "stalled by memory": (lambda facts: facts.swap.memory_stalled, _share),
    "stalled by storage": (lambda facts: facts.swap.io_stalled, _share),
    "waited for a core": (lambda facts: facts.swap.cpu_waited, _share),
    "free on the GPU": (lambda facts: facts.gpu.free_bytes if facts.gpu is not None else None, _size),
    "open files now": (lambda facts: facts.open_files, _count),
    "clock ahead of rank 0's": (lambda facts: facts.clock_offset_s, _milliseconds),
    "the check took": (lambda facts: facts.took_s, _milliseconds),
}
_TRIED: dict[str, tuple[Callable[[DirectoryFacts], float | None], Words]] = {
    "append": (lambda one: one.append_s, _milliseconds),
    "slowest append": (lambda one: one.append_worst_s, _milliseconds),
    "fsync": (lambda one: one.fsync_s, _milliseconds),
    "read": (lambda one: one.read_s, _milliseconds),
    "free": (lambda one: one.free_bytes, _size),
    "files to be made": (lambda one: one.free_inodes, _count),
}


def measured(view: Checked) -> Iterator[tuple[str, str]]:
    """What was measured, by the names of the questions: ``"1.2 GB (rank 3) to 4.0 GB (rank 0)"``."""
    for name, (ask, words) in _MEASURED.items():
        yield from _ranged(name, {rank: ask(facts) for rank, facts in view.facts.items()}, words)
    for directory in tried(view):
        one = next(iter(directory.values()))
        for name, (of, words) in _TRIED.items():
            found = {rank: of(facts) for rank, facts in directory.items()}
            yield from _ranged(f"{name}, {one.role} at {one.path}", found, words)


def _ranged(name: str, found: dict[int, float | None], words: Words) -> Iterator[tuple[str, str]]:
    values = {rank: value for rank, value in found.items() if value is not None}
    if not values:
        return
    low, high = min(values, key=lambda rank: values[rank]), max(values, key=lambda rank: values[rank])
    least, most = words(values[low]), words(values[high])
    alike = f"{least} on {ranks_words(values)}"
    yield name, alike if least == most else f"{least} (rank {low}) to {most} (rank {high})"
