"""Hosts may have the code in different folders: that says nothing about what ranks do."""

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from builders import GLOO, NCCL, SITE, Backend, job, user
from call_scenes import CALL_SCENES
from machine_scenes import MACHINE_SCENES
from scenes import SCENES, Scene

from lightning_ncclsafe.facts import Frame, JobFacts, RankFacts
from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding, Severity
from lightning_ncclsafe.report.html.answer import causes_of
from lightning_ncclsafe.rules.common_paths import with_common_paths
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.timeline import Timeline

_SOURCE = re.compile(r"^/.*\.py(?=:|$)")
THERE = "/local/b"


def on_two_hosts(facts: JobFacts) -> JobFacts:
    return replace(facts, ranks=tuple(replace(one, host=f"node-{one.rank % 2}") for one in facts.ranks))


def elsewhere(value: Any) -> Any:
    """The same facts with all source files in another folder."""
    if type(value) is str:  # and no enumeration
        return _SOURCE.sub(lambda path: f"{THERE}{path[0]}", value)
    if isinstance(value, tuple):
        return tuple(map(elsewhere, value))
    if isinstance(value, dict):
        return {key: elsewhere(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: elsewhere(getattr(value, one.name)) for one in fields(value)})
    return value


def with_own_folders(facts: JobFacts) -> JobFacts:
    """The same job on two hosts, of which the second has all code in another folder."""
    ranks = tuple(elsewhere(one) if one.rank % 2 else one for one in facts.ranks)
    seen = tuple(elsewhere(one) if one.rank % 2 else one for one in facts.witnessed)
    return replace(facts, ranks=ranks, witnessed=seen)


def answer(facts: JobFacts) -> list[object]:
    diagnosis = judge(facts)
    assert not [line for line in diagnosis.unanswered if "failed" in line]
    return [(one.rule, one.ranks, one.confidence, one.location.removeprefix(THERE)) for one in diagnosis.findings[:1]]


@pytest.mark.parametrize("scene", [*SCENES, *CALL_SCENES, *MACHINE_SCENES], ids=lambda scene: scene.name)
@pytest.mark.parametrize("net", [GLOO, NCCL], ids=lambda net: net.name)
def test_code_in_another_folder_on_each_host_changes_no_answer(scene: Scene, net: Backend) -> None:
    facts = on_two_hosts(scene.build(net))
    assert answer(with_own_folders(facts)) == answer(facts)


def waiting(rank: int, host: str, file: str) -> RankFacts:
    return replace(GLOO.waiting(rank, seq=61), host=host, stack=(user("train", 7, file=file),))


def test_reports_keep_the_paths_of_each_host() -> None:
    facts = job(waiting(0, "a", "/home/me/x/train.py"), waiting(1, "b", "/local/7/x/train.py"), world=2)
    assert {one.stack[0].file for one in with_common_paths(facts).ranks} == {"/home/me/x/train.py"}
    assert judge(facts).job is facts


@pytest.mark.parametrize(
    ("host", "file"), [("a", "/local/7/x/train.py"), ("b", "/home/me/y/train.py"), ("b", "/home/me/x/train.py")]
)
def test_other_files_stay_apart(host: str, file: str) -> None:
    """Those of one host, and those in folders of other names."""
    facts = job(waiting(0, "a", "/home/me/x/train.py"), waiting(1, host, file), world=2)
    assert with_common_paths(facts) is facts


def test_a_host_with_two_such_files_tells_nothing() -> None:
    files = {"/home/me/x/train.py": "a", "/local/7/x/train.py": "b", "/local/8/x/train.py": "b"}
    ranks = (waiting(rank, host, file) for rank, (file, host) in enumerate(files.items()))
    facts = job(*ranks, world=3)
    assert with_common_paths(facts) is facts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{SITE}/torchmetrics/utilities/distributed.py", f"{SITE}/lightning/fabric/utilities/distributed.py"),
        ("/home/me/x/first/parts/data.py", "/home/me/x/second/parts/data.py"),
    ],
)
def test_files_of_one_folder_are_different_files(one: str, other: str) -> None:
    """Of two packages that both hosts have at one place."""
    facts = job(waiting(0, "a", "/home/me/x/train.py"), waiting(1, "b", "/home/me/x/train.py"), world=2)
    deeper = {0: user("call", 3, file=one), 1: user("call", 3, file=other)}
    ranks = tuple(replace(facts, stack=(*facts.stack, deeper[facts.rank])) for facts in facts.ranks)
    facts = replace(facts, ranks=ranks)
    assert with_common_paths(facts) is facts


@pytest.mark.parametrize("library", [f"{SITE}/torch/nn/module.py", "/home/me/conda/lib/python3.12/threading.py"])
def test_copies_of_the_code_beside_a_shared_environment_are_one(library: str) -> None:
    def rank(number: int, host: str) -> RankFacts:
        facts = waiting(number, host, f"/home/me/{host}/x/train.py")
        return replace(facts, stack=(*facts.stack, Frame(file=library, line=3, function="call")))

    facts = with_common_paths(job(rank(0, "a"), rank(1, "b"), world=2))
    assert {one.stack[0].file for one in facts.ranks} == {"/home/me/a/x/train.py"}


def test_the_page_shows_the_line_of_a_rank_whose_host_has_the_code_elsewhere() -> None:
    facts = job(waiting(0, "a", "/home/me/x/train.py"), waiting(1, "b", "/local/7/x/train.py"), world=2)
    stacks = (replace(one, stack=(replace(one.stack[0], code="x.sum().item()"),)) for one in facts.ranks)
    facts = replace(facts, ranks=tuple(stacks))
    found = Finding(
        rule="a-cause",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        summary="Rank 1 waits.",
        ranks=(1,),
        location="/home/me/x/train.py:7 in train",
        remedy="",
    )
    causes = causes_of(Diagnosis(job=facts, findings=(found,)), Timeline(facts), lambda *_: "", ())
    assert [cause.code for cause in causes] == ["x.sum().item()"]
