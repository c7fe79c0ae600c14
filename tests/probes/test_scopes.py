"""The user's functions as source, whatever is in their files; nothing is known of those of libraries."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.probes.source.scopes import Scope, scope_of


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


def test_an_expression_may_be_deeper_than_the_stack(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"def step(self):\n    self.x = {' + '.join(['self.y'] * 1200)}\n    self.log('x', 1)\n")
    names: dict[str, Any] = {}
    exec(compile("def step(self): ...", str(path), "exec"), names)
    assert [call.lineno for call in scope_of(names["step"]).calls(["log"])] == [3]
