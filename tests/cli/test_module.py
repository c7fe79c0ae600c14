"""``python -m lightning_ncclsafe``: a program to be run, or a command of ``ncclsafe``."""

from pathlib import Path

import pytest

from lightning_ncclsafe.__main__ import words_of


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["train.py", "inspect"], ["run", "train.py", "inspect"]),
        (["--timeout", "60", "train.py"], ["run", "--timeout", "60", "train.py"]),
        (["-m", "inspect"], ["run", "-m", "inspect"]),
        (["inspect", "--pid", "7"], ["inspect", "--pid", "7"]),
        (["run", "train.py"], ["run", "train.py"]),
        ([], ["--help"]),
        (["-h"], ["--help"]),
    ],
)
def test_commands_are_recognised_and_anything_else_is_a_program(
    given: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words_of(given) == words


def test_an_existing_program_takes_precedence_over_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inspect").touch()
    assert words_of(["inspect", "--fast"]) == ["run", "inspect", "--fast"]
