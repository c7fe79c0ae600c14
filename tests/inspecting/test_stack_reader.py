"""What is said of stacks that py-spy cannot read."""

import sys
from pathlib import Path

import pytest

from lightning_ncclsafe.inspecting.looks import StackReader


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Error: Unsupported version of Python: 3.16.0", "pip install --upgrade py-spy"),
        ("Error: Failed to find python version from target process", "pip install --upgrade py-spy"),
        ("Error: Permission Denied: Try running again with elevated permissions", "may not be read"),
        ("Error: No such process", "py-spy could not read its stack (Error: No such process)"),
        ("", "py-spy could not read its stack (no output)"),
    ],
)
def test_why_is_one_line_with_what_to_do(said: str, words: str, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable} -S\nimport sys\nsys.exit({said!r})\n")
    program.chmod(0o755)
    threads, why = StackReader(str(program)).read(1)
    assert threads == () and words in why and "\n" not in why
