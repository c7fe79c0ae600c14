"""On a terminal, the answer so far is shown before the inspection ends."""

import sys
from collections.abc import Callable, Sequence

import pytest
from test_inspection import BARRIER, SeenRank, judged, look, rank, user, waiting

from lightning_ncclsafe.cli import inspect as command
from lightning_ncclsafe.cli import main
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S
from lightning_ncclsafe.inspecting.inspection import Inspection


def works(for_s: float, line: int = 30) -> SeenRank:
    return rank(1, *(look(at_s, user(line, "evaluate")) for at_s in (0.0, for_s)))


@pytest.mark.parametrize(
    ("is_terminal", "last", "reports"),
    [
        (True, works(LONG_STEP_S), 1),
        (True, works(LONG_STEP_S, line=31), 2),
        (True, rank(1, look(0.0, user(30)), look(5.0, user(31), BARRIER)), 2),
        (False, works(LONG_STEP_S), 1),
    ],
)
def test_a_terminal_shows_the_early_answer_and_then_only_changes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    last: SeenRank,
    reports: int,
) -> None:
    shown: list[bool] = []

    def found(*_: object, so_far: Callable[[Sequence[Diagnosis]], bool], **__: object) -> Inspection:
        shown.append(so_far([judged(waiting(0), works(2.0))]))
        return Inspection(diagnoses=(judged(waiting(0), last),))

    monkeypatch.setattr(command, "inspect", found)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert main(["inspect"]) == 1
    printed = capsys.readouterr().out
    assert shown == [is_terminal]
    assert printed.count("All ranks") == reports
    assert ("The same after 20 s without progress: rank-behind (" in printed) is (is_terminal and reports == 1)


def test_without_a_finding_nothing_is_shown_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moves = [rank(number, look(0.0, user(20)), look(1.0, user(21))) for number in (0, 1)]

    def found(*_: object, so_far: Callable[[Sequence[Diagnosis]], bool], **__: object) -> Inspection:
        assert not so_far([judged(*moves)])
        assert capsys.readouterr().out == ""
        return Inspection(diagnoses=(judged(*moves),))

    monkeypatch.setattr(command, "inspect", found)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["inspect"]) == 0
    assert "the job makes progress" in capsys.readouterr().out
