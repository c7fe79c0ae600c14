"""Logs as ranks and launchers write them, and what they are judged to say."""

import io

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 90, in <module>
    trainer.fit(model)
  File "/venv/lib/python3.12/site-packages/lightning/pytorch/trainer/trainer.py", line 1000, in _run
    return self._run_stage()
           ^^^^^^^^^^^^^^^^^
  File "/home/me/train.py", line 42, in training_step
    return self.loss(batch)
ValueError: bad label 11
"""


def read(text: str | bytes, rank: int | None = None) -> JobFacts | None:
    evidence = Artifacts()
    data = text.encode() if isinstance(text, str) else text
    evidence.log.read(io.BytesIO(data), len(data) + 1, rank)
    return evidence.job()


def judged(text: str | bytes, rank: int | None = None) -> Diagnosis:
    job = read(text, rank)
    assert job is not None
    diagnosis = judge(job, RECORDED_RULES)
    assert not [line for line in diagnosis.unanswered if "failed" in line]
    return diagnosis


def timeout(rank: int, seq: int = 61, op: str = "ALLREDUCE", numel: int = 4096, group: str = "0") -> str:
    about = "(default_pg)" if group == "0" else ""
    return (
        f"[rank{rank}]:[E1126 18:44:12.7 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for "
        "600061 milliseconds before timing out.\n"
        f"[rank{rank}]:[E1126 18:44:12.7 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID {group}{about} Rank {rank}]  "
        f"failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}, last completed "
        f"work: {seq - 1}\n"
    )


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())
