"""The user's functions as source, whatever is in their files; nothing is known of those of libraries."""

import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_ncclsafe.probes.source.scopes import Scope, scope_of, scopes_in, user_files


@pytest.mark.parametrize("function", [None, len, time.sleep, pytest.fixture])
def test_a_function_of_a_library_has_no_source(function: Callable[..., Any] | None) -> None:
    scope = scope_of(function)
    assert scope == Scope()
    assert (scope.nodes, scope.sets(["x"]), scope.branches_around(1)) == ((), (), ())


def test_a_missing_source_is_handled(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    path = str(tmp_path / "train.py")
    exec(compile("def step(self):\n    self.x = None\n", path, "exec"), names)
    scope = scope_of(names["step"])
    assert (scope.file, scope.name, scope.nodes) == (path, "step", ())
    assert (scope.sets(["x"]), scope.branches_around(2)) == ((), ())


def test_a_program_that_is_loaded_under_two_names_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that multiprocessing has spawned has it as __mp_main__, too."""
    program = ModuleType("train")
    program.__file__ = str(tmp_path / "train.py")
    for name in ("train", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, program)
    assert user_files().count(program.__file__) == 1


def test_an_expression_may_be_deeper_than_the_stack(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"def step(self):\n    self.x = {' + '.join(['self.y'] * 1200)}\n    self.log('x', 1)\n")
    names: dict[str, Any] = {}
    exec(compile("def step(self): ...", str(path), "exec"), names)
    assert [call.lineno for call in scope_of(names["step"]).calls(["log"])] == [3]


class Model:
    def __init__(self, size: int) -> None:
        self.size: int
        self.size = size
        self.size += 1
        self.least: int = 0
        setattr(self, "name", str(size))  # noqa: B010
        setattr(self, str(size), "size")

    def setup(self) -> None:
        def set_size() -> None:
            self.size = 4

        set_size()


def test_a_class_may_change_while_its_files_are_read() -> None:
    class Extended:
        def one(self) -> None: ...

        def two(self) -> None: ...

    found = []
    for scope in scopes_in([Extended()]):
        setattr(Extended, f"added_{scope.name}", None)
        found.append(scope.name)
    assert found == ["one", "two"]


def test_what_a_class_holds_is_not_asked_for_attributes() -> None:
    class Unbound:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("nothing is bound")

    class Holding:
        holds = Unbound()

        @property
        def one(self) -> None: ...

        @cached_property
        def two(self) -> None: ...

    assert [scope.name for scope in scopes_in([Holding()])] == ["one", "two"]


def test_the_lines_that_set_an_attribute_are_found() -> None:
    """Not one that only declares its type, or sets another one to its name."""
    first = Model.__init__.__code__.co_firstlineno
    scope = scope_of(Model.__init__)
    assert scope.sets(["size"]) == (f"{__file__}:{first + 2} in __init__", f"{__file__}:{first + 3} in __init__")
    assert scope.sets(["least", "name"]) == (
        f"{__file__}:{first + 4} in __init__",
        f"{__file__}:{first + 5} in __init__",
    )
    inner = Model.setup.__code__.co_firstlineno + 2
    assert scope_of(Model.setup).sets(["size"]) == (f"{__file__}:{inner} in setup",)
