"""Lightning has two names: which of them is taken, and what is said where both meet."""

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from lightning_ncclsafe import CollectiveTimer, SafeDDP
from lightning_ncclsafe._lightning import CHOSEN, import_lightning, refuse_other_caller, refuse_other_trainer

OTHER_NAME = Path(__file__).with_name("other_name.py")
# Stand for Lightning's two, in that order.
NAMES = ("bolt.pytorch", "pytorch_bolt")
needs_both = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed, which meets the other"
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are imported from; none of them is there afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bolt", *NAMES, "not_there"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def install(folder: Path, name: str, source: str = "") -> None:
    package = folder / Path(*name.split("."))
    package.mkdir(parents=True)
    for part in [package, *package.parents][: len(name.split("."))]:
        (part / "__init__.py").touch()
    (package / "__init__.py").write_text(source)


def test_of_both_the_first_is_taken(installed: Path) -> None:
    for name in NAMES:
        install(installed, name)
    assert import_lightning(NAMES).__name__ == "bolt.pytorch"
    assert "pytorch_bolt" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_the_one_that_is_installed_is_taken(name: str, installed: Path) -> None:
    install(installed, name)
    assert import_lightning(NAMES).__name__ == name


@pytest.mark.parametrize("name", NAMES)
def test_the_one_that_is_imported_is_taken(name: str, installed: Path) -> None:
    for each in NAMES:
        install(installed, each)
    __import__(name)
    assert import_lightning(NAMES).__name__ == name


def test_if_both_are_imported_the_first_is_taken(installed: Path) -> None:
    for name in reversed(NAMES):
        install(installed, name)
        __import__(name)
    assert import_lightning(NAMES).__name__ == "bolt.pytorch"


def test_a_folder_with_the_name_is_no_package(installed: Path) -> None:
    (installed / "bolt").mkdir()
    install(installed, "pytorch_bolt")
    assert import_lightning(NAMES).__name__ == "pytorch_bolt"


def test_if_none_is_installed_that_is_said(installed: Path) -> None:
    with pytest.raises(ImportError, match=r"neither bolt\.pytorch nor pytorch_bolt is installed: pip install"):
        import_lightning(NAMES)


def test_what_an_installed_one_misses_is_said_as_it_is(installed: Path) -> None:
    install(installed, "bolt.pytorch", "import not_there")
    install(installed, "pytorch_bolt")
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"):
        import_lightning(NAMES)


def trainer_of(module: str) -> Any:
    """One of a class of the user's own, whose base stands in a module."""
    return type("Trainer", (type("Base", (), {"__module__": module}),), {})()


@needs_both
def test_here_it_is_lightning() -> None:
    assert CHOSEN == "lightning.pytorch"
    for module in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.callbacks", "pytorch_lightning_trainer.x"):
        refuse_other_trainer(CollectiveTimer(), trainer_of(module))


@needs_both
def test_the_other_trainer_is_refused_with_what_to_import() -> None:
    with pytest.raises(TypeError) as caught:
        CollectiveTimer().setup(trainer_of("pytorch_lightning.trainer.trainer"), Any, "fit")
    assert str(caught.value) == (
        "CollectiveTimer is made for a Trainer of lightning.pytorch, but was given to one of pytorch_lightning: these "
        "are two packages, whose classes do not fit together. Import everything from lightning.pytorch, nothing from "
        "pytorch_lightning; or, to keep pytorch_lightning, import it before lightning_ncclsafe, and nothing from "
        "lightning.pytorch."
    )


@needs_both
def test_a_strategy_is_shown_to_all_but_the_other_trainer() -> None:
    asking = {"__name__": "pytorch_lightning.trainer.connectors.accelerator_connector", "strategy": SafeDDP()}
    with pytest.raises(TypeError, match=r"^SafeDDP is made for a Trainer of lightning\.pytorch, but"):
        eval("f'{strategy!r}'", asking)
    for name in ("__main__", "pytorch_lightning.utilities", "lightning.pytorch.trainer.connectors.x"):
        assert "SafeDDP object" in eval("f'{strategy!r}'", asking | {"__name__": name})
        refuse_other_caller(asking["strategy"], name)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``other_name.py`` says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, str(OTHER_NAME), str(tmp_path_factory.mktemp("other"))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_both
def test_with_only_pytorch_lightning_everything_works(outcome: dict[str, Any]) -> None:
    seen = {name: outcome[name] for name in ("steps", "is_a_ddp_strategy", "registered", "name", "lightning")}
    assert seen == {
        "steps": 2,
        "is_a_ddp_strategy": True,
        "registered": True,
        "name": "SafeDDP",
        "lightning": False,
    }


@needs_both
def test_the_other_way_round_a_trainer_of_lightning_is_refused(outcome: dict[str, Any]) -> None:
    said = "is made for a Trainer of pytorch_lightning, but was given to one of lightning.pytorch: "
    assert outcome["strategy_refused"].startswith(f"TypeError: SafeDDP {said}")
    assert len(outcome["callbacks_refused"]) == 5
    # Lightning 2.5.0 has refused such a callback before it is asked for anything.
    expected = (
        (said, "ValueError: Expected a parent")
        if Version(metadata.version("lightning")) < Version("2.5.1")
        else (said,)
    )
    assert all(any(each in refusal for each in expected) for refusal in outcome["callbacks_refused"]), outcome
    assert "SafeDDP object" in outcome["repr"]
