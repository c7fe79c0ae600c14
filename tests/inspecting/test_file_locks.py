"""Ranks that wait for a lock on a file, which another rank has."""

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from polling import until
from test_inspection import SITE, look, rank, user

from lightning_ncclsafe.facts import FileLockFacts, LockHolder
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.inspecting.diagnosing import diagnosis_of
from lightning_ncclsafe.inspecting.facts_of_looks import job_facts
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.probes.process.lock_waits import awaited_lock

WAITS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
"""
LOCKS = """\
1: FLOCK  ADVISORY  WRITE 4711 08:01:131104 0 EOF
1: -> FLOCK  ADVISORY  WRITE 4712 08:01:131104 0 EOF
2: POSIX  ADVISORY  READ  4713 08:01:77 0 EOF
"""


@pytest.mark.parametrize(("pid", "holders"), [(4712, [4711]), (4711, None), (4713, None), (1, None)])
def test_waiters_and_holders_come_from_the_kernel(tmp_path: Path, pid: int, holders: list[int] | None) -> None:
    (tmp_path / "locks").write_text(LOCKS)
    lock = awaited_lock(pid, tmp_path)
    assert (None if lock is None else [holder.pid for holder in lock.holders]) == holders


def test_a_process_waiting_for_our_lock_is_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-S", "-c", WAITS, str(path)]) as process:
            try:
                found = until(lambda: awaited_lock(process.pid))
            finally:
                process.kill()
    assert (found.path, [holder.pid for holder in found.holders]) == (str(path), [os.getpid()])


@pytest.mark.parametrize(
    ("holder", "words"), [(100, "rank 0 holds it"), (4711, "process 4711, which is no rank of this job, holds it")]
)
def test_a_rank_waiting_for_a_lock_is_not_at_work(tmp_path: Path, holder: int, words: str) -> None:
    source = tmp_path / "train.py"
    source.write_text("if rank == 1:\n    flock(file)\n")
    backward = SeenFrame(f"{SITE}/torch/autograd/graph.py", 9, "_engine_run_backward")
    times = (0.0, 12.0, 24.0)
    locked = rank(1, *(look(at_s, SeenFrame(str(source), 2, "<module>")) for at_s in times))
    locked = replace(locked, file_lock=FileLockFacts(path="/srv/cache.lock", holders=(LockHolder(pid=holder),)))
    waits = rank(0, *(look(at_s, user(20), backward) for at_s in times))
    first = diagnosis_of(job_facts([waits, locked])).findings[0]
    assert (first.rule, first.ranks, first.confidence) == ("file-lock", (1,), Confidence.LIKELY)
    assert "the lock on /srv/cache.lock" in first.summary and words in first.summary
    assert first.location == f"{source}:2 in <module>"
