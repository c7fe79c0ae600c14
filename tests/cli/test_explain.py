"""``ncclsafe explain``: every rule can be explained, and a name that is nearly right finds what is meant."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from lightning_ncclsafe import rules
from lightning_ncclsafe.cli import explain, main
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.kit.rule import SECTIONS, Rule

Explained = Callable[[str], str]
KINDS = [import_module(f"{rules.__name__}.{kind.name}") for kind in iter_modules(rules.__path__) if kind.ispkg]
LISTED = [rule for kind in KINDS for name in dir(kind) if name.endswith("_RULES") for rule in getattr(kind, name)]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Explained:
    def run(name: str) -> str:
        assert main(["explain", name]) == 0
        return capsys.readouterr().out

    return run


def test_every_rule_is_listed() -> None:
    told = [rule for group in explain.RULES.values() for rule in group]
    assert len(told) == len(LISTED) and set(told) == set(LISTED)


@pytest.mark.parametrize(
    "rule", dict.fromkeys(LISTED), ids=lambda rule: f"{rule.ask.__module__.partition('.rules.')[2]}.{rule.name}"
)
def test_every_rule_has_a_summary_and_all_sections(rule: Rule[Any]) -> None:
    summary, sections = rule.summary, rule.sections
    assert summary.endswith(".") and len(summary) < 200
    assert tuple(sections) == SECTIONS
    assert all(text.endswith(".") for text in sections.values())
    # What is not in one of the sections would not be told.
    told = " ".join([summary, *(f"{title}: {text}" for title, text in sections.items())])
    assert " ".join((rule.ask.__doc__ or "").split()) == told


def test_one_rule_is_explained(explained: Explained) -> None:
    lines = explained("rank-zero-only-work").splitlines()
    assert lines[0] == "rank-zero-only-work  why ranks wait"
    assert [line for line in lines if line in SECTIONS] == [*SECTIONS]
    assert not [line for line in lines if line != line.rstrip() or len(line) > 100]


def test_the_function_name_is_accepted(explained: Explained) -> None:
    assert explained("Swap_In_Use").startswith("swap-in-use  what is wrong with hosts before training\n")


def test_a_name_shared_by_two_rules_is_explained_twice(explained: Explained) -> None:
    out = explained("unpresented-loader")
    assert "unpresented-loader  why ranks wait\n" in out
    assert "unpresented-loader  what ranks disagree about before they train\n" in out


def test_a_rule_of_two_kinds_is_explained_once(monkeypatch: pytest.MonkeyPatch, explained: Explained) -> None:
    monkeypatch.setitem(explain.RULES, "What is wrong with hosts before training", HANG_RULES)
    told = explained("slow-logger")
    assert told.startswith("slow-logger  why ranks wait; what is wrong with hosts before training\n")
    assert told.count("Symptom\n") == 1


def test_without_a_name_all_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:2] == "  " and line[2:3] != " "] == [
        rule.name for group in explain.RULES.values() for rule in group
    ]
    assert "Why ranks wait" in lines


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rank-zero", "did you mean rank-zero-only-work"),
        ("slow-loger", "did you mean slow-logger"),
        ("xyzzy", "ncclsafe explain lists all causes"),
        ("", "ncclsafe explain lists all causes"),
        ("\x1b[31m", "ncclsafe explain lists all causes"),
    ],
    ids=["partial", "misspelt", "unrelated", "empty", "escape"],
)
def test_an_unknown_name_is_a_single_error(capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    assert main(["explain", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: there is no cause {name!r}: ") and hint in captured.err
