"""The line that decides how much data a rank has: in what iterates it, or where it is made."""

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from polling import until
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler

from lightning_ncclsafe.probes.data import ends_at
from lightning_ncclsafe.probes.data.ends_at import data_ends_at

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


def told(loader: Any) -> str:
    """What is told of a loader that is no local of the test, but of the Trainer's code."""

    def asked(given: Any) -> str:
        return data_ends_at(given, given, "train_dataloader", sys._getframe())

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


class Counted(Data):
    def __iter__(self) -> Iterator[Any]:
        return (row for row in range(self.rows * SIZE))


class Opened(Data):
    def __iter__(self) -> Iterator[Any]:
        for file in self.rows:
            yield from read(file)


@pytest.mark.parametrize("kind", [Plain, Counted, Opened])
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


class Moved(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [batch]


def test_a_loader_that_hands_on_its_batches_does_not_decide() -> None:
    assert told(Moved(Filtered([]))) == place("filtered")


def share() -> list[str]:
    rows = read("rows")
    return list(filter(None, rows))  # <- share


def test_a_function_that_chooses_is_followed() -> None:
    data = share()
    name = "share"
    assert told(DataLoader(data)) == place(name, "share")  # type: ignore[arg-type]


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


def test_what_the_users_objects_raise_is_no_failure() -> None:
    assert told(Hostile()) == ""


def test_a_source_that_cannot_be_read_in_time_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(ends_at, "_MOST_S", 0.05)
    monkeypatch.setattr(ends_at, "scope_of", lambda _: goes_on.wait(20))
    assert told(DataLoader(Filtered([]))) == ""
    goes_on.set()
    until(lambda: not ends_at._reading.is_busy)
