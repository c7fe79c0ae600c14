"""The call in a loop that each process goes through in an order of its own, by its source."""

from pathlib import Path

import pytest

from lightning_ncclsafe.probes.source import unordered
from lightning_ncclsafe.probes.source.unordered import made_in_order_of_set

SOURCE = """
from torch import distributed as dist

NAMES = {{"audio", "video"}}
FIXED = ("audio", "video")

def made(pairs, world_size):
    names = {{name for pair in pairs for name in pair}}
    ordered = sorted(names)
    listed = list(names)
    listed.sort()
    sent = list(names)
    dist.broadcast_object_list(sent)
    assigned = list(names)
    assigned[:] = sorted(assigned)
    {}

def other(names):
    for name in names:
        print(name)
"""
AT = "16 in made"
LOOPS = ["groups = {{name: dist.new_group() for name in {}}}", "for name in {}: group = dist.new_group()"]


@pytest.fixture(autouse=True)
def hashed_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unordered, "hashes_text_alike", lambda: False)


def found(folder: Path, code: str) -> str:
    file = folder / "groups.py"
    file.write_text(SOURCE.format(code))
    return made_in_order_of_set("new_group", [str(file)]).removeprefix(f"{file}:")


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
        ("sorted(names)", False),
        ("ordered", False),
        ("listed", False),
        ("sent", False),
        ("FIXED", False),
        ("range(4)", False),
        ("pairs", False),
        ("{0, 1}", False),
        ("{'a'}", False),
        ("assigned", False),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_over_a_set_has_an_order_of_its_own(tmp_path: Path, looped_over: str, is_found: bool, loop: str) -> None:
    assert found(tmp_path, loop.format(looped_over)) == (AT if is_found else "")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("group = dist.new_group(); [print(name, group) for name in names]", id="before it"),
        pytest.param("one = dist.new_group(); groups = [dist.new_group() for name in names]", id="another as well"),
        pytest.param("for name in names:\n        if name == 'audio': dist.new_group()", id="in one pass"),
        pytest.param(
            "for name in names:\n        if name != 'audio': continue\n        dist.new_group()", id="past a jump"
        ),
        pytest.param("for rank in set(pairs): dist.new_group([rank])", id="of numbers, it seems"),
        pytest.param("groups = [dist.new_group() for size in {r // 2 for r in range(8)}]", id="of sizes"),
    ],
)
def test_only_what_each_pass_makes_and_nothing_else_does_is_made_in_its_order(tmp_path: Path, code: str) -> None:
    assert found(tmp_path, code) == ""


def test_with_a_seed_sets_have_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unordered, "hashes_text_alike", lambda: True)
    assert found(tmp_path, LOOPS[0].format("names")) == ""
