"""Nothing is done until Lightning is imported; from then on each Trainer is looked at, and all else is as ever."""

import importlib.util
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_ncclsafe
from lightning_ncclsafe.running import at_import

NAME = "bolt_trainer"
SOURCE = '''
class Trainer:
    """Makes what it is told to."""

    def __init__(self, *, made: str = "well") -> None:
        self.made = made
        if made == "badly":
            raise ValueError("cannot be made")
'''


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The objects of a class of some library that are looked at, once it has been imported."""
    found: list[Any] = []
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(at_import, "_ON_NEW", {NAME: ("Trainer", found.append)})
    yield found
    sys.modules.pop(NAME, None)


def lightning() -> Any:
    return importlib.import_module(NAME)


def own_frames(error: BaseException) -> list[str]:
    own = str(Path(lightning_ncclsafe.__file__).parent)
    return [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(own)]


@pytest.mark.parametrize("is_there_before", [False, True])
def test_each_trainer_is_seen_once_after_construction(seen: list[Any], is_there_before: bool) -> None:
    if is_there_before:
        lightning()
    at_import.begin()
    at_import.begin()
    trainers = [lightning().Trainer(), lightning().Trainer(made="twice")]
    assert seen == trainers and seen[1].made == "twice"


def test_a_user_subclass_is_seen(seen: list[Any]) -> None:
    at_import.begin()

    class Own(lightning().Trainer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(made="here")

    assert seen == [Own()] and type(seen[0]) is Own


def test_the_constructor_keeps_its_signature(seen: list[Any]) -> None:
    expected = inspect.signature(lightning().Trainer)
    del sys.modules[NAME]
    at_import.begin()
    kind = lightning().Trainer
    assert inspect.signature(kind) == expected and str(expected) == "(*, made: str = 'well') -> None"
    assert kind.__init__.__qualname__ == "Trainer.__init__"
    assert "cannot be made" in inspect.getsource(kind.__init__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 puts the frame back")
def test_a_constructor_error_has_no_own_frame(seen: list[Any]) -> None:
    at_import.begin()
    with pytest.raises(ValueError, match="cannot be made") as raised:
        lightning().Trainer(made="badly")
    assert own_frames(raised.value) == [] and traceback.extract_tb(raised.value.__traceback__)[-1].name == "__init__"
    assert seen == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 puts the frame back")
def test_an_import_error_has_no_own_frame_and_the_next_import_works(seen: list[Any], tmp_path: Path) -> None:
    source = tmp_path / f"{NAME}.py"
    source.write_text("raise OSError('not now')")
    at_import.begin()
    with pytest.raises(OSError, match="not now") as raised:
        lightning()
    assert own_frames(raised.value) == []
    source.write_text(f"{SOURCE}\n# Of another size, for whoever has compiled it.")
    assert lightning().Trainer() is seen[0]


def test_the_module_loader_is_restored(seen: list[Any]) -> None:
    at_import.begin()
    assert "exec_module" not in vars(lightning().__spec__.loader)


def test_other_modules_are_ignored(seen: list[Any]) -> None:
    at_import.begin()
    assert type(sys.meta_path[0]).__module__ == at_import.__name__
    assert sys.meta_path[0].find_spec("json", None) is None


def test_the_watched_classes_exist_in_lightning() -> None:
    """They are looked up in the source of the installed packages."""
    for name, (kind, _) in at_import._ON_NEW.items():
        package, *path = name.split(".")
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            source = Path(found.submodule_search_locations[0], *path).with_suffix(".py").read_text()
            assert f"\nclass {kind}" in source and "\n    def __init__(" in source


STARTED = """
import os, signal, sys, threading
print("lightning_ncclsafe.running.at_import" in sys.modules)
print([name for name in ("torch", "lightning", "pytorch_lightning", "psutil", "rich", "numpy") if name in sys.modules])
print([os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and
       os.path.exists(f"/proc/self/fd/{fd}")], threading.active_count())
"""


def started(python: Path, **variables: str) -> tuple[str, str]:
    """What a program says that knows nothing of Lightning."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NCCLSAFE")}
    done = subprocess.run(
        [python, "-c", STARTED], env=kept | variables, capture_output=True, text=True, check=True, timeout=50
    )
    return done.stdout.partition("\n")[0], done.stdout.partition("\n")[2] + done.stderr


def test_a_program_without_lightning_is_unaffected(installed: Path) -> None:
    is_there, other = started(installed)
    assert is_there == "False"
    assert started(installed, NCCLSAFE="0") == started(installed, NCCLSAFE="") == ("False", other)
    # A rank, which with Lightning would be asked for its stack.
    rank = {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    for value in ("1", "banana"):
        assert started(installed, NCCLSAFE=value, **rank) == ("True", other)
