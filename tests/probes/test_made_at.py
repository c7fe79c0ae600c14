"""The line that decides which data a loader has is found in the source, past what only passes the data on."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polling import until

from lightning_ncclsafe.probes.data import data_line as data_line_module
from lightning_ncclsafe.probes.data import made_at
from lightning_ncclsafe.probes.data.data_line import data_line

HERE = Path(__file__)


class DataLoader:
    """It and those derived from it pass data on."""

    def __init__(self, dataset: Any, batch_size: int = 1) -> None:
        self.dataset = dataset


class Subset(DataLoader):
    def __init__(self, dataset: Any, indices: Any = ()) -> None:
        super().__init__(dataset)


FILES: Any = ["a", "b"]


def data_made_at(given: Any, hook: str) -> str:
    """The line, asked for by what calls this."""
    return data_line(given, hook, sys._getframe(1))


def place(mark: str, function: str) -> str:
    lines = HERE.read_text().splitlines()
    return (
        f"{HERE}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# <- {mark}'))} in {function}"
    )


def random_split(data: Any) -> Any:
    return data, data


def load(path: str) -> str:
    return path


class Split:
    train: Any = None

    def __init__(self) -> None:
        self.train = None
        self.size = 3

    def setup(self, stage: str) -> None:
        self.train, self.rest = random_split(FILES)  # <- split
        self.data = Subset(self.train)

    def train_dataloader(self) -> Any:
        return DataLoader(dataset=self.data, batch_size=self.size)

    def val_dataloader(self) -> Any:
        sites = sorted(FILES)  # <- sites
        return [DataLoader(path) for path in sites]

    def test_dataloader(self) -> Any:
        if self.size > 2:
            return DataLoader(self.rest)
        return DataLoader(FILES)

    def predict_dataloader(self) -> Any:
        return [DataLoader(FILES), DataLoader(self.rest)]  # <- list


@pytest.mark.parametrize(
    ("hook", "mark", "function"),
    [("train_dataloader", "split", "setup"), ("val_dataloader", "sites", "val_dataloader")],
)
def test_a_hook_is_followed_to_what_makes_its_data(hook: str, mark: str, function: str) -> None:
    assert data_made_at(Split(), hook) == place(mark, function)


def test_several_loaders_are_made_where_their_list_is() -> None:
    assert data_made_at(Split(), "predict_dataloader") == place("list", "predict_dataloader")


def test_a_hook_with_several_returns_is_unknown() -> None:
    assert data_made_at(Split(), "test_dataloader") == ""


class Drawn:
    """Takes some of what it has: by their numbers, or as a part of an expression."""

    def train_dataloader(self) -> Any:
        numbers = [number for number in range(9) if number % 2]  # <- numbers
        return DataLoader(Subset(load("all"), numbers))

    def val_dataloader(self) -> Any:
        own = [number for number in range(9) if number % 2]  # <- divided
        scaled = Read(own) / 100
        return DataLoader(scaled)

    def test_dataloader(self) -> Any:
        every = range(9)
        return DataLoader(Subset(load("all"), every))  # <- every


@pytest.mark.parametrize(
    ("hook", "mark"), [("train_dataloader", "numbers"), ("val_dataloader", "divided"), ("test_dataloader", "every")]
)
def test_what_takes_some_of_the_data_is_found_behind_indices_and_in_expressions(hook: str, mark: str) -> None:
    assert data_made_at(Drawn(), hook) == place(mark, hook)


class Read:
    """Reads what it is given."""

    def __init__(self, *what: Any, **more: Any) -> None:
        self.what = what

    def __truediv__(self, by: int) -> "Read":
        return self


class Common:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def setup(self) -> None:
        self.train: Any = load("default")

    def train_dataloader(self) -> Any:
        return DataLoader(self.train)

    def transfer(self, batch: Any) -> None:
        batch.train = batch.train.to("cpu")


class Own(Common):
    def setup(self) -> None:
        self.train = Read(self.folder, 3)  # <- own


class Branches(Common):
    def setup(self) -> None:
        if self.folder:
            self.train = load("a")
        else:
            self.train = load("b")

    def train_dataloader(self) -> Any:
        return DataLoader(self.train)  # <- branches


class Filled(Common):
    def setup(self) -> None:
        self.train: Any = []
        for file in FILES:
            self.train.append(file)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, collate_fn=lambda rows: sorted(rows))  # type: ignore[call-arg]  # <- filled


class Parsed(Common):
    def train_dataloader(self) -> Any:
        rows = [Read(file, self.folder) for file in FILES]  # <- parsed
        return DataLoader(rows)


class Opened(Common):
    def train_dataloader(self) -> Any:
        with open(self.folder) as FILES:
            return DataLoader(FILES)  # <- opened


class Added(Common):
    def train_dataloader(self) -> Any:
        rows = load("rows")
        rows += "more"  # <- added
        return DataLoader(rows)


@pytest.mark.parametrize(
    ("kind", "mark", "function"),
    [
        (Own, "own", "setup"),
        (Branches, "branches", "train_dataloader"),
        (Filled, "filled", "train_dataloader"),
        (Parsed, "parsed", "train_dataloader"),
        (Opened, "opened", "train_dataloader"),
        (Added, "added", "train_dataloader"),
    ],
)
def test_only_what_the_source_leaves_no_choice_about_is_followed(
    kind: Callable[..., Any], mark: str, function: str
) -> None:
    """Neither an overridden method, nor one of two branches, nor another object's attribute, nor a shadowed name."""
    assert data_made_at(kind("data"), "train_dataloader") == place(mark, function)


class Raises(type):
    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class Hostile(metaclass=Raises):
    pass


def test_what_the_users_objects_raise_is_no_failure() -> None:
    assert data_made_at(Hostile(), "train_dataloader") == ""


def test_a_source_that_cannot_be_read_in_time_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, scope_of = threading.Event(), made_at.scope_of

    def hangs(code: Any) -> Any:
        goes_on.wait(20)
        return scope_of(code)

    monkeypatch.setattr(data_line_module, "_MOST_S", 0.05)
    monkeypatch.setattr(made_at, "scope_of", hangs)
    assert data_made_at(Split(), "train_dataloader") == ""
    monkeypatch.setattr(data_line_module, "_MOST_S", 20.0)
    threading.Thread(target=goes_on.set, daemon=True).start()
    assert data_made_at(Split(), "val_dataloader") in ("", place("sites", "val_dataloader")), "not the other's answer"
    until(lambda: not data_line_module._reading.is_busy)


TRAINER = """
def _run(given, hook):
    return data_made_at(given, hook)

class Trainer:
    def fit(self, model, train_dataloaders=None, val_dataloaders=None, *, of):
        return _run(train_dataloaders, of)

    def test(self, model, dataloaders=None):
        return _run(dataloaders, "test_dataloader")
"""


def trainer() -> Any:
    """One whose code is Lightning's by the name of its file."""
    names: dict[str, Any] = {"data_made_at": data_made_at}
    exec(compile(TRAINER, "/venv/site-packages/lightning/pytorch/trainer/trainer.py", "exec"), names)
    return names["Trainer"]()


def test_an_argument_is_followed_through_names_and_classes() -> None:
    rows = [file for file in FILES if file != "a"]  # <- filter
    chosen = Subset(rows)
    loader = DataLoader(chosen, batch_size=2)
    expected = place("filter", "test_an_argument_is_followed_through_names_and_classes")
    assert trainer().fit(None, loader, of="train_dataloader") == expected
    assert trainer().fit(None, train_dataloaders=[loader], of="train_dataloader") == expected
    assert trainer().fit(None, DataLoader(FILES), loader, of="val_dataloader") == expected
    assert trainer().test(None, dataloaders=loader) == expected


def test_a_loop_over_what_the_data_is_made_of_is_followed() -> None:
    paths = sorted(FILES)  # <- paths
    for path in paths:
        found = trainer().test(None, DataLoader(path))
    assert found == place("paths", "test_a_loop_over_what_the_data_is_made_of_is_followed")


def test_a_line_that_chooses_comes_before_one_that_makes_something_of_it() -> None:
    rows = {"train": random_split(FILES)}  # <- chooses
    long = rows["train"][0].__class__(map(str, rows["train"]))
    loader = DataLoader(Subset(os.fspath(load(long[0]))))
    expected = place("chooses", "test_a_line_that_chooses_comes_before_one_that_makes_something_of_it")
    assert trainer().test(None, loader) == expected


def test_an_order_decides_which_data_it_is() -> None:
    rows = random_split(FILES)
    ordered = sorted(rows)  # <- ordered
    assert trainer().test(None, DataLoader(load(str(ordered)))) == place(
        "ordered", "test_an_order_decides_which_data_it_is"
    )


def test_without_such_a_line_it_is_the_last_that_makes_something() -> None:
    rows = load("rows")
    more = load(rows)  # <- makes
    assert trainer().test(None, DataLoader(more)) == place(
        "makes", "test_without_such_a_line_it_is_the_last_that_makes_something"
    )


def test_names_of_functions_around_are_known() -> None:
    rows = random_split(FILES)  # <- around

    def train() -> str:
        return str(trainer().fit(None, DataLoader(rows), of="train_dataloader"))

    assert train() == place("around", "test_names_of_functions_around_are_known")


class Methods:
    def load(self) -> list[int]:
        return random_split(FILES)

    def kept(self) -> list[int]:
        return random_split(FILES)


def kept(rows: Any) -> list[int]:
    return random_split(rows)  # <- kept


def test_a_function_is_not_a_method_of_the_same_name() -> None:
    rows = load("rows")  # <- no method
    name = "test_a_function_is_not_a_method_of_the_same_name"
    assert trainer().test(None, DataLoader(rows)) == place("no method", name)
    assert trainer().test(None, DataLoader(kept(FILES))) == place("kept", "kept")


def test_a_function_that_is_given_is_unknown() -> None:
    def run(kept: Any) -> str:
        rows = kept(FILES)  # <- given function
        return str(trainer().test(None, DataLoader(rows)))

    assert run(list) == place("given function", "run")


def train_on(loaders: Any, *more: Any) -> tuple[str, str]:
    own = trainer().fit(None, loaders, of="train_dataloader")  # <- parameter
    return own, trainer().fit(*more, of="train_dataloader")


def test_what_comes_as_a_parameter_is_made_elsewhere() -> None:
    """The last line that is known is told; of arguments that are not written out, none is."""
    assert train_on(DataLoader(FILES), None, FILES) == (place("parameter", "train_on"), "")


def test_data_that_the_source_does_not_show_is_unknown() -> None:
    assert data_made_at(FILES, "train_dataloader") == ""


@pytest.mark.parametrize("source", ["def broken(:", "x = " + "(" * 500])
def test_a_file_that_cannot_be_parsed_is_no_failure(source: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(source)
    names: dict[str, Any] = {"trainer": trainer}
    exec(compile("found = trainer().test(None, [])", str(file), "exec"), names)
    assert names["found"] == ""
