"""``python -m lightning_ncclsafe``: a program to be run, or a command of ``ncclsafe``."""

from pathlib import Path

import pytest

from lightning_ncclsafe.__main__ import words_of
from lightning_ncclsafe.cli import main


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["render"], "ncclsafe render needs REPORT; for its arguments: ncclsafe render --help"),
        (["diagnose"], "ncclsafe diagnose needs PATHS; for its arguments: ncclsafe diagnose --help"),
        (["run"], "ncclsafe run needs PROGRAM; for its arguments: ncclsafe run --help"),
        (["logs"], "ncclsafe logs needs a command: recover"),
        (["logs", "recover"], "ncclsafe logs recover needs DIR; for its arguments: ncclsafe logs recover --help"),
    ],
)
def test_a_command_says_what_it_lacks(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert (ended.value.code, *capsys.readouterr()) == (2, "", f"error: {said}\n")


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and "find out why a run hung" in err
    assert err.endswith("error: ncclsafe needs a command\n")
