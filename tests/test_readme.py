"""What the README shows of our files is what is in them."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text().split("## Adding a cause\n")[1]
BLOCKS = [dedent(block) for block in re.findall(r"^ +```(?:python|text)\n(.*?)^ +```$", PAGE, re.M | re.S)]


@pytest.mark.parametrize(
    ("block", "file"),
    zip(
        BLOCKS,
        ("lightning_ncclsafe/rules/hang/at_breakpoint.py", "tests/rules/scenes.py", "tests/rules/scenes.py"),
        strict=True,
    ),
    ids=["rule", "scene", "its place"],
)
def test_the_cause_that_is_added_is_there(block: str, file: str) -> None:
    assert block.strip() in (ROOT / file).read_text()
