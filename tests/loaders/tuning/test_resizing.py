"""Workers are changed while a loader is read: samples, their order and the random streams are those of stock torch."""

import gc
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from operator import gt
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from children import living, pids_of_children
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from polling import until
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from lightning_ncclsafe.loaders.iteration import ReplacedIteration
from lightning_ncclsafe.loaders.tuning import measuring, worker_pool
from lightning_ncclsafe.loaders.tuning.eligibility import is_resizable, is_safe, unforkable_dataset
from lightning_ncclsafe.loaders.tuning.measuring import Interval, Measurement, Observer
from lightning_ncclsafe.loaders.tuning.resizing import ResizableLoader
from lightning_ncclsafe.loaders.tuning.worker_pool import Deadlines

EPOCHS = 2
Loader = DataLoader[Any]
Kind = Callable[..., Loader]


class Items(Dataset[int]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Items):
    """Augments: what it gives depends on the worker's random numbers."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), torch.rand(()).item()


class Failing(Items):
    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise ValueError("item 7 is bad")
        return index


class Deadly(Items):
    """Its worker is killed, as by the kernel when memory is short."""

    def __getitem__(self, index: int) -> int:
        if index == 7 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Silent(Items):
    """Its workers never answer from some item on, as those of a dataset that waits for its threads."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.since = since

    def __getitem__(self, index: int) -> int:
        if index >= self.since and get_worker_info() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()
        return index


class Opening(Items):
    """Opens its file with the first sample."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, index: int) -> int:
        self.file = self.file or open(self.path, "rb", buffering=0)  # noqa: SIM115 - for as long as it lives
        self.file.seek(index)
        return int(self.file.read(1)[0])


class Unpicklable(Items):
    def __init__(self) -> None:
        super().__init__()
        self.name = lambda: "cannot be pickled"


class Eager(Sampler[int]):
    """Draws all of its order when it is begun, from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


class BadSampler(Eager):
    def __iter__(self) -> Iterator[int]:
        yield from range(9)
        raise LookupError("no index")


def distributed(**keywords: Any) -> Loader:
    sampler = DistributedSampler(Items(), num_replicas=2, rank=1, shuffle=True)
    return DataLoader(Items(), sampler=sampler, batch_size=2, **keywords)


def by_batch(**keywords: Any) -> Loader:
    sampler = BatchSampler(RandomSampler(range(23)), batch_size=3, drop_last=False)
    return DataLoader(Items(), batch_sampler=sampler, **keywords)


def seeded(**keywords: Any) -> Loader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Items(), batch_size=2, shuffle=True, generator=generator, **keywords)


KINDS: dict[str, Kind] = {
    "in order": lambda **keywords: DataLoader(Items(), batch_size=2, **keywords),
    "shuffled": lambda **keywords: DataLoader(Items(), batch_size=2, shuffle=True, **keywords),
    "drop_last": lambda **keywords: DataLoader(Items(), batch_size=4, drop_last=True, **keywords),
    "not collated": lambda **keywords: DataLoader(Items(), batch_size=None, shuffle=True, **keywords),
    "collate_fn": lambda **keywords: DataLoader(Items(), batch_size=2, collate_fn=tuple, **keywords),
    "eager sampler": lambda **keywords: DataLoader(Items(), batch_size=None, sampler=Eager(), **keywords),
    "generator": seeded,
    "distributed": distributed,
    "batch_sampler": by_batch,
}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


class Lines(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def tuned_of(loader: Loader, workers: int, say: Callable[[str], None] = pytest.fail, **options: Any) -> ResizableLoader:
    observer = Observer(lambda _: None)
    tuned = ResizableLoader(loader, observer, user_workers=loader.num_workers, say=say, **options)
    tuned.resize(workers)
    return tuned


def read(loader: Loader, begin: Callable[[], Iterator[Any]], each: Callable[[], None] = lambda: None) -> Any:
    """All epochs, and what the global generator gives after them."""
    epochs = []
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        batches = []
        for batch in begin():
            batches.append(plain(batch))
            each()
        epochs.append(batches)
    return epochs, torch.rand(3).tolist()


def stock(kind: Kind, **keywords: Any) -> Any:
    torch.manual_seed(3)
    loader = kind(**keywords)
    return read(loader, loader.__iter__)


OTHERS: set[int] = set()
"""Processes that were there before the test: other tests' programs are started by one."""


def children(pid: int) -> list[psutil.Process]:
    """Those of a process that live and are the test's."""
    return living(pids_of_children(pid) - OTHERS)


def own_children() -> list[psutil.Process]:
    """All that live of the test, but for what multiprocessing starts once for itself."""
    return [child for child in children(os.getpid()) if not any("resource_tracker" in part for part in child.cmdline())]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test leaves a process, and none needs the garbage collector for that."""
    gc.disable()
    OTHERS.clear()
    OTHERS.update(pids_of_children(os.getpid()))
    yield
    gc.enable()
    assert own_children() == []


# With both where the order or the seed of workers is drawn from a generator that the samples may be drawn from, too.
@pytest.mark.parametrize(
    ("kind", "user_workers"),
    [
        *(
            (kind, 0)
            for kind in ("shuffled", "not collated", "eager sampler", "generator", "batch_sampler", "in order")
        ),
        *((kind, 2) for kind in ("shuffled", "eager sampler", "generator", "batch_sampler")),
        *((kind, 1) for kind in ("drop_last", "collate_fn", "distributed")),
    ],
)
def test_resizing_keeps_stock_order_and_random_streams(kind: str, user_workers: int) -> None:
    chance = random.Random(f"{kind} {user_workers}")
    expected = stock(KINDS[kind], num_workers=user_workers)
    torch.manual_seed(3)
    loader = KINDS[kind](num_workers=user_workers)
    tuned = tuned_of(loader, user_workers)
    # Three changes of all batches of both epochs: each starts processes.
    last = sum(map(len, expected[0])) - 1
    sizes = dict(zip(sorted(chance.sample(range(last), 3)), chance.sample([0, 1, 2, 3], 3), strict=True))
    steps, seen = iter(range(last + 1)), set()

    def maybe_resize() -> None:
        seen.add(tuned.workers)
        if (size := sizes.get(next(steps))) is not None:
            tuned.resize(size)

    assert read(loader, tuned.begin, maybe_resize) == expected
    assert len(seen) > 1
    assert loader.num_workers == user_workers and loader._iterator is None


@pytest.mark.parametrize("at", ["never", "in the middle", "between epochs"])
@pytest.mark.parametrize("kind", ["shuffled", "eager sampler"])
def test_persistent_workers_live_on_until_resized(kind: str, at: str) -> None:
    expected = stock(KINDS[kind], num_workers=1, persistent_workers=True)
    torch.manual_seed(3)
    loader = KINDS[kind](num_workers=1, persistent_workers=True)
    tuned = tuned_of(loader, 1)
    count, pids = 0, []

    def each() -> None:
        nonlocal count
        count += 1
        pids.append([child.pid for child in own_children()])
        if (at, count) in (("in the middle", 4), ("between epochs", len(expected[0][0]))):
            tuned.resize(2)

    assert read(loader, tuned.begin, each) == expected
    assert len({tuple(found) for found in pids}) == (1 if at == "never" else 2)
    assert len(own_children()) == (1 if at == "never" else 2)
    tuned.close()
    assert own_children() == []


def test_without_order_each_sample_comes_once() -> None:
    tuned = tuned_of(DataLoader(Items(40), batch_size=2, num_workers=2, in_order=False), 2)
    seen: list[int] = []
    for number, batch in enumerate(tuned.begin()):
        seen.extend(plain(batch))
        if number % 3 == 0:
            tuned.resize(1 + number % 2)
    assert sorted(seen) == list(range(40))


def test_without_order_only_the_failed_batch_is_read_again() -> None:
    lines = Lines()
    tuned = tuned_of(DataLoader(Deadly(), in_order=False), 2, say=lines)
    assert sorted(int(batch) for batch in tuned.begin()) == list(range(23))
    assert len(lines) == 1


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_fewer_batches_than_prefetched_are_read_completely(count: int) -> None:
    sampler = SequentialSampler(range(count))
    tuned = tuned_of(DataLoader(Items(count), sampler=sampler), 3)
    tuned.resize(2)
    assert [int(batch) for batch in tuned.begin()] == list(range(count))


@pytest.mark.parametrize("at", [0, 1, 21, 22])
def test_resizing_at_the_first_or_last_batch(at: int) -> None:
    tuned = tuned_of(DataLoader(Items()), 1)
    seen = []
    for number, batch in enumerate(tuned.begin()):
        seen.append(int(batch))
        if number == at:
            tuned.resize(2)
    assert seen == list(range(23))
    # Nothing is started for what there is nothing left of.
    assert tuned.workers == (2 if at < 20 else 1)


def test_the_last_of_two_changes_counts() -> None:
    tuned = tuned_of(DataLoader(Items()), 0)
    epoch = tuned.begin()
    next(epoch)
    tuned.resize(1)
    tuned.resize(2)
    next(epoch)
    assert tuned.workers == 2
    tuned.resize(0)
    assert tuned.workers == 2
    assert len([*epoch]) == 21
    assert tuned.workers == 0


@pytest.mark.parametrize("user_workers", [0, 2])
def test_leaving_an_epoch_early_matches_stock(user_workers: int) -> None:
    def some(begin: Callable[[], Iterator[Any]]) -> Any:
        found = []
        for most in (4, 2, 30):
            epoch = begin()
            found.append([plain(batch) for _, batch in zip(range(most), epoch, strict=False)])
        return found, torch.rand(2).tolist()

    torch.manual_seed(3)
    expected = some(KINDS["shuffled"](num_workers=user_workers).__iter__)
    torch.manual_seed(3)
    tuned = tuned_of(KINDS["shuffled"](num_workers=user_workers), 2)
    found = some(tuned.begin)
    assert found == expected
    tuned.close()


@pytest.mark.parametrize("persists", [False, True])
def test_an_epoch_continues_after_another_was_started(persists: bool) -> None:
    tuned = tuned_of(DataLoader(Items(), num_workers=1, persistent_workers=persists), 1)
    first = tuned.begin()
    seen = [int(next(first)) for _ in range(5)]
    second = tuned.begin()
    assert len(own_children()) == 1
    pairs = [(int(next(first)), int(next(second))) for _ in range(5)]
    assert pairs == [(5 + number, number) for number in range(5)]
    assert seen + [int(batch) for batch in first] == [0, 1, 2, 3, 4, *range(10, 23)]
    assert [int(batch) for batch in second] == list(range(5, 23))
    tuned.close()


@pytest.mark.parametrize("user_workers", [0, 1])
def test_two_shuffled_loaders_in_a_combined_loader_match_stock(user_workers: int) -> None:
    class Begins:
        def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
            self.begin = begin

        def __iter__(self) -> Iterator[Any]:
            return self.begin()

        def __len__(self) -> int:
            return 12

    def pairs(begins: list[Callable[[], Iterator[Any]]], each: Callable[[], None]) -> Any:
        combined = CombinedLoader({str(number): Begins(begin) for number, begin in enumerate(begins)}, "min_size")
        found = []
        for _ in range(EPOCHS):
            for batch, *_ in combined:
                found.append({name: plain(value) for name, value in batch.items()})
                each()
        combined.reset()
        return found, torch.rand(2).tolist()

    torch.manual_seed(3)
    loaders = [KINDS["shuffled"](num_workers=user_workers), by_batch(num_workers=user_workers)]
    expected = pairs([loader.__iter__ for loader in loaders], lambda: None)
    torch.manual_seed(3)
    again = [KINDS["shuffled"](num_workers=user_workers), by_batch(num_workers=user_workers)]
    # None where the user has some: the sampler's seed has to be drawn as early all the same.
    both = [tuned_of(loader, 1 - user_workers) for loader in again]
    chance = random.Random(1)
    assert pairs([tuned.begin for tuned in both], lambda: chance.choice(both).resize(chance.choice([0, 2]))) == expected


@pytest.mark.parametrize("persists", [False, True])
def test_the_users_worker_count_augments_like_stock(persists: bool) -> None:
    def kind(**keywords: Any) -> Loader:
        return DataLoader(Drawing(), batch_size=None, shuffle=True, num_workers=2, **keywords)

    expected = stock(kind, persistent_workers=persists)
    torch.manual_seed(3)
    loader = kind(persistent_workers=persists)
    tuned = tuned_of(loader, 2)
    assert read(loader, tuned.begin) == expected
    tuned.close()


def test_replacement_workers_draw_their_own_random_numbers() -> None:
    tuned = tuned_of(DataLoader(Drawing(), batch_size=None, num_workers=1), 1)
    drawn = []
    for _, *numbers in tuned.begin():
        drawn.extend(numbers)
        tuned.resize(3 - tuned.workers)
    assert len(set(drawn)) == len(drawn) == 46


def test_each_worker_runs_worker_init_fn_once_and_pools_do_not_overlap() -> None:
    begun = multiprocessing.Array("i", 10)
    alive = multiprocessing.Array("i", 10)

    def note(worker_id: int) -> None:
        with begun.get_lock():
            begun[worker_id] += 1
            alive[worker_id] = max(alive[worker_id], len(children(os.getppid())))

    tuned = tuned_of(DataLoader(Items(30), worker_init_fn=note), 2)
    sizes = []
    for batch in tuned.begin():
        sizes.append(tuned.workers)
        if int(batch) % 10 == 0:
            tuned.resize(5 - tuned.workers)
    pools = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert pools == [2, 3, 2, 3]
    assert begun[:] == [4, 4, 2, *[0] * 7]
    # The kernel counts the test's own resource tracker, where there is one.
    assert max(alive[:]) <= 3


def test_next_workers_start_while_the_last_ones_end(tmp_path: Path) -> None:
    def wait_for_the_next() -> None:
        give_up = time.monotonic() + 4
        while not (tmp_path / "begun-1").exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        (tmp_path / "ended").write_text(str((tmp_path / "begun-1").exists()))

    def begin(_: int) -> None:
        path = tmp_path / f"begun-{int((tmp_path / 'begun-0').exists())}"
        path.touch()
        if path.name == "begun-0":
            multiprocessing.util.Finalize(None, wait_for_the_next, exitpriority=1)

    tuned = tuned_of(DataLoader(Items(), num_workers=1, worker_init_fn=begin), 1)
    first = tuned.begin()
    for _ in range(23):
        next(first)
    second = tuned.begin()
    assert (tmp_path / "ended").read_text() == "True"
    assert [int(batch) for batch in second] == list(range(23))


def left_behind() -> tuple[int, int, int]:
    return (
        len(own_children()),
        len([*Path("/proc/self/fd").iterdir()]),
        len([*Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]),
    )


@pytest.mark.parametrize("by", ["drop", "close", "end"])
def test_nothing_is_left_behind(by: str) -> None:
    [*tuned_of(DataLoader(Items()), 1).begin()]  # what stays in a process once there have been workers
    before = left_behind()
    tuned = tuned_of(DataLoader(torch.zeros(64, 64), batch_size=2), 2)
    epoch = tuned.begin()
    next(epoch)
    tuned.resize(1)
    for _ in range(6):
        next(epoch)
    assert len(own_children()) == before[0] + 1
    if by == "close":
        tuned.close()
        assert len(own_children()) == before[0]
    if by == "end":
        assert len([batch.shape for batch in epoch]) == 25
    del epoch
    # Threads of multiprocessing's queues close their ends of pipes a interval later; those of what was before, too.
    until(lambda: not any(map(gt, left_behind(), before)))
    assert by != "close" or tuned.frozen


def test_persistent_workers_end_with_their_loader() -> None:
    tuned = tuned_of(DataLoader(Items(), num_workers=1, persistent_workers=True), 1)
    [*tuned.begin()]
    assert len(own_children()) == 1
    del tuned
    assert own_children() == []


def test_an_epoch_continues_after_the_end_of_tuning() -> None:
    tuned = tuned_of(DataLoader(Items()), 2)
    epoch = tuned.begin()
    seen = [int(next(epoch)) for _ in range(3)]
    tuned.close()
    assert seen + [int(batch) for batch in epoch] == list(range(23))
    assert tuned.workers == 0


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # of newer releases of torch
def test_an_unpicklable_dataset_is_read_without_workers() -> None:
    lines = Lines()
    loader: Loader = DataLoader(Unpicklable(), batch_size=2)
    vars(loader)["_DataLoader__multiprocessing_context"] = multiprocessing.get_context("spawn")
    tuned = tuned_of(loader, 0, say=lines)
    epoch = tuned.begin()
    seen = plain(next(epoch))
    tuned.resize(2)
    seen += plain(next(epoch))
    assert seen + [item for batch in epoch for item in plain(batch)] == list(range(23))
    assert len(lines) == 1
    assert "2 worker processes failed" in lines[0] and "continues with no worker processes" in lines[0]
    tuned.resize(1)
    assert len([*tuned.begin()]) == 12
    assert tuned.frozen and tuned.workers == 0 and len(lines) == 1


def test_a_killed_added_worker_does_not_end_the_epoch() -> None:
    lines = Lines()
    tuned = tuned_of(DataLoader(Deadly(), batch_size=2), 2, say=lines)
    assert [item for batch in tuned.begin() for item in plain(batch)] == list(range(23))
    assert len(lines) == 1 and "2 worker processes failed" in lines[0]
    assert tuned.frozen and tuned.workers == 0


def test_a_killed_worker_does_not_make_the_training_step_raise() -> None:
    tuned = tuned_of(DataLoader(Items()), 1, say=Lines())
    epoch = tuned.begin()
    next(epoch)
    (worker,) = own_children()
    worker.kill()
    # Torch's handler of SIGCHLD runs in the main thread, between any two lines of it.
    psutil.wait_procs([worker], timeout=10)
    assert [int(batch) for batch in epoch] == list(range(1, 23))


def test_a_killed_user_worker_raises() -> None:
    # Not tensors: those that a worker has sent cannot be received once it is dead, which is another error.
    tuned = tuned_of(DataLoader(Deadly(), num_workers=2, collate_fn=tuple), 2)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)"):
        [*tuned.begin()]
    tuned.close()


def test_killed_added_workers_fall_back_to_the_users_count() -> None:
    lines = Lines()
    loader: Loader = DataLoader(Failing(), num_workers=1, prefetch_factor=1)
    tuned = tuned_of(loader, 1, say=lines)
    epoch = tuned.begin()
    next(epoch)
    tuned.resize(3)
    next(epoch)
    next(epoch)
    for worker in own_children():
        worker.kill()
    seen = [int(next(epoch)) for _ in range(4)]
    assert seen == [3, 4, 5, 6]
    assert len(lines) == 1 and "continues with 1 worker processes" in lines[0]
    with pytest.raises(ValueError, match="item 7 is bad"):
        next(epoch)
    tuned.close()


@pytest.mark.parametrize("user_workers", [0, 1])
def test_an_unreadable_sample_raises_as_in_stock(user_workers: int) -> None:
    def story(epoch: Iterator[Any]) -> tuple[list[int], type, str, list[int]]:
        seen = [int(next(epoch)) for _ in range(7)]
        with pytest.raises(ValueError) as raised:
            next(epoch)
        first, *_, last = str(raised.value).splitlines() * 2
        return seen, raised.type, first + last, [int(batch) for batch in epoch]

    lines = Lines()
    expected = story(iter(DataLoader(Failing(), num_workers=user_workers)))
    assert (
        story(tuned_of(DataLoader(Failing(), num_workers=user_workers), 1 if user_workers else 2, say=lines).begin())
        == expected
    )
    assert len(lines) == (0 if user_workers else 1)


@pytest.mark.parametrize("workers", [1, 6])
@pytest.mark.parametrize("user_workers", [0, 1])
def test_a_sampler_error_is_raised_unchanged(user_workers: int, workers: int) -> None:
    """Even one that 6 workers reach before the first batch."""
    tuned = tuned_of(DataLoader(Items(), sampler=BadSampler(), num_workers=user_workers), workers)
    with pytest.raises(LookupError, match="no index"):
        [*tuned.begin()]
    assert not tuned.frozen


def test_workers_that_fail_to_start_leave_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    tuned = tuned_of(DataLoader(Items()), 1, say=lines)
    epoch = tuned.begin()
    next(epoch)
    start = multiprocessing.process.BaseProcess.start

    def at_most_two(process: Any) -> None:
        if len(own_children()) == 2:
            raise OSError(11, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", at_most_two)
    tuned.resize(3)
    next(epoch)
    next(epoch)
    assert len(own_children()) == 1
    assert [int(batch) for batch in epoch] == list(range(3, 23))
    assert len(lines) == 1 and "Resource temporarily unavailable" in lines[0] and "with 1 worker" in lines[0]
    assert tuned.workers == 1 and tuned.frozen


def test_reading_continues_if_user_workers_cannot_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    tuned = tuned_of(DataLoader(Items(), num_workers=2, prefetch_factor=1), 2, say=lines)
    epoch = tuned.begin()
    next(epoch)
    begin = worker_pool.loading.begin_loading

    def none(loader: Any) -> Any:
        if loader.num_workers:
            raise OSError(24, "Too many open files")
        return begin(loader)

    monkeypatch.setattr(worker_pool.loading, "begin_loading", none)
    tuned.resize(1)
    assert [int(batch) for batch in epoch] == list(range(1, 23))
    assert tuned.workers == 0 and len(lines) == 1
    with pytest.raises(OSError, match="Too many open files"):
        tuned_of(DataLoader(Items(), num_workers=2), 2).begin()


def test_a_loader_with_replaced_iteration_is_read_normally() -> None:
    loader: Loader = DataLoader(Items())
    tuned = tuned_of(loader, 1)
    replaced = ReplacedIteration(loader, lambda begin: tuned.begin())
    assert is_resizable(loader)
    assert [int(batch) for batch in tuned.begin()] == list(range(23))
    replaced.restore()


class Lazy(Sampler[int]):
    """Draws each index when it is asked for it, from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(23, ())) for _ in range(23))

    def __len__(self) -> int:
        return 23


@pytest.mark.parametrize("most", [1, 2, 5, 50])
@pytest.mark.parametrize("persists", [False, True])
def test_less_prefetching_does_not_change_the_batches(most: int, persists: bool) -> None:
    """The same worker makes each batch, and a sampler draws from a shared generator at the same moments as before."""

    def kind() -> Loader:
        return DataLoader(
            Drawing(), batch_size=None, sampler=Lazy(), num_workers=2, prefetch_factor=5, persistent_workers=persists
        )

    torch.manual_seed(3)
    loader = kind()
    expected = read(loader, loader.__iter__, lambda: torch.rand(1).item())
    torch.manual_seed(3)
    tuned = tuned_of(kind(), 2, most_ahead=lambda size: most)
    assert read(loader, tuned.begin, lambda: torch.rand(1).item()) == expected
    tuned.close()


class Made(Items):
    """Says which batches have been made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = multiprocessing.Array("i", 23)

    def __getitem__(self, index: int) -> int:
        self.made[index] = 1
        return index


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("resized", [False, True])
def test_prefetching_is_bounded_by_available_memory(in_order: bool, resized: bool) -> None:
    dataset = Made()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, prefetch_factor=5, in_order=in_order)
    asked: list[int] = []

    def most_ahead(size: Any) -> int:
        asked.append(size.size_bytes)
        return 5

    tuned = tuned_of(loader, 2, most_ahead=most_ahead)
    epoch = tuned.begin()
    assert sum(dataset.made) <= 2, "one for each worker, until it is known how large a batch is"
    seen = []
    for index in epoch:
        seen.append(index)
        assert sum(dataset.made) <= len(seen) + 5
        if resized and len(seen) == 7:
            tuned.resize(1)
    assert sorted(seen) == list(range(23)) and asked
    tuned.close()


def test_an_epoch_with_little_prefetching_can_be_resumed() -> None:
    loader: Loader = DataLoader(Items(), batch_size=None, num_workers=2, prefetch_factor=4)
    tuned = tuned_of(loader, 2, most_ahead=lambda size: 1)
    first = tuned.begin()
    seen = [next(first) for _ in range(5)]
    assert [*tuned.begin()] == list(range(23))
    assert [*seen, *first] == list(range(23))


def test_the_worker_count_is_requested_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[Interval] = []
    measurements: list[Measurement] = []

    def workers_at(interval: Interval) -> int:
        intervals.append(interval)
        return len(intervals) % 2

    loader = DataLoader(Items(10), batch_size=None)
    observer = Observer(measurements.append, epochs=4)
    tuned = ResizableLoader(loader, observer, user_workers=0, say=pytest.fail, workers_at=workers_at)
    assert [*tuned.begin()] == list(range(10))
    assert (intervals, measurements, tuned.workers) == ([Interval(5)], [], 1)
    epoch = tuned.begin()
    (first,) = measurements
    assert (first.interval, first.workers, first.batches) == (Interval(5), 1, 10)
    assert observer.interval == Interval(6)
    seen = [next(epoch) for _ in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "INTERVAL_S", 0.0)
        seen.append(next(epoch))
    assert intervals[-1] == observer.interval == Interval(6, 1)
    assert [*seen, *epoch] == list(range(10))
    tuned.close()
    assert measurements[-1].interval == Interval(6) and measurements[-1].workers == 0
    assert observer.interval == Interval(6, 1)


def test_loaders_that_decide_on_their_batches_themselves_are_not_resizable() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([1])

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    class OwnBatches(DataLoader[Any]):
        pass

    assert not is_resizable(Own(Items()))
    assert not is_resizable(DataLoader(Endless()))
    assert is_resizable(OwnBatches(Items()))


class Counting(RandomSampler):
    """Can be resumed in the midst of an epoch."""

    def state_dict(self) -> dict[str, int]:
        return {}


class CountingBatches(BatchSampler):
    def state_dict(self) -> dict[str, int]:
        return {}


class CountingLoader(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {}


def test_stateful_samplers_and_loaders_are_left_alone() -> None:
    by_sampler: Loader = DataLoader(Items(), sampler=Counting(range(23)))
    by_batches: Loader = DataLoader(Items(), batch_sampler=CountingBatches(range(23), 2, False))
    within: Loader = DataLoader(Items(), batch_sampler=BatchSampler(Counting(range(23)), 2, False))
    counting: Loader = CountingLoader(Items(), num_workers=2)
    assert not any(is_safe(loader) for loader in (by_sampler, by_batches, within, counting))
    assert all(is_safe(kind()) and is_resizable(kind()) for kind in KINDS.values())


def test_an_unshareable_dataset_is_left_alone_below_two_user_workers(tmp_path: Path) -> None:
    dataset = Opening(tmp_path)
    assert is_safe(DataLoader(dataset))
    dataset.file = threading.Lock()
    loaders = [DataLoader(dataset, num_workers=workers) for workers in (0, 1, 2)]
    why = "its dataset holds a thread lock (Opening.file), which several processes cannot use at once"
    assert [unforkable_dataset(loader) for loader in loaders] == [why, why, ""]
    assert [is_safe(loader) for loader in loaders] == [False, False, True]
    # Where it is not forked, it is the dataset's own affair what is sent.
    assert is_safe(DataLoader(dataset, num_workers=1, multiprocessing_context="spawn"))


def test_a_file_opened_by_the_first_sample_prevents_workers(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(23)))
    lines = Lines()
    dataset = Opening(tmp_path / "data")
    tuned = tuned_of(DataLoader(dataset), 0, say=lines)
    epoch = tuned.begin()
    seen = [int(next(epoch))]
    tuned.resize(3)
    assert seen + [int(batch) for batch in epoch] == list(range(23))
    dataset.file.close()
    assert tuned.workers == 0 and tuned.frozen
    assert len(lines) == 1 and "an open file (Opening.file)" in lines[0] and "no worker processes" in lines[0]


@pytest.mark.parametrize(("since", "workers"), [(0, 2), (9, 2), (0, 1)])
def test_silent_workers_are_ended(since: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_S", "_UNKNOWN_S", "_LATER_S"):
        monkeypatch.setattr(worker_pool, name, 0.3)
    # Longer than this test may take: how long torch waits for a worker that does not end.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 100.0)
    lines = Lines()
    tuned = tuned_of(DataLoader(Silent(since)), workers, say=lines)
    assert [int(batch) for batch in tuned.begin()] == list(range(23))
    assert len(lines) == 1 and "WorkersSilent: no batch has arrived for" in lines[0]
    assert tuned.workers == 0 and tuned.frozen


class Held(Items):
    """Gives nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> int:
        self.may_go.wait()
        return index


def test_user_workers_have_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadlines, "of_batch", lambda self, *, is_first: 0.0)
    assert len([*tuned_of(DataLoader(Items(), num_workers=2), 2).begin()]) == 23
    held, lines = Held(), Lines()

    def say(line: str) -> None:
        lines(line)
        held.may_go.set()

    assert len([*tuned_of(DataLoader(held, num_workers=2), 3, say=say).begin()]) == 23
    assert len(lines) == 1


def test_deadlines_are_far_longer_than_any_batch_so_far() -> None:
    known, unknown, slow = Deadlines(forks=True), Deadlines(forks=True), Deadlines(forks=False)
    known.note(0.01)
    assert [deadlines.of_batch(is_first=True) for deadlines in (known, unknown, slow)] == [5.0, 30.0, 60.0]
    assert [deadlines.of_batch(is_first=False) for deadlines in (known, unknown, slow)] == [60.0] * 3
    known.note(7.0)
    known.note(0.01)
    assert [known.of_batch(is_first=is_first) for is_first in (True, False)] == [140.0, 140.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_durations_are_recorded_with_and_without_workers(workers: int) -> None:
    class Slow(Items):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.03)
            return index

    tuned = tuned_of(DataLoader(Slow(4)), workers)
    for _ in tuned.begin():
        time.sleep(0.05 * workers)  # what is waited for says nothing of a loader that is ahead
    deadline_s = tuned._deadlines.of_batch(is_first=True)
    # 30 s if nothing is known; on a busy machine, a batch may take longer than a sample sleeps.
    assert deadline_s >= 5.0 and deadline_s != 30.0
