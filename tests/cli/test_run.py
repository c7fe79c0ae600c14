"""``ncclsafe run``: the program takes its place, with all that Python and the program were given."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.cli import main, run


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What would take its place, and the variables that are not in this environment."""
    found: list[Any] = []
    (tmp_path / "lightning_ncclsafe.pth").touch()
    monkeypatch.setattr(run.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "orig_argv", ["python", "ncclsafe", *sys.argv[1:]])

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        assert path == words[0] == sys.executable
        found.extend([words[1:], dict(environment.items() - os.environ.items())])

    monkeypatch.setattr(run.os, "execve", execve)
    monkeypatch.delenv("NCCLSAFE", raising=False)
    return found


def run_main(*arguments: str) -> None:
    with pytest.raises(TypeError):  # None is no exit code: nothing comes back from what takes its place
        main(["run", *arguments])


@pytest.mark.parametrize(
    ("given", "program"),
    [
        (["train.py"], ["train.py"]),
        (["train.py", "--timeout", "5", "--help", "-m", "", "null", "--a.b=[1, 2]"],) * 2,
        (["-m", "package.train", "-m", "x", "--", "y"],) * 2,
    ],
)
def test_the_program_gets_its_arguments(given: list[str], program: list[str], executed: list[Any]) -> None:
    run_main(*given)
    assert executed == [program, {"NCCLSAFE": "1"}]


def test_options_become_variables(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLSAFE", "0")
    monkeypatch.setenv("NCCLSAFE_ON_TIMEOUT", "report")
    run_main("--timeout", "60", "--callbacks=recommended", "--report-dir", "a b", "train.py", "--timeout", "7")
    assert executed[0] == ["train.py", "--timeout", "7"]
    expected = {"TIMEOUT": "60", "CALLBACKS": "recommended", "REPORT_DIR": "a b"}
    assert executed[1] == {"NCCLSAFE": "1"} | {f"NCCLSAFE_{name}": value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--timeout", "soon"], "--timeout 'soon': it must be a number of seconds, more than 0 and at most 1e9."),
        (["--on-timeout", "\x1b[31m"], "--on-timeout '\\x1b[31m': it must be abort or report."),
        (["--callbacks", "Tuner"], "--callbacks 'Tuner': 'Tuner' is not a callback"),
        (["--suspect-after", "9", "--timeout", "8"], "suspect_after=9.0 is 9 s, but it must be less than"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], said: str, executed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options, "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1 and executed == []


def test_a_wrong_variable_is_refused(
    executed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCLSAFE_SUSPECT_AFTER", "soon")
    assert main(["run", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("error: NCCLSAFE_SUSPECT_AFTER='soon' in the environment: it must be")


def test_a_missing_pth_file_is_an_error(
    executed: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lightning_ncclsafe.pth").unlink()
    assert main(["run", "train.py"]) == 2
    error = capsys.readouterr().err
    assert f"lightning_ncclsafe.pth is in none of its site-packages folders ({tmp_path}" in error
    assert "Install lightning-ncclsafe there with pip" in error and executed == []


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["python", "/bin/ncclsafe", "run", "x"], []),
        (["python", "-m", "lightning_ncclsafe", "run", "x"], []),
        (["python", "-u", "-m", "lightning_ncclsafe", "run", "x"], ["-u"]),
        (["python", "-um", "lightning_ncclsafe", "run", "x"], ["-u"]),
        (["python", "-mlightning_ncclsafe", "run", "x"], []),
        (["python", "-Oumlightning_ncclsafe", "run", "x"], ["-Ou"]),
        (["python", "-X", "dev", "-W", "error", "/m/-m", "run", "x"], ["-X", "dev", "-W", "error"]),
    ],
)
def test_python_options_are_kept(words: list[str], options: list[str]) -> None:
    assert run._interpreter_options(words, ["the program", "run", "x"]) == options
