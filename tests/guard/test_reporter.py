"""What is said to the user, and what happens where it cannot be."""

import io
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from incidents import job_of

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.facts import IncidentKind, ProcessFacts
from lightning_ncclsafe.facts.frames import ExceptionFacts, Frame
from lightning_ncclsafe.guard import reporter as module
from lightning_ncclsafe.guard.reporter import Reporter, Verdict, hide_reported_errors
from lightning_ncclsafe.report.folder import IncidentNumbers
from lightning_ncclsafe.report.terminal import say_on_stderr, say_own_failure
from lightning_ncclsafe.settings import Limits


class BrokenPipe(io.StringIO):
    """A stderr whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_every_line_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    say_on_stderr("the answer [bold]as it is[/bold]\n  because: of this")
    captured = capsys.readouterr()
    assert captured.err == "\n[ncclsafe] the answer [bold]as it is[/bold]\n[ncclsafe]   because: of this\n"
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
    assert "training continues: KeyError('ours')" in said
    assert "test_reporter.py" in said


class Alarm(Exception):
    """What a handler raises."""


def goes_off(signum: int, frame: object) -> None:
    raise Alarm


class Composed:
    """A handler as Lightning's for SIGTERM."""

    def __call__(self, signum: int, frame: object) -> None:
        raise Alarm


class Method:
    def handle(self, signum: int, frame: object) -> None:
        raise Alarm


def say_if_it_fails(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        say_own_failure(error)


@pytest.mark.parametrize("handler", [goes_off, Composed(), Method().handle], ids=["function", "object", "method"])
def test_what_the_handler_of_a_signal_raises_is_not_our_failure(
    handler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's raises wherever the main thread is when a worker is killed."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Alarm):
            say_if_it_fails(lambda: signal.raise_signal(signal.SIGUSR1))
        # The same exception, from elsewhere.
        say_own_failure(Alarm())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert capsys.readouterr().err.count("Alarm()") == 1


def on_rank_zero(function: Callable[..., None]) -> Callable[..., None]:
    """A decorator, as Lightning's ``rank_zero_only``."""

    @wraps(function)
    def wrapped(*args: object) -> None:
        function(*args)

    return wrapped


@on_rank_zero
def decorated(signum: int, frame: object) -> None:
    raise Alarm


@on_rank_zero
def logs(values: dict[str, float]) -> None:
    raise Alarm


def test_a_decorator_of_a_handler_is_no_handler(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGUSR1, decorated)
    try:
        with pytest.raises(Alarm):
            say_if_it_fails(lambda: signal.raise_signal(signal.SIGUSR1))
        assert not capsys.readouterr().err
        say_if_it_fails(lambda: logs({}))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "Alarm()" in capsys.readouterr().err


def test_an_error_that_was_told_has_no_traceback_and_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    hide_reported_errors()
    hide_reported_errors()
    other = ValueError("the user's")
    for error in (CollectiveTimeoutError("rank 1 raised"), other):
        sys.excepthook(type(error), error, None)
    assert printed == [other]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def reporter(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Reporter:
    # It has a moment only, and says so where that is too short.
    monkeypatch.setattr(module, "write_page", lambda *_: "")
    return Reporter(tmp_path, Limits(suspect_after_s=20.0, timeout_s=1_800.0, on_timeout="abort"), said.append)


def at_limit() -> Any:
    job = job_of(2)
    return replace(job, incident=replace(job.incident, kind=IncidentKind.TIMEOUT, idle_s=1_800.0))


def test_the_report_at_the_limit_prints_what_is_new_and_is_written_whole(reporter: Reporter, said: list[str]) -> None:
    first = reporter.report(job_of(2))
    last = reporter.report(at_limit(), known=first)
    assert len(said[0].splitlines()) > 4 and "  remedy: " in said[0]
    still, where, following, closing = said[1].splitlines()
    assert following.startswith("next: stop: ")
    assert still.startswith(f"still {first.findings[0].rule} after 30 min, the limit: rank 0")
    assert (where, closing) == (f"report: {last.folder}", "the run cannot continue, so the guard ends it")
    assert last.folder == first.folder
    report = (Path(last.folder) / "report.txt").read_text()
    assert first.findings[0].remedy.split(maxsplit=6)[0] in report and "What to do:" in report


def test_a_save_that_all_ranks_make_is_not_reported(reporter: Reporter, said: list[str]) -> None:
    save = Frame(file="/site-packages/lightning/pytorch/trainer/trainer.py", line=1464, function="save_checkpoint")
    job = job_of(2)
    verdict = reporter.report(replace(job, ranks=tuple(replace(facts, stack=(save,)) for facts in job.ranks)))
    assert (verdict.quiet_s, said) == (1_800.0 - job.incident.idle_s, [])


def test_only_a_rank_that_has_not_answered_is_taken_for_frozen(reporter: Reporter) -> None:
    """At the limit its process is killed from outside; who keeps Python's lock no more ends itself."""
    seen = ProcessFacts(pid=1001, rank=1, state="sleeping", gil_held=True)
    both = replace(job_of(2), witnessed=(seen,))
    assert reporter.report(both).frozen == ()
    assert reporter.report(replace(both, ranks=both.ranks[:1])).frozen == (1,)


@pytest.mark.parametrize(
    ("other", "is_joint"),
    [(Frame(file="train.py", line=7, function="fit"), True), (Frame(file="train.py", line=8, function="fit"), False)],
)
def test_ranks_raise_alike_at_one_line_whether_or_not_its_source_could_be_read(
    reporter: Reporter, said: list[str], other: Frame, is_joint: bool
) -> None:
    """The source may be on storage that does not answer one of them in time."""
    lines = (Frame(file="train.py", line=7, function="fit", code="raise ValueError(mode)", user=True), other)
    job = job_of(2)
    ranks = tuple(
        replace(facts, exception=ExceptionFacts(type="ValueError", message="no such mode", stack=(line,)))
        for facts, line in zip(job.ranks, lines, strict=True)
    )
    verdict = reporter.report(replace(job, ranks=ranks))
    assert verdict.is_joint == is_joint and bool(said) != is_joint


def test_what_could_not_be_written_is_printed_again_in_full(reporter: Reporter, said: list[str]) -> None:
    first = reporter.report(job_of(2))
    reporter.report(at_limit(), known=replace(first, folder=""))
    assert "  remedy: " in said[1]


def test_an_incident_that_is_not_reported_takes_no_number() -> None:
    numbers = IncidentNumbers()
    assert numbers.last + 1 == 1
    numbers.note(0)
    assert numbers.last == 0
    numbers.note(2)
    numbers.note(1)
    assert numbers.last == 2
    assert not Verdict(incident=job_of(2).incident, answer="", is_reported=False).is_reported
