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
from unittest.mock import Mock

import jsonargparse
import pytest
from guard_of import guard_of
from packaging.version import Version

import lightning_ncclsafe
from lightning_ncclsafe import CollectiveTimer, SafeDDP
from lightning_ncclsafe._lightning import (
    chosen,
    import_lightning,
    imported,
    module_for,
    refuse_other_caller,
    refuse_other_trainer,
)

OTHER_NAME = Path(__file__).with_name("other_name.py")
# Stand for Lightning's two, in that order.
NAMES = ("bolt.pytorch", "pytorch_bolt")
needs_both = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning as the other package")


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


def test_the_first_of_both_is_used(installed: Path) -> None:
    for name in NAMES:
        install(installed, name)
    assert import_lightning(NAMES).__name__ == "bolt.pytorch"
    assert "pytorch_bolt" not in sys.modules


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_package_is_used(name: str, installed: Path) -> None:
    install(installed, name)
    assert import_lightning(NAMES).__name__ == name


@pytest.mark.parametrize("name", NAMES)
def test_the_imported_package_is_used(name: str, installed: Path) -> None:
    for each in NAMES:
        install(installed, each)
    __import__(name)
    assert import_lightning(NAMES).__name__ == name


def test_if_both_are_imported_the_first_is_used(installed: Path) -> None:
    for name in reversed(NAMES):
        install(installed, name)
        __import__(name)
    assert import_lightning(NAMES).__name__ == "bolt.pytorch"


def test_a_folder_of_that_name_is_not_a_package(installed: Path) -> None:
    (installed / "bolt").mkdir()
    install(installed, "pytorch_bolt")
    assert import_lightning(NAMES).__name__ == "pytorch_bolt"


def test_a_missing_package_is_an_error(installed: Path) -> None:
    with pytest.raises(ImportError, match=r"neither bolt\.pytorch nor pytorch_bolt is installed: pip install"):
        import_lightning(NAMES)


def test_a_broken_package_raises_its_own_error(installed: Path) -> None:
    install(installed, "bolt.pytorch", "import not_there")
    install(installed, "pytorch_bolt")
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there'"):
        import_lightning(NAMES)


def test_the_package_named_by_the_variable_is_used(installed: Path) -> None:
    for name in NAMES:
        install(installed, name)
    __import__("bolt.pytorch")
    assert import_lightning(NAMES, wanted="pytorch_bolt").__name__ == "pytorch_bolt"
    assert import_lightning(NAMES, wanted="bolt").__name__ == "bolt.pytorch"


def test_an_unknown_value_of_the_variable_is_refused(installed: Path) -> None:
    install(installed, "bolt.pytorch")
    with pytest.raises(ValueError, match=r"^NCCLSAFE_LIGHTNING='pl' in .* it must be 'bolt' or 'pytorch_bolt'\.$"):
        import_lightning(NAMES, wanted="pl")


def test_a_missing_package_named_by_the_variable_is_an_error(installed: Path) -> None:
    install(installed, "bolt.pytorch")
    with pytest.raises(ImportError, match=r"^NCCLSAFE_LIGHTNING='pytorch_bolt' .* not installed: pytorch_bolt\.$"):
        import_lightning(NAMES, wanted="pytorch_bolt")


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLSAFE_LIGHTNING", "pl")
    # Whoever has asked before, as the tests have, keeps what he has got.
    assert lightning_ncclsafe.SafeDDP is SafeDDP
    chosen.cache_clear()
    with pytest.raises(ValueError, match="NCCLSAFE_LIGHTNING='pl'"):
        chosen()
    with pytest.raises(ValueError, match="NCCLSAFE_LIGHTNING='pl'"):
        from lightning_ncclsafe import LoaderTuner  # noqa: F401
    monkeypatch.undo()
    assert lightning_ncclsafe.SafeDDP is SafeDDP


def test_an_alias_or_stub_does_not_count_as_imported(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(installed, "bolt.pytorch")
    for other in (__import__("bolt.pytorch").pytorch, ModuleType("pytorch_bolt"), Mock(), None):
        monkeypatch.setitem(sys.modules, "pytorch_bolt", other)
        assert imported(NAMES) == ["bolt.pytorch"]


def test_both_modules_differ_only_in_the_package_name() -> None:
    folder = Path(lightning_ncclsafe.__file__).parent
    swapped = (folder / "lightning.py").read_text()
    for here, there in (
        ("as ``lightning``", "as ``pytorch_lightning``"),
        ("in ``lightning_ncclsafe.pytorch_lightning``", "in ``lightning_ncclsafe.lightning``"),
        ("lightning.pytorch", "pytorch_lightning"),
    ):
        swapped = swapped.replace(here, there)
    assert swapped == (folder / "pytorch_lightning.py").read_text()


def trainer_of(module: str) -> Any:
    """One of a class of the user's own, whose base stands in a module."""
    return type("Trainer", (type("Base", (), {"__module__": module}),), {})()


@needs_both
def test_lightning_is_the_default_here() -> None:
    assert chosen() == "lightning.pytorch"
    assert SafeDDP.__module__ == module_for(chosen()) == "lightning_ncclsafe.lightning"
    for module in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.callbacks", "pytorch_lightning_trainer.x"):
        refuse_other_trainer(CollectiveTimer(), trainer_of(module))


@needs_both
def test_a_trainer_of_the_other_package_is_refused_with_the_right_import() -> None:
    with pytest.raises(TypeError) as caught:
        CollectiveTimer().setup(trainer_of("pytorch_lightning.trainer.trainer"), Any, "fit")
    assert str(caught.value) == (
        "CollectiveTimer is for a Trainer of lightning.pytorch, but was given to one of pytorch_lightning: these "
        "are two packages, whose classes do not fit together. Write: from lightning_ncclsafe.pytorch_lightning import "
        "CollectiveTimer (in a program that you cannot edit, set NCCLSAFE_LIGHTNING=pytorch_lightning in its "
        "environment)."
    )


@needs_both
def test_the_message_names_our_class_for_a_user_subclass() -> None:
    class OwnTimer(CollectiveTimer):
        pass

    with pytest.raises(TypeError, match=r"^OwnTimer is for .* Write: from \S+ import CollectiveTimer \("):
        OwnTimer().setup(trainer_of("pytorch_lightning.trainer.trainer"), Any, "fit")


@needs_both
def test_a_strategy_is_hidden_only_from_the_other_trainer() -> None:
    asking = {"__name__": "pytorch_lightning.trainer.connectors.accelerator_connector", "strategy": SafeDDP()}
    with pytest.raises(TypeError, match=r"^SafeDDP is for a Trainer of lightning\.pytorch, but"):
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
def test_tensorboard_is_not_imported_for_another_logger(outcome: dict[str, Any]) -> None:
    assert outcome["tensorboard"] is False


@needs_both
def test_a_lightning_trainer_is_refused_by_pytorch_lightning_classes(outcome: dict[str, Any]) -> None:
    said = "is for a Trainer of pytorch_lightning, but was given to one of lightning.pytorch: "
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


@needs_both
def test_both_packages_train_in_one_program(outcome: dict[str, Any]) -> None:
    """Even those that were refused before, as the error promises."""
    assert outcome["followed"] == {
        "lightning.pytorch": {"steps": 2, "said": [], "points": 2, "by_name": "SafeDDP"},
        "pytorch_lightning": {"steps": 2, "said": [], "points": 2, "by_name": "SafeDDP"},
    }


@needs_both
def test_both_modules_are_complete_and_share_their_errors() -> None:
    from lightning_ncclsafe import lightning, pytorch_lightning

    for module in (lightning, pytorch_lightning):
        assert all(hasattr(module, name) for name in lightning_ncclsafe.__all__)
    same = {name for name in lightning_ncclsafe.__all__ if getattr(lightning, name) is getattr(pytorch_lightning, name)}
    assert same == {name for name in lightning_ncclsafe.__all__ if name.endswith("Error")} | {"PhaseTimeouts", "pause"}


@needs_both
def test_each_class_belongs_to_its_own_package_only() -> None:
    import lightning.pytorch as one
    import pytorch_lightning as other

    from lightning_ncclsafe import lightning, pytorch_lightning

    for ours, theirs, foreign in ((lightning, one, other), (pytorch_lightning, other, one)):
        strategy = ours.SafeDDP()  # type: ignore[attr-defined]
        assert isinstance(strategy, theirs.strategies.DDPStrategy)
        assert not isinstance(strategy, foreign.strategies.Strategy)
        callbacks = ours.safe_callbacks()  # type: ignore[attr-defined]
        assert all(isinstance(callback, theirs.Callback) for callback in callbacks)
        assert not any(isinstance(callback, foreign.Callback) for callback in callbacks)
        with pytest.raises(TypeError, match=f"which is not a Callback of {theirs.__name__}"):
            ours.safe_callbacks(foreign.Callback())  # type: ignore[attr-defined]


@needs_both
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_both_can_be_created_from_a_configuration(package: str) -> None:
    import lightning.pytorch
    import pytorch_lightning

    theirs = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}[package]
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(theirs.strategies.Strategy, "strategy")
    parser.add_subclass_arguments(theirs.Callback, "callback")
    made = {
        "strategy": {"class_path": f"lightning_ncclsafe.{package}.SafeDDP", "init_args": {"timeout": "0:10:00"}},
        "callback": {"class_path": f"lightning_ncclsafe.{package}.CollectiveTimer", "init_args": {"every_n_steps": 7}},
    }
    # Written, and read again.
    config = parser.instantiate(parser.parse_string(parser.dump(parser.parse_object(made))))
    assert type(config.strategy).__module__ == type(config.callback).__module__ == f"lightning_ncclsafe.{package}"
    assert (guard_of(config.strategy).limits.timeout_s, config.callback.settings.every_n_steps) == (600.0, 7)


@needs_both
def test_both_strategy_registries_have_the_names(outcome: dict[str, Any]) -> None:
    assert outcome["with_the_variable"] == [
        "lightning_ncclsafe.lightning",
        "lightning_ncclsafe.pytorch_lightning",
        "lightning_ncclsafe.pytorch_lightning",
    ]
