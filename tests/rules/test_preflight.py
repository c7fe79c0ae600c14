"""Every cause on a host: found with its ranks and numbers, alone, and neither at its threshold nor on healthy hosts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from preflight_builders import (
    CORES,
    DATA,
    GB,
    LOGS,
    PER_HOST,
    absent,
    checking,
    directory,
    having,
    parts_and_fields,
)
from preflight_scenes import (
    ERROR,
    ONE,
    QUIET,
    SCENES,
    TOGETHER,
    TWO,
    Scene,
    gpu,
    host,
    loading,
    network,
    swap,
)

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Confidence, Finding
from lightning_ncclsafe.report.tables.preflight import render_preflight, render_preflight_all
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.hosts import JobHosts
from lightning_ncclsafe.rules.kit.rule import SECTIONS, Rule
from lightning_ncclsafe.rules.preflight import PREFLIGHT_RULES

EVIL = "\x1b[2J\x1b]0;owned\x07\r\n\x00\x9b31m\u202e\u2028\ud800"


def found(job: JobFacts) -> tuple[Finding, ...]:
    diagnosis = judge(job, PREFLIGHT_RULES)
    assert not [line for line in diagnosis.unanswered if "failed" in line]
    return diagnosis.findings


def by_name(scene: Scene) -> str:
    return scene.name


@pytest.mark.parametrize("scene", SCENES, ids=by_name)
def test_the_cause_is_found_alone(scene: Scene) -> None:
    findings = [finding for finding in found(scene.job) if finding.rule not in TOGETHER.get(scene.name, ())]
    for finding in findings:
        assert_complete(finding)
    assert [(f.rule, f.ranks, f.severity) for f in findings] == [(scene.rule, scene.ranks, scene.severity)], findings
    for words in scene.says:
        assert words in findings[0].summary, findings[0].summary


def assert_complete(finding: Finding) -> None:
    assert finding.summary.endswith(".") and "  " not in finding.summary and finding.summary[0].isupper()
    assert ".." not in finding.summary.replace("(...)", "")
    assert finding.remedy.endswith(".")
    assert finding.evidence and all(item.text.endswith(".") for item in finding.evidence)


def test_every_rule_has_a_scene() -> None:
    assert {scene.rule for scene in SCENES} == {rule.name for rule in PREFLIGHT_RULES}


@pytest.mark.parametrize("rule", PREFLIGHT_RULES, ids=lambda rule: rule.name)
def test_rules_explain_themselves(rule: Rule[Any]) -> None:
    assert rule.summary and tuple(rule.sections) == SECTIONS


@pytest.mark.parametrize("name", QUIET)
def test_what_is_healthy_is_not_found(name: str) -> None:
    assert found(QUIET[name]) == ()


@pytest.mark.parametrize("world", [1, 2, 8, 9, 64])
def test_a_healthy_job_of_any_size(world: int) -> None:
    assert found(checking(world)) == ()


# Facts that are not there

# A setting, an interface or a port that only some ranks have is a difference; what could not be found out is none.
DIFFERENCES = {
    "settings": {"different-settings"},
    "network": {"unreachable-interface", "socket-fallback"},
    "default_interface": {"unreachable-interface"},
    "infiniband_active": {"socket-fallback"},
}


@pytest.mark.parametrize(("part", "name"), parts_and_fields(), ids=lambda text: text or "all")
def test_what_is_absent_is_no_finding_and_no_error(part: str, name: str) -> None:
    job = having(TWO, part=part, **{name: absent(part, name)})
    assert found(job) == ()
    render_preflight_all(judge(job, PREFLIGHT_RULES))


@pytest.mark.parametrize(("part", "name"), parts_and_fields(), ids=lambda text: text or "all")
@pytest.mark.parametrize("rank", [0, 5])
def test_what_is_absent_on_one_rank_is_no_error(part: str, name: str, rank: int) -> None:
    job = having(TWO, rank, part=part, **{name: absent(part, name)})
    assert {finding.rule for finding in found(job)} == DIFFERENCES.get(name, set())


def test_a_rank_that_knows_nothing_hides_no_cause() -> None:
    job = everything_wrong(16)
    blind = having(job, 7, **{name: absent("", name) for part, name in parts_and_fields() if not part})
    assert {finding.rule for finding in found(blind)} == {finding.rule for finding in found(job)}


# Shares of cores


@pytest.mark.parametrize(
    "mask",
    [
        lambda rank: tuple(range(CORES)),
        lambda rank: tuple(range(8 * rank, 8 * rank + 8)),
        lambda rank: tuple(range(32 * (rank // 4), 32 * (rank // 4) + 32)),
    ],
    ids=["unbound", "bound", "by NUMA node"],
)
def test_each_of_eight_ranks_has_eight_cores(mask: Callable[[int], tuple[int, ...]]) -> None:
    (one,) = JobHosts(host(ONE, cpus=mask)).hosts
    assert one.core_shares() == pytest.approx(dict.fromkeys(range(8), 8.0))


def test_a_quota_is_shared_by_the_ranks_in_its_group() -> None:
    (one,) = JobHosts(host(ONE, quota_cores=6.0, quota_group=lambda rank: f"/{rank // 4}")).hosts
    assert one.core_shares() == pytest.approx(dict.fromkeys(range(8), 1.5))


def test_a_wider_quota_above_may_leave_less() -> None:
    quotas = {"quotas": lambda rank: {f"/job/{rank}": 2.0, "/job": 12.0}, "quota_cores": 2.0}
    (one,) = JobHosts(host(ONE, **quotas)).hosts
    assert one.core_shares() == pytest.approx(dict.fromkeys(range(8), 1.5))


def test_a_rank_that_knows_no_cores_has_no_share() -> None:
    (one,) = JobHosts(host(ONE, 3, cpus=(), quota_cores=None)).hosts
    assert 3 not in one.core_shares() and len(one.core_shares()) == 7


# Many, and hostile


def everything_wrong(world: int, evil: str = "") -> JobFacts:
    """Every rule has something to say, with numbers and words of each rank's own."""
    job = checking(world, silent=(world - 1,))
    job = loading(
        job, loader_workers=lambda rank: 200 + rank, batches_in_flight=10**6, replica_bytes=10**12, omp_threads=99
    )
    job = host(
        job, memory_available_bytes=lambda rank: rank, shm_free_bytes=5, cpus=lambda rank: tuple(range(rank, 70 + rank))
    )
    job = host(job, slurm_cpus_per_task=lambda rank: 100 + rank)
    job = swap(job, used_bytes=lambda rank: 10**11 + rank, on_network=(evil or "nfs",), memory_stalled=0.5)
    job = gpu(job, uuid=evil or "same", name=lambda rank: f"{evil}{rank}", throttled_by=(evil or "heat",))
    job = gpu(job, foreign_processes=lambda rank: (f"{evil}{rank}",), xids=(evil or "79",))
    job = network(job, interfaces=lambda rank: (f"eth0 {rank} Mbit/s 10.{rank % 250}.0.1",), infiniband_off=evil or "x")
    job = network(job, infiniband_active=lambda rank: rank)
    job = having(job, open_files_limit=5, clock_offset_s=lambda rank: 10.0 + rank)
    wrong = [
        replace(one, problem=evil or "dead", append_s=1.0, read_s=1.0, free_bytes=1, path=evil or one.path)
        for one in (LOGS, DATA)
    ]
    job = having(job, directories=tuple(wrong), versions=lambda rank: {evil or "torch": f"{rank}{evil}"})
    names = {f"NCCL_{evil}X": evil or "1", "NCCL_TIMEOUT": evil or "1", "CUDA_LAUNCH_BLOCKING": evil or "1"}
    return having(job, settings=lambda rank: {**names, f"NCCL_ALGO{rank % 7}": f"{rank}{evil}"})


def test_a_thousand_ranks_are_judged_and_told() -> None:
    job = everything_wrong(1_024)
    diagnosis = judge(job, PREFLIGHT_RULES)
    text = render_preflight(diagnosis)
    assert {finding.rule for finding in diagnosis.findings} == {rule.name for rule in PREFLIGHT_RULES}
    assert len(text.splitlines()) < 40
    assert all(len(finding.evidence) <= 8 and len(finding.summary) < 2_000 for finding in diagnosis.findings)


def test_hosts_that_are_alike_are_reported_once() -> None:
    (finding,) = found(loading(checking(1_024), loader_workers=24))
    assert finding.summary.startswith("Ranks 0-1023 (128 hosts): 192 loader workers and 8 other threads on 64 cores")
    assert len(finding.evidence) == 1


def test_the_worst_is_reported_first_and_the_rest_is_counted() -> None:
    (finding,) = found(swap(checking(64), used_bytes=lambda rank: (20 + rank // PER_HOST) * GB))
    assert finding.summary.startswith("Ranks 56-63 (node-7): 27.0 GB of swap")
    assert finding.summary.endswith("; 5 more in the evidence.")
    assert len(finding.evidence) == 8


def test_a_finding_is_as_bad_as_the_worst_of_it() -> None:
    (finding,) = found(directory(directory(ONE, "logs", 0, problem="read-only"), "logs", 3, problem="not found"))
    assert finding.severity is ERROR and finding.ranks == (0, 3)
    assert finding.summary.index("read-only") < finding.summary.index("rank 3 (node-0): ")


def test_words_of_hosts_do_no_harm() -> None:
    diagnosis = judge(everything_wrong(16, EVIL), PREFLIGHT_RULES)
    assert not diagnosis.unanswered
    for text in (render_preflight(diagnosis), render_preflight_all(diagnosis)):
        assert not [char for char in text if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]
        assert "\\x1b[2J" in text
        text.encode()


# With the judge


def test_what_could_not_be_found_out_is_reported_once() -> None:
    job = having(checking(4, missing=("The store was slow.",)), 1, 2, missing=("no /proc/pressure",))
    assert judge(job, PREFLIGHT_RULES).unanswered == ("The store was slow.", "Ranks 1-2: no /proc/pressure")


def test_rules_about_hosts_say_nothing_of_other_incidents() -> None:
    assert not set(PREFLIGHT_RULES) & {*AGREEMENT_RULES, *HANG_RULES}
    assert judge(TWO, AGREEMENT_RULES).findings == ()


def test_what_is_certain_and_harmful_comes_first() -> None:
    diagnosis = judge(everything_wrong(64), PREFLIGHT_RULES)
    assert [finding.rule for finding in diagnosis.findings][:2] == ["unusable-directory", "gpu-memory-short"]
    last = diagnosis.findings[-1]
    assert (last.rule, last.confidence) == ("unreachable-interface", Confidence.LIKELY)
