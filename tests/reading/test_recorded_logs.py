"""Logs of public threads, each with the truth about it, as far as that can be derived from the text alone.

``recorded`` holds logs of real NCCL jobs that were given to the project with their truth; ``threads`` holds excerpts of
other threads, whose truth was written down before they were read for the first time. Both name the thread as their
source; numbers of processes, names of hosts and paths were replaced.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from lightning_ncclsafe.findings import Confidence, Diagnosis, Finding
from lightning_ncclsafe.reading.evidence import Evidence
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

LOGS = Path(__file__).with_name("logs")
CANNOT_TELL = "cannot-tell"
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
    "all-joined": "all-joined-none-finished",
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
    evidence = Evidence()
    evidence.read(str(path))
    job = evidence.job()
    return judge(job, RECORDED_RULES) if job is not None else None


def score(folder: str, truth: Any) -> Score:
    diagnosis = diagnosed(LOGS / folder / truth["file"])
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


if __name__ == "__main__":
    for folder in ("recorded", "threads", "held"):
        scores = [(truth, score(folder, truth)) for truth in truths(folder)]
        for truth, one in scores:
            if not one.ranks:
                derivable = truth["derivable"]
                print(
                    f"{'rank' if one.kind else 'KIND'} {truth['file']:32} {derivable['kind']} {derivable['ranks']}: {one.said}"
                )
        kinds, ranks = sum(one.kind for _, one in scores), sum(one.ranks for _, one in scores)
        print(f"{folder}: kind {kinds}, kind and ranks {ranks}, of {len(scores)}")
