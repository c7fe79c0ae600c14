"""Every canonical scene, on both back ends, must put its own cause first: the rules are told apart here."""

from typing import Any

import pytest
from builders import GLOO, NCCL, Backend
from call_scenes import CALL_SCENES
from machine_scenes import MACHINE_SCENES
from scenes import SCENES as OTHER_SCENES
from scenes import Scene

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.rule import SECTIONS, Rule

BACKENDS = (GLOO, NCCL)
SCENES = (*OTHER_SCENES, *CALL_SCENES, *MACHINE_SCENES)


def all_scenes() -> list[object]:
    return [
        pytest.param(scene, backend, id=f"{scene.name} on {backend.name}") for scene in SCENES for backend in BACKENDS
    ]


@pytest.mark.parametrize(("scene", "backend"), all_scenes())
def test_the_cause_comes_first(scene: Scene, backend: Backend) -> None:
    first = judge(scene.build(backend)).findings[0]
    assert (first.rule, first.ranks) == (scene.rule, scene.ranks), first.summary
    if scene.location:
        assert first.location == scene.location


@pytest.mark.parametrize(("scene", "backend"), all_scenes())
def test_findings_are_complete(scene: Scene, backend: Backend) -> None:
    diagnosis = judge(scene.build(backend))
    assert not [line for line in diagnosis.unanswered if "failed" in line]
    for finding in diagnosis.findings:
        assert finding.summary.endswith(".") and "  " not in finding.summary
        assert finding.remedy
        assert finding.evidence
        assert finding.ranks == tuple(sorted(set(finding.ranks)))
    # That a rank is behind is no news beside its cause; a timeout is none.
    is_told = "rank-behind" in {finding.rule for finding in diagnosis.findings}
    assert scene.rule in ("rank-behind", "timeout-misuse") or not is_told


def test_every_rule_has_a_scene() -> None:
    assert {scene.rule for scene in SCENES} == {rule.name for rule in HANG_RULES}


@pytest.mark.parametrize("rule", HANG_RULES, ids=lambda rule: rule.name)
def test_rules_explain_themselves(rule: Rule[Any]) -> None:
    assert rule.summary and tuple(rule.sections) == SECTIONS


@pytest.mark.parametrize("rule", HANG_RULES, ids=lambda rule: rule.name)
def test_scenes_notice_a_missing_rule(rule: Rule[Any]) -> None:
    """Without its rule no scene of this cause may pass, or the scenes would test nothing."""
    others = tuple(other for other in HANG_RULES if other is not rule)
    scenes = [scene for scene in SCENES if scene.rule == rule.name]
    assert scenes
    for scene in scenes:
        diagnosis: Diagnosis = judge(scene.build(GLOO), others)
        assert scene.rule not in {finding.rule for finding in diagnosis.findings}
