"""What is said to the user, and what happens where it cannot be."""

import io
import sys

import pytest

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.reporter import print_no_told_errors, say_on_stderr, say_own_failure


class BrokenPipe(io.StringIO):
    """A stderr whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_every_line_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    say_on_stderr("the answer [bold]as it is[/bold]\n  because: of this")
    captured = capsys.readouterr()
    assert captured.err == "[ncclsafe] the answer [bold]as it is[/bold]\n[ncclsafe]   because: of this\n"
    assert captured.out == ""


def test_a_long_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say_on_stderr("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("stderr", [BrokenPipe(), None], ids=["broken", "none"])
def test_a_stderr_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, stderr: object) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    say_on_stderr("nobody hears this")


def test_our_own_failure_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("ours")  # <- here
    except KeyError as error:
        say_own_failure(error)
    said = capsys.readouterr().err
    assert "training goes on: KeyError('ours')" in said
    assert "test_reporter.py" in said


def test_an_error_that_was_told_has_no_traceback_and_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    print_no_told_errors()
    print_no_told_errors()
    other = ValueError("the user's")
    for error in (CollectiveTimeoutError("rank 1 raised"), other):
        sys.excepthook(type(error), error, None)
    assert printed == [other]
