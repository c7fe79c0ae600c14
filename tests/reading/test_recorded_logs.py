"""Logs of public threads, each with the truth about it, as far as that can be derived from the text alone.

``recorded`` holds the 39 logs of real NCCL jobs that were given to the project. ``threads`` holds 78 excerpts of other
threads, whose truth was written down before they were read for the first time (38 kinds were right then); ``held`` 29
more, read for the first time when those were (28 kinds were right); ``unseen`` 65 more, read for the first time when
all of these were (54 kinds were right, and with the ranks 53); ``afterwards`` 22 more (20 were right); ``further`` 95
more (79 kinds, and with the ranks 73); ``later`` 50 more (43, and 41); ``wider`` 91 more, of which one truth was mended
since (82, and 77); ``other`` 60 more, likewise (57, and 57); ``latest`` 61 more (51, and 47); ``fresh`` 52 more, some
of which allow two answers, and of which one truth was mended since (47, and 46); ``rewritten`` 40 more, each rewritten
after its thread (37, and 35); ``rewritten_again`` 30 more, likewise (30, and 26); ``pasted`` 32 more, likewise (30, and
28); ``excerpts`` 32 more, likewise (28, and 25). Each names its thread; numbers of processes, names of hosts and paths
were replaced. ``python tests/reading/test_recorded_logs.py`` prints the score and what is wrong.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_ncclsafe.facts.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

LOGS = Path(__file__).with_name("logs")
FOLDERS = (
    "recorded",
    "threads",
    "held",
    "unseen",
    "afterwards",
    "further",
    "later",
    "wider",
    "other",
    "latest",
    "fresh",
    "rewritten",
    "rewritten_again",
    "pasted",
    "excerpts",
)
CANNOT_TELL = "cannot-tell"
# Nobody is to blame: some truths name all ranks, and others none.
ALL_JOINED = "all-joined-none-finished"
# Which of our causes says which kind.
KINDS = {
    "silent-rank": "late-or-missing-rank",
    "host-stuck": "late-or-missing-rank",
    "diverged-collectives": "desync-different-op-or-size",
    "mismatched-collective": "desync-different-op-or-size",
    "out-of-step": "rank-ahead-or-behind",
    "late-at-init": "init-not-all-arrived",
    "dead-rank": "rank-died",
    "failed-rank": "rank-raised",
    "gpu-memory-exhausted": "rank-raised",
    "shm-exhausted": "rank-raised",
    "worker-died": "rank-raised",
    "all-joined": ALL_JOINED,
    "watchdog-stuck": "watchdog-stuck",
    "network-cut": "network",
}


class Score(NamedTuple):
    """What the first finding on a log got right: the kind, the ranks; and whether it, or another, is wrong and sure."""

    kind: bool
    ranks: bool
    said: str


def truths(folder: str) -> list[Any]:
    data = json.loads((LOGS / folder / "truth.json").read_text(encoding="utf-8"))
    assert {one["file"] for one in data} == {path.name for path in (LOGS / folder).glob("*.log")}
    return list(data)


def diagnosed(path: Path) -> Diagnosis | None:
    evidence = Artifacts()
    evidence.read(str(path))
    job = evidence.job()
    return judge(job, RECORDED_RULES) if job is not None else None


@cache
def recorded(folder: str, file: str) -> Diagnosis | None:
    """What is said of a log, which several tests look at."""
    return diagnosed(LOGS / folder / file)


def score(folder: str, truth: Any) -> Score:
    diagnosis = recorded(folder, truth["file"])
    findings = diagnosis.findings if diagnosis is not None else ()
    kind, ranks = truth["derivable"]["kind"], truth["derivable"]["ranks"]
    said = "; ".join(f"{one.confidence.value} {one.rule} {one.ranks}" for one in findings) or "nothing"
    if kind == CANNOT_TELL:
        is_right = not any(map(is_sure, findings))
        return Score(is_right, is_right, said)
    if not findings or KINDS.get(findings[0].rule) != kind:
        return Score(False, False, said)
    first = findings[0]
    return Score(True, first.ranks == tuple(ranks) if ranks is not None else not first.ranks, said)


def is_sure(finding: Finding) -> bool:
    return finding.confidence is not Confidence.POSSIBLE


# What is still missed, and is not worth a guess: see docs/cost/accuracy.md.
MISSED = (
    "gloo-closed-exit-code-10.log",
    "file-init-wait-timeout.log",
    "rank-1-one-work-ahead.log",
    "one-process-caught-out-of-memory.log",
    "tag-0-called-process-error.log",
    "hccp-not-initialized-rank-3.log",
    "jax-barrier-without-0-and-3.log",
    "16-auroc-raised-then-rank-1-waits.log",
    "38-report-of-32-joined-7422.log",
    "39-all-eight-joined-39-folded.log",
    "48-broadcast-3952-of-7-before-4-2-5.log",
    "10-packing-bars-at-thirty-minutes.log",
    "02-three-small-integers-broadcast.log",
    "13-nd20-fourth-epoch-again.log",
    # All ranks wait, and are named; these truths name none then.
    "03-zero-of-936-and-service-threads.log",
    "11-iteration-20-of-99-in-a-container.log",
    "14-iter-4150-of-two-on-one-node.log",
    "11-denoising-losses-then-828.log",
    "22-qwen-coder-float16-two-hosts.log",
    "22-smoke-test-blackwell-pair.log",
)
ALL = [(folder, truth) for folder in FOLDERS for truth in truths(folder)]


@pytest.mark.parametrize(("folder", "truth"), ALL, ids=[f"{folder}-{truth['file']}" for folder, truth in ALL])
def test_the_kind_and_ranks_are_correct(folder: str, truth: Any) -> None:
    is_right = score(folder, truth)[:2] == (True, True)
    assert is_right is (truth["file"] not in MISSED), score(folder, truth).said


@pytest.mark.parametrize(("folder", "truth"), ALL, ids=[f"{folder}-{truth['file']}" for folder, truth in ALL])
def test_certain_findings_are_true_and_likely_ranks_are_derivable(folder: str, truth: Any) -> None:
    diagnosis = recorded(folder, truth["file"])
    kind, ranks = truth["derivable"]["kind"], truth["derivable"]["ranks"]
    for finding in diagnosis.findings if diagnosis is not None else ():
        assert finding.confidence is not Confidence.CERTAIN or KINDS[finding.rule] == kind
        are_all = kind == KINDS.get(finding.rule) == ALL_JOINED
        is_derivable = not finding.ranks or (ranks and set(finding.ranks) <= set(ranks)) or are_all
        assert not is_sure(finding) or is_derivable, finding
        assert finding.remedy and finding.summary.endswith(".") and "  " not in finding.summary


@pytest.mark.parametrize(
    ("folder", "names"),
    [("recorded", ("8ranks.log", "allranks-4711.out")), *((folder, ("rank99.log",)) for folder in FOLDERS)],
)
def test_the_file_name_does_not_matter(folder: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever rank the name suggests: the lines belong to other ranks, or to all."""
    for truth in truths(folder):
        path = LOGS / folder / truth["file"]
        for name in names:
            (tmp_path / name).write_bytes(path.read_bytes())
            assert told(diagnosed(tmp_path / name)) == told(recorded(folder, truth["file"])), (name, path)


def told(diagnosis: Diagnosis | None) -> object:
    return diagnosis and [(one.rule, one.ranks, one.confidence, one.summary) for one in diagnosis.findings]


if __name__ == "__main__":
    for folder in FOLDERS:
        scores = [(truth, score(folder, truth)) for truth in truths(folder)]
        for truth, one in scores:
            if not one.ranks:
                wanted = truth["derivable"]
                wrong = "rank" if one.kind else "KIND"
                print(f"{wrong} {truth['file']:32} {wanted['kind']} {wanted['ranks']}: {one.said}")
        kinds, ranks = sum(one.kind for _, one in scores), sum(one.ranks for _, one in scores)
        print(f"{folder}: kind {kinds}, kind and ranks {ranks}, of {len(scores)}")
