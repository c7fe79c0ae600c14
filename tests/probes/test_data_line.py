"""The line that decides how much data a rank has: in what iterates it, or where it is made."""

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from polling import until
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler

from lightning_ncclsafe.loaders.iteration import LoaderProxy
from lightning_ncclsafe.probes.data import data_line as data_line_module
from lightning_ncclsafe.probes.data.data_line import data_line

HERE = Path(__file__)
SIZE = 4
TRAINER = """
def _run(loaders):
    return ends_at(loaders)

class Trainer:
    def fit(self, model, train_dataloaders):
        return _run(train_dataloaders)
"""


def place(mark: str, function: str = "__iter__") -> str:
    lines = HERE.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# <- {mark}"))
    return f"{HERE}:{number} in {function}"


def told(loader: Any, *, by_length: bool = False) -> str:
    """What is told of a loader that is no local of the test, but of the Trainer's code."""

    def asked(given: Any) -> str:
        return data_line(given, "train_dataloader", sys._getframe(), [given], by_length=by_length)

    names: dict[str, Any] = {"ends_at": asked}
    exec(compile(TRAINER, "/venv/site-packages/lightning/pytorch/trainer/trainer.py", "exec"), names)
    return str(names["Trainer"]().fit(None, *[loader]))


def read(file: str) -> list[str]:
    return [file]


class Data(IterableDataset[Any]):
    def __init__(self, rows: Any, rank: int = 0) -> None:
        self.rows, self.rank = rows, rank
        self.first = [*rows]


class Split(Data):
    def __iter__(self) -> Iterator[Any]:
        size = len(self.rows) // 2
        first = self.rank * size
        for row in islice(self.rows, first, first + size):  # <- split
            yield [row]


class Packed(Data):
    def __iter__(self) -> Iterator[Any]:
        for length, rows in self.rows.items():
            yield from rows.split(SIZE // length)  # <- packed


class Filtered(Data):
    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            if len(row) < SIZE:
                continue  # <- filtered
            yield row


class Caught(Data):
    def __iter__(self) -> Iterator[Any]:
        for number in range(SIZE * SIZE):
            try:
                yield self.rows[number]
            except ValueError:  # <- caught
                print("left out")


class Rest(Data):
    def __iter__(self) -> Iterator[Any]:
        pack: list[Any] = []
        for row in self.rows:
            if len(pack) + row > SIZE:  # <- rest
                yield pack
                pack = []
            pack.append(row)
        if pack:
            yield pack


class Bucketed(Data):
    """Rows of one length are packed, and some are left out."""

    def packs(self) -> Iterator[Any]:
        open_packs: dict[int, list[Any]] = {length: [] for length in (1, 2)}
        for row in self.rows:
            if not row:
                continue
            pack = open_packs[len(row)]
            pack.append(row)
            if len(pack) > SIZE:  # <- closed
                yield pack
                open_packs[len(row)] = []

    def __iter__(self) -> Iterator[Any]:
        for pack in self.packs():
            yield pack, len(pack)


class Ending(Data):
    def __iter__(self) -> Iterator[Any]:
        while True:
            row = next(self.rows, None)
            if row is None:
                break  # <- ending
            yield row


class Shares(Data):
    def __iter__(self) -> Iterator[Any]:
        mine = self.rows[self.rank :: 2]  # <- shares
        return iter(mine)


class Delegating(Data):
    def __iter__(self) -> Iterator[Any]:
        yield from self._each()

    def _each(self) -> Iterator[Any]:
        for row in self.rows:
            if row:  # <- delegating
                yield row


class Passing(Data):
    def __iter__(self) -> Iterator[Any]:
        yield from self._each(self.rows)

    def _each(self, rows: list[Any]) -> Iterator[Any]:
        rows = rows[self.rank :: 2]  # <- passing
        yield from rows


@pytest.mark.parametrize(
    ("kind", "mark", "function"),
    [
        (Split, "split", "__iter__"),
        (Packed, "packed", "__iter__"),
        (Filtered, "filtered", "__iter__"),
        (Caught, "caught", "__iter__"),
        (Rest, "rest", "__iter__"),
        (Bucketed, "closed", "packs"),
        (Ending, "ending", "__iter__"),
        (Shares, "shares", "__iter__"),
        (Delegating, "delegating", "_each"),
        (Passing, "passing", "_each"),
    ],
)
def test_a_stream_ends_where_it_decides_what_it_yields(kind: Callable[..., Any], mark: str, function: str) -> None:
    assert told(DataLoader(kind([]))) == place(mark, function)


class Twice(Data):
    """A share of each rank, of which some rows are left out."""

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows[self.rank :: 2]:
            if row:
                yield row


class Filled(Data):
    """Both the share of a rank and how much is read for each row of it."""

    def __init__(self, rows: Any, rank: int = 0) -> None:
        self.mine = rows[rank::2]  # <- filled share

    def __iter__(self) -> Iterator[Any]:
        for row in self.mine:
            yield from [row] * (SIZE // len(row))


class Checks(Data):
    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            if not row:
                continue
            if len(row) < SIZE:
                continue
            yield row


class Parts(Data):
    def __iter__(self) -> Iterator[Any]:
        for row in self.rows[self.rank :: 2]:
            yield row
        for row in self.first[self.rank :: 2]:
            yield row


class Begun(Data):
    """Which of the two methods has set its rows last is not known."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows

    def begin(self) -> None:
        self.rows = self.rows[1:]


class Resumed(Data):
    """Its position is set elsewhere."""

    def __iter__(self) -> Iterator[Any]:
        first, self.rank = self.rank, 0
        for row in range(first, SIZE):
            yield [row]


class Bounds(Data):
    def __init__(self, first: int, last: int) -> None:
        self.one, self.other = first, last

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.one, self.other):
            yield [row]


class Dealt(Data):
    """Chunks of files, which are dealt out to ranks in turn."""

    def __iter__(self) -> Iterator[Any]:
        for row in islice(self.rows, self.rank, None, 2):  # <- dealt
            yield from row.split(SIZE)


class Packing:
    """Batches of as many rows as there is room for."""

    def __init__(self, rows: Any, room: int) -> None:
        self.rows, self.room = rows, room

    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for row in self.rows:
            if len(batch) + len(row) > self.room:  # <- packing
                yield batch
                batch = []
            batch.append(row)
        yield batch


class Batched(Data):
    """Has an iterable of its own, whose class decides."""

    def __init__(self, rows: Any, rank: int = 0) -> None:
        self.batches = Packing(rows, 3 + rank)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield [len(row) for row in batch]


class Listed(Data):
    """Has a list, made where it decides itself."""

    def __init__(self, rows: Any, rank: int = 0) -> None:
        self.batches = rows[rank::2]  # <- listed

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


@pytest.mark.parametrize(
    ("kind", "mark", "function"),
    [(Dealt, "dealt", "__iter__"), (Batched, "packing", "__iter__"), (Listed, "listed", "__init__")],
)
def test_the_part_of_a_rank_or_what_packs_it_decides(kind: Callable[..., Any], mark: str, function: str) -> None:
    assert told(DataLoader(kind([["a"], ["b"]]), batch_size=None)) == place(mark, function)


@pytest.mark.parametrize("kind", [Twice, Checks, Parts, Begun, Resumed])
def test_of_several_lines_none_is_told(kind: Callable[..., Any]) -> None:
    data = kind([])
    assert told(DataLoader(data)) == ""


def test_of_several_things_that_it_was_given_none_is_told() -> None:
    data = Bounds(0, 1)
    assert told(DataLoader(data)) == ""


class Plain(Data):
    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(self.rows):
            yield number, [row]


class Uttered(Data):
    def __init__(self, rows: Any) -> None:
        self.said = [row.upper() for row in rows]

    def __iter__(self) -> Iterator[Any]:
        yield from self.said


class Counted(Data):
    def __iter__(self) -> Iterator[Any]:
        return (row for row in range(self.rows * SIZE))


class Opened(Data):
    def __iter__(self) -> Iterator[Any]:
        for file in self.rows:
            yield from read(file)


@pytest.mark.parametrize("kind", [Plain, Uttered, Counted, Opened])
def test_a_stream_that_hands_on_what_it_was_given_ends_where_it_is_made(kind: Callable[..., Any]) -> None:
    data = kind(read("rows"))  # <- given
    assert told(DataLoader(data)) == place(
        "given", "test_a_stream_that_hands_on_what_it_was_given_ends_where_it_is_made"
    )


class Found(Data):
    def __init__(self, files: list[str], rank: int) -> None:
        self.files = sorted(files)[rank::2]  # <- found

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            yield from read(file)


def test_what_it_was_given_may_be_shared_out_in_its_init() -> None:
    assert told(DataLoader(Found([], 1))) == place("found", "__init__")


class Rebound(Data):
    def __init__(self, files: list[str], rank: int) -> None:
        files = files[rank::2]  # <- rebound
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        yield from self.files


def test_a_parameter_may_be_shared_out_before_it_is_kept() -> None:
    assert told(DataLoader(Rebound([], 1))) == place("rebound", "__init__")


class Within(Data):
    def __iter__(self) -> Iterator[Any]:
        for file in self.rows[self.rank :: 2]:  # <- within
            with open(file) as lines:
                yield from lines


class ReadOf(Data):
    def __iter__(self) -> Iterator[Any]:
        for number, file in enumerate(self.rows[self.rank :: 2]):  # <- read of
            rows = read(file)
            for row in rows:
                yield number, [row]


class Alike(Data):
    def __iter__(self) -> Iterator[Any]:
        for file in self.rows[self.rank :: 2]:  # <- alike
            yield from ([file, row] for row in range(SIZE * SIZE))


@pytest.mark.parametrize(("kind", "mark"), [(Within, "within"), (ReadOf, "read of"), (Alike, "alike")])
def test_what_is_read_for_each_item_of_a_loop_ends_with_the_loop(kind: Callable[..., Any], mark: str) -> None:
    assert told(DataLoader(kind([]))) == place(mark)


class Cut(Data):
    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            with open(row[self.rank :: 2]) as lines:
                yield from lines


def test_what_is_chosen_of_each_item_of_a_loop_does_not_end_with_it() -> None:
    data = Cut([])
    assert told(DataLoader(data)) == ""


class Chosen(Found):
    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            if file.endswith(".txt"):  # <- chosen
                yield from read(file)


def test_a_condition_around_what_is_handed_on_decides() -> None:
    assert told(DataLoader(Chosen([], 1))) == place("chosen")


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        for row in range(self.last, 9):
            yield [row]

    last = 3


class Buckets(Sampler[list[int]]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        for row in range(self.rank, 9, 2):  # <- buckets
            yield [row]

    def __bool__(self) -> bool:
        raise RuntimeError("a sampler is not asked")


def test_a_sampler_of_the_users_own_decides() -> None:
    assert told(DataLoader(Numbers(), batch_sampler=Buckets(1))) == place("buckets")
    assert told(DataLoader(Numbers(), sampler=Buckets(1))) == place("buckets")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([1, 2]), range(1, 3)])
def test_indices_that_a_loader_was_given_decide_and_not_its_data(sampler: Any) -> None:
    data = Numbers()
    assert told(DataLoader(data, sampler=sampler)) == ""


def test_the_iteration_of_what_is_read_by_index_is_not_asked() -> None:
    data = Numbers()  # <- numbers
    assert told(DataLoader(data)) == place("numbers", "test_the_iteration_of_what_is_read_by_index_is_not_asked")


class Shared(Dataset[Any]):
    def __init__(self, names: list[str], rank: int) -> None:
        self.names = names[rank::2]  # <- shared

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]


class Kept(Shared):
    """Its length is computed once, from what is held under two other names."""

    def __init__(self, names: list[str], rank: int) -> None:
        super().__init__(names, rank)
        self.all = self.rows
        self.count = len(self.all)

    @property
    def rows(self) -> list[str]:
        return self.names

    def __len__(self) -> int:
        return self.count


class Pairs(Shared):
    """How many there are follows from the names and something else."""

    def __len__(self) -> int:
        return len(self.names) // self.size

    size = 2


class Directly(Shared):
    def __init__(self, names: list[str], rank: int) -> None:
        self.all, self.rank = names, rank

    def __len__(self) -> int:
        return len(self.all[self.rank :: 2])  # <- directly

    def __getitem__(self, index: int) -> str:
        return self.all[index]


NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("kind", "mark", "function"),
    [(Shared, "shared", "__init__"), (Kept, "shared", "__init__"), (Directly, "directly", "__len__")],
)
def test_data_that_is_read_by_index_is_as_long_as_what_it_has(kind: Any, mark: str, function: str) -> None:
    assert told(DataLoader(kind(NAMES, 1))) == place(mark, function)
    assert told(DataLoader(kind(NAMES, 1), shuffle=True)) == place(mark, function)


def test_a_length_that_is_computed_is_not_followed() -> None:
    data = Pairs(NAMES, 1)  # <- pairs
    assert told(DataLoader(data)) == place("pairs", "test_a_length_that_is_computed_is_not_followed")


def test_data_of_which_a_sampler_takes_as_much_as_it_is_told_does_not_decide() -> None:
    data = Shared(NAMES, 1)  # <- sampled
    name = "test_data_of_which_a_sampler_takes_as_much_as_it_is_told_does_not_decide"
    assert told(DataLoader(data, sampler=RandomSampler(data, num_samples=3))) == place("sampled", name)
    assert told(DataLoader(data, sampler=RandomSampler([1, 2]))) == place("sampled", name)


class Labelled(Numbers):
    """It only holds what it was given, in another form."""

    def __init__(self, names: list[str]) -> None:
        self.names = [name.upper() for name in names]

    def __len__(self) -> int:
        return len(self.names)


def test_data_that_it_was_given_is_made_elsewhere() -> None:
    data = Labelled(NAMES[1:])  # <- labelled
    assert told(DataLoader(data)) == place("labelled", "test_data_that_it_was_given_is_made_elsewhere")


class Turns(Sampler[list[int]]):
    """Its batches are asked for by a property; what it yields is not told by one line."""

    def __init__(self, count: int, rank: int) -> None:
        self.batches, self.rank = [[index] for index in range(count)], rank

    @property
    def own(self) -> list[list[int]]:
        return self.batches[self.rank :: 2]  # <- turns

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)


class Doubtful(Turns):
    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches[self.rank :: 2]  # <- doubtful
        yield from self.batches[:1]


def test_the_properties_of_a_sampler_are_followed() -> None:
    assert told(DataLoader(Numbers(), batch_sampler=Turns(9, 1))) == place("turns", "own")


class Budget(Sampler[list[int]]):
    """Its batches are filled up; the line where they are still empty decides nothing."""

    def __init__(self, sizes: list[int]) -> None:
        self.batches: list[list[int]] = [[]]
        for index, size in enumerate(sizes):
            if size > SIZE:
                self.batches.append([])
            self.batches[-1].append(index)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Extended(Turns):
    """What its batches are at first is not what they are in the end."""

    def __init__(self, count: int, rank: int) -> None:
        self.kept = [[index] for index in range(rank, count, 2)]
        if count % 2:
            self.kept.append([0])

    @property
    def own(self) -> list[list[int]]:
        return self.kept


class Collected(Budget):
    def __init__(self, sizes: list[int]) -> None:
        batches: list[list[int]] = [[]]
        for index, size in enumerate(sizes):
            if size > SIZE:
                batches.append([])
            batches[-1].append(index)
        self.collected = batches

    def __len__(self) -> int:
        return len(self.collected)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.collected:
            if batch:
                yield batch


@pytest.mark.parametrize("sampler", [Budget([1, 5]), Collected([1, 5]), Extended(9, 1)])
def test_what_is_filled_up_later_is_not_made_where_it_is_empty(sampler: Any) -> None:
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    assert told(loader, by_length=True) == ""
    assert isinstance(sampler, Collected) or told(loader) == ""


def test_what_was_given_is_not_looked_for_before_it_is_read() -> None:
    """The line that makes the data is told as such."""
    data = Labelled(NAMES[1:])
    assert told(DataLoader(data), by_length=True) == ""


def test_what_has_not_been_read_is_as_long_as_it_says() -> None:
    loader = DataLoader(Numbers(), batch_sampler=Doubtful(9, 1))
    assert told(loader) == place("doubtful")
    assert told(loader, by_length=True) == place("turns", "own")


def test_loaders_that_other_lines_decide_have_none_together() -> None:
    one, other = DataLoader(Shared(NAMES, 1)), DataLoader(Filtered([]))
    assert data_line(None, "train_dataloader", None, [one, one]) == place("shared", "__init__")
    assert data_line(None, "train_dataloader", None, [one, other]) == ""


class Moved(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [batch]


class Gathered(Data):
    """A list that is filled before it is handed on: no one line decides how long it is."""

    def batches(self) -> list[Any]:
        made: list[Any] = []
        for row in self.rows:
            made.append(row)
        made += [row for row in self.first if row]
        return made

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches()  # <- gathered


class GatheredInTurns(Gathered):
    def batches(self) -> list[Any]:
        return self.rows[self.rank :: 2]  # <- gathered in turns


class GatheredHere(Data):
    def __iter__(self) -> Iterator[Any]:
        made: list[Any] = []
        for row in self.rows:
            made.append(row)
        yield from made


class Padded(Data):
    def __iter__(self) -> Iterator[Any]:
        mine = [row for row in self.rows if row % 2 == self.rank]  # <- padded share
        if not mine:
            mine.append(0)
        yield from mine


class GatheredAndCounted(Gathered):
    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.count = len(self.batches())  # <- counted once

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Gathered, place("gathered")),
        (GatheredInTurns, place("gathered in turns", "batches")),
        (GatheredHere, ""),
        (Padded, place("padded share")),
    ],
)
def test_of_a_list_that_is_filled_later_on_the_line_that_begins_it_does_not_decide(kind: Any, line: str) -> None:
    assert told(DataLoader(kind([]))) == line


def test_a_length_that_is_counted_once_is_not_that_of_what_was_added_last() -> None:
    loader = DataLoader(list(range(9)), batch_sampler=GatheredAndCounted([]))
    assert told(loader, by_length=True) == place("counted once", "__init__")


class ByLength(Sampler[int]):
    def __init__(self, source: Any) -> None:
        self.count = len(source)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


def test_a_sampler_of_all_samples_hands_on_how_many_there_are() -> None:
    data = list(filter(None, range(8)))  # <- counted samples
    loader = DataLoader(data, sampler=ByLength(data))
    assert told(loader) == place("counted samples", "test_a_sampler_of_all_samples_hands_on_how_many_there_are")


def of_this_rank(names: list[str], rank: int) -> list[str]:
    return names[rank::SIZE]  # <- share of names


class Streamed(Data):
    """Two generators and a buffer; each rank has its share of the files."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.mine = of_this_rank(rows, self.rank)

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for row in (row for name in self.mine for row in read(name)):
            held.append(row)
            if len(held) == SIZE:
                yield held.pop()
        yield from held


class StreamedAsRead(Data):
    def _own(self) -> Iterator[Any]:
        while True:
            for number, row in enumerate(self.rows):
                if number % SIZE == self.rank:  # <- share as read
                    yield row
            if not self.first:
                return

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for row in self._own():
            held.append(row)
            while len(held) > 1:
                yield held.pop()


class StreamedWithoutSome(Streamed):
    def __iter__(self) -> Iterator[Any]:
        for name in self.mine:
            for row in read(name):
                if not row:
                    continue
                yield row
        yield from self.first


class StreamedTwice(Streamed):
    def __iter__(self) -> Iterator[Any]:
        first = self.rank
        yield from super().__iter__()
        for row in islice(self.rows, first, None, SIZE):
            yield from read(row)


class StreamedByWorker(StreamedAsRead):
    def _own(self) -> Iterator[Any]:
        worker_id = 0
        for number, row in enumerate(self.rows):
            if number % SIZE == worker_id:
                yield from read(row)


class StreamedIfValid(Streamed):
    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for name in self.mine:
            parsed = read(name)
            if parsed[0]:
                batch.append(parsed)
            if len(batch) == SIZE:
                yield batch
        yield from batch


class StreamedIfShort(Streamed):
    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for name in self.mine:
            if len(name) < SIZE:
                batch.append(name)
            if len(batch) == SIZE:
                yield batch
        yield from batch


class StreamedInTime(Streamed):
    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for name in self.mine:
            if self.first > batch:
                break
            batch.append(name)
            while len(batch) >= SIZE:
                yield batch[:SIZE]
        yield from batch


class StreamedIfReadable(Streamed):
    def __iter__(self) -> Iterator[Any]:
        for name in self.mine:
            try:
                yield from read(name)
            except OSError:
                continue
        yield from self.first


class StreamedOfRows(Streamed):
    def __iter__(self) -> Iterator[Any]:
        for name in self.mine:
            yield from [row for row in read(name) if row]
        yield from self.first


class StreamedByBudget(Streamed):
    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        total = 0
        for name in self.mine:
            if total + len(name) > SIZE:
                yield batch
            batch.append(name)
        yield from batch


class StreamedIfShortOrFirst(Streamed):
    def __iter__(self) -> Iterator[Any]:
        batch: list[Any] = []
        for name in self.mine:
            if len(batch) < SIZE and name in self.first:
                batch.append(name)
            yield batch
        yield from batch


class StreamedIfFlagged(Streamed):
    """The flag is about each sample."""

    def look(self, name: str) -> None:
        self.is_good = name in self.first

    def __iter__(self) -> Iterator[Any]:
        for name in self.mine:
            self.look(name)
            if self.is_good:
                yield from read(name)
        yield from self.first


class StreamedOrNot(Streamed):
    def __iter__(self) -> Iterator[Any]:
        for name in self.mine:
            found = read(name)
            yield from found if found else self.first
        yield from self.first


class StreamedWhile(Streamed):
    def __iter__(self) -> Iterator[Any]:
        left = [*self.mine]
        while left and left[0] in self.first:
            yield left.pop()
        yield from self.first


class Parallel(Data):
    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            sample = {"ids": read(row)}
            yield sample["ids"][self.rank * SIZE : (self.rank + 1) * SIZE]
        yield from self.first


class Heartbeat(Data):
    """Conditions on the rank that keep nothing, and a part of each sample."""

    def __iter__(self) -> Iterator[Any]:
        size = len(self.rows)
        for number, row in enumerate(self.rows):
            if (number + self.rank) % SIZE == 0:
                print("alive")
            if number % SIZE == self.rank:
                print("alive")
            yield row[self.rank * size : (self.rank + 1) * size]
        yield from self.first


class Rotated(Data):
    """All of it, in an order of each rank's own."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows[self.rank :]
        yield from self.rows[: self.rank]


class Unused(Data):
    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            yield from read(row)
        yield from self.first

    def summary(self) -> str:
        return f"reads {self.rows[self.rank :: SIZE]}"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Streamed, place("share of names", "of_this_rank")),
        (StreamedAsRead, place("share as read", "_own")),
        (Filled, place("filled share", "__init__")),
        (StreamedWithoutSome, ""),
        (StreamedTwice, ""),
        (StreamedByWorker, ""),
        (StreamedIfValid, ""),
        (StreamedIfShort, ""),
        (StreamedInTime, ""),
        (StreamedIfReadable, ""),
        (StreamedOfRows, ""),
        (StreamedByBudget, ""),
        (StreamedIfShortOrFirst, ""),
        (StreamedIfFlagged, ""),
        (StreamedOrNot, ""),
        (StreamedWhile, ""),
        (Parallel, ""),
        (Heartbeat, ""),
        (Rotated, ""),
        (Unused, ""),
    ],
)
def test_where_several_lines_decide_it_is_the_one_that_takes_a_ranks_share(kind: Any, line: str) -> None:
    assert told(DataLoader(kind(["a", "b"]))) == line


def test_a_loader_that_hands_on_its_batches_does_not_decide() -> None:
    assert told(Moved(Filtered([]))) == place("filtered")


def share() -> list[str]:
    rows = read("rows")
    return list(filter(None, rows))  # <- share


def test_a_function_that_chooses_is_followed() -> None:
    data = share()
    name = "share"
    assert told(DataLoader(data)) == place(name, "share")  # type: ignore[arg-type]


def shuffle(rows: list[str]) -> list[str]:
    return rows[::-1]


def test_what_only_puts_the_data_in_an_order_does_not_decide_how_much_there_is() -> None:
    rows = [row for row in read("rows") if row]  # <- taken
    data = shuffle(rows)
    test = "test_what_only_puts_the_data_in_an_order_does_not_decide_how_much_there_is"
    assert told(DataLoader(data)) == place("taken", test)  # type: ignore[arg-type]


def test_a_slice_of_an_order_decides() -> None:
    rows = [row for row in read("rows") if row]
    data = sorted(rows)[:1]  # <- sliced
    assert told(DataLoader(data)) == place("sliced", "test_a_slice_of_an_order_decides")  # type: ignore[arg-type]


def test_a_loader_made_anew_is_known_by_its_dataset() -> None:
    loader = DataLoader(share(), batch_size=2)  # type: ignore[arg-type]
    assert told(DataLoader(loader.dataset)) == place("share", "share")


def test_a_variable_further_out_is_found() -> None:
    data = read("rows")  # <- further

    def run(given: Any) -> str:
        return told(DataLoader(given))

    assert run(data) == place("further", "test_a_variable_further_out_is_found")


def test_a_generator_is_asked_itself() -> None:
    def rows(rank: int) -> Iterator[int]:
        for row in range(rank, 9, 2):  # <- generator
            yield [row]

    assert told(rows(1)) == place("generator", "rows")


class Raises(type):
    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class Hostile(metaclass=Raises):
    pass


class Countless(Data):
    def __iter__(self) -> Iterator[Any]:
        yield from read("rows")  # <- countless

    def __len__(self) -> int:
        raise AssertionError("nothing of the user's is executed")


def test_a_loader_in_a_proxy_is_not_asked_for_its_length() -> None:
    assert told(LoaderProxy(Countless([]))) == place("countless")


class Mixed(Data):
    def __iter__(self) -> Iterator[Any]:
        rows = self.rows
        rows = read(rows, rows, rows, rows, rows, rows)  # type: ignore[call-arg]
        rows = read(rows, rows, rows, rows, rows, rows)  # type: ignore[call-arg]
        rows = read(rows, rows, rows, rows, rows, rows)  # type: ignore[call-arg]
        rows = read(rows, rows, rows, rows, rows, rows)  # type: ignore[call-arg]
        rows = read(rows, rows, rows, rows, rows, rows)  # type: ignore[call-arg]
        yield from rows


def test_a_chain_of_names_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    variable = data_line_module.variable
    monkeypatch.setattr(data_line_module, "variable", lambda name, before: asked.append(name) or variable(name, before))
    told(Mixed([]))
    assert 0 < len(asked) < 200


def test_what_the_users_objects_raise_is_no_failure() -> None:
    assert told(Hostile()) == ""


def test_a_source_that_cannot_be_read_in_time_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(data_line_module, "_MOST_S", 0.05)
    monkeypatch.setattr(data_line_module, "scope_of", lambda _: goes_on.wait(20))
    assert told(DataLoader(Filtered([]))) == ""
    goes_on.set()
    until(lambda: not data_line_module._reading.is_busy)
