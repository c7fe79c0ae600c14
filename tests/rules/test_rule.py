"""What rules declare of themselves: their order, what they follow from, and that adding one is adding its file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import GLOO, job

from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit import Confidence, Finding, Rule, Rules, Timeline, View, named_by, once, view_of
from lightning_ncclsafe.rules.kit.rule import in_order

ADDED = '''
import test_rule


@test_rule.KIND.rule(after="{after}", remedy="Look.")
def {name}(view):
    """Something."""
    return ()
'''
KIND = Rules(Timeline)


def rule(name: str, after: str = "", *findings: Finding, **declared: object) -> Rule[Timeline]:
    return Rule(name, lambda _: findings, Timeline, after=after, remedy="Look.", **declared)  # type: ignore[arg-type]


def found(*ranks: int, confidence: Confidence = Confidence.LIKELY) -> Finding:
    return Finding(rule="", summary="It stands.", ranks=ranks, remedy="", confidence=confidence)


def names(rules: tuple[Rule[Timeline], ...]) -> list[str]:
    return [one.name for one in rules]


def told(*rules: Rule[Timeline]) -> list[str]:
    facts = job(*(GLOO.waiting(rank, seq=61) for rank in range(3)), world=3)
    return [finding.rule for finding in judge(facts, rules).findings]


def test_each_stands_behind_the_one_that_it_comes_after() -> None:
    rules = (rule("c", "b"), rule("a"), rule("b", "a"))
    assert names(in_order(rules)) == names(in_order(rules[::-1])) == ["a", "b", "c"]


def test_a_new_one_comes_directly_behind_the_one_that_it_names() -> None:
    chain = (rule("a"), rule("b", "a"), rule("c", "b"), rule("d", "c"))
    assert names(in_order((*chain, rule("x", "a")))) == ["a", "x", "b", "c", "d"]
    assert names(in_order((*chain, rule("x", "d")))) == ["a", "b", "c", "d", "x"]


def test_between_two_that_come_after_the_same_the_alphabet_decides() -> None:
    rules = (rule("a"), rule("z", "a"), rule("y", "a"))
    assert names(in_order(rules)) == names(in_order(rules[::-1])) == ["a", "y", "z"]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ((rule("a"), rule("b", "c"), rule("c", "b")), "after one another in a circle: b, c"),
        ((rule("a", "a"),), "in a circle: a"),
        ((rule("a", "aa"),), "a comes after 'aa', and there is no rule of that name"),
    ],
    ids=["two", "itself", "nobody"],
)
def test_an_order_that_cannot_be_is_an_error(rules: tuple[Rule[Timeline], ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        in_order(rules)


def test_causes_that_others_follow_from_exist() -> None:
    known = {*names(HANG_RULES)}
    assert {name for one in HANG_RULES for name in one.follows} <= known
    assert all(one.name not in one.follows for one in HANG_RULES)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of rules of its own, which other tests do not see."""
    folder = tmp_path / "causes_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "KIND", Rules(Timeline))
    yield folder
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_adding_a_cause_is_adding_its_file(package: Path) -> None:
    for name, after in (("first", ""), ("second", "first")):
        (package / f"{name}.py").write_text(ADDED.format(name=name, after=after))
    assert names(KIND.of(package.name, [str(package)])) == ["first", "second"]
    (package / "new_one.py").write_text(ADDED.format(name="new_one", after="first"))
    assert names(KIND.of(package.name, [str(package)])) == ["first", "new-one", "second"]


def test_one_that_comes_after_nothing_known_is_an_error_when_it_is_imported(package: Path) -> None:
    (package / "lost.py").write_text(ADDED.format(name="lost", after="nobody"))
    with pytest.raises(ValueError, match="lost comes after 'nobody'"):
        KIND.of(package.name, [str(package)])


def test_one_name_for_two_causes_is_an_error(package: Path) -> None:
    for module in ("one", "other"):
        (package / f"{module}.py").write_text(ADDED.format(name="same", after=""))
    with pytest.raises(ValueError, match=r"the rule same is declared in \w+\.one and in \w+\.other"):
        KIND.of(package.name, [str(package)])


def test_a_consequence_is_left_out_beside_its_likely_cause() -> None:
    effect = rule("effect", "", found(0), follows=("cause",))
    assert told(effect, rule("cause", "", found(1))) == ["cause"]
    assert told(effect, rule("cause", "", found(1, confidence=Confidence.POSSIBLE))) == ["effect", "cause"]


def test_a_rule_says_nothing_where_a_question_that_it_names_has_an_answer() -> None:
    assert told(rule("a", "", found(0), unless=(lambda view: view.raised,))) == ["a"]
    assert told(rule("a", "", found(0), unless=(lambda view: view.raised, lambda view: view.waiting))) == []
    other = rule("other", "", found(1))
    assert told(rule("a", "", found(0), unless=(other,)), other) == ["other"]


def test_the_declared_remedy_is_that_of_every_finding_that_has_none() -> None:
    own = Finding(rule="", summary="It stands.", ranks=(0,), remedy="Listen.")
    assert [one.remedy for one in rule("a", "", found(0), own)(Timeline(job()))] == ["Look.", "Listen."]


def test_ranks_that_rules_name() -> None:
    view = Timeline(job())
    rules = (rule("a", "", found(2, confidence=Confidence.POSSIBLE)), rule("b", "", found(0, 1)))
    assert named_by(view, *rules) == {0, 1, 2}
    assert named_by(view, *rules, least=Confidence.LIKELY) == {0, 1}


def test_a_question_is_answered_once_for_each_job_and_never_for_another() -> None:
    asked: list[tuple[View, int]] = []

    @once
    def question(view: Timeline, number: int) -> int:
        asked.append((view, number))
        return len(asked)

    first, second = job(), job()
    assert question(view_of(Timeline, first), 1) == question(view_of(Timeline, first), 1) == 1
    assert question(view_of(Timeline, first), 2) == 2
    assert question(view_of(Timeline, second), 1) == 3
    assert view_of(Timeline, second).job is second
