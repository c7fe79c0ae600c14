"""Calls in loops that each process goes through in an order of its own, by their source."""

from pathlib import Path

import pytest

from lightning_ncclsafe.probes.source.unordered import calls_in_own_order

SOURCE = """
import os
from pathlib import Path
from torch import distributed as dist

NAMES = {{"audio", "video"}}
FIXED = ("audio", "video")

def made(pairs, folder):
    names = {{name for pair in pairs for name in pair}}
    ordered = sorted(names)
    {}

def other(names):
    for name in names:
        print(name)
"""
AT = "12 in made"


def found(folder: Path, code: str) -> list[str]:
    file = folder / "groups.py"
    file.write_text(SOURCE.format(code))
    places = calls_in_own_order(["new_group"], [str(file)])
    return [place.removeprefix(f"{file}:") for place in places]


@pytest.mark.parametrize(
    ("looped_over", "is_found"),
    [
        ("names", True),
        ("NAMES", True),
        ("{'a', 'b'}", True),
        ("set(pairs)", True),
        ("names | NAMES", True),
        ("names.union(FIXED)", True),
        ("enumerate(list(names))", True),
        ("dict.fromkeys(names)", True),
        ("os.listdir(folder)", True),
        ("Path(folder).glob('*.bin')", True),
        ("sorted(names)", False),
        ("ordered", False),
        ("sorted(os.listdir(folder))", False),
        ("FIXED", False),
        ("range(4)", False),
        ("pairs", False),
    ],
)
@pytest.mark.parametrize(
    "loop", ["groups = {{name: dist.new_group() for name in {}}}", "for name in {}: dist.new_group()"]
)
def test_a_loop_over_a_set_or_a_folder_has_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looped_over: str, is_found: bool, loop: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert found(tmp_path, loop.format(looped_over)) == [AT] * is_found


def test_only_what_is_in_the_loop_is_called_in_its_order(tmp_path: Path) -> None:
    assert found(tmp_path, "group = dist.new_group(); [print(name, group) for name in names]") == []


@pytest.mark.parametrize(("looped_over", "is_found"), [("names", False), ("os.listdir(folder)", True)])
def test_with_a_seed_sets_have_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looped_over: str, is_found: bool
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert found(tmp_path, f"for name in {looped_over}: dist.new_group()") == [AT] * is_found
