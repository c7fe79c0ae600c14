"""Ranks that wait for a lock on a file, which another rank has."""

import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_inspection import SITE, look, rank, user

from lightning_ncclsafe.facts import FileLock
from lightning_ncclsafe.facts.findings import Confidence
from lightning_ncclsafe.inspecting.facts_of_looks import job_facts
from lightning_ncclsafe.inspecting.joining import diagnosis_of
from lightning_ncclsafe.inspecting.looks import SeenFrame
from lightning_ncclsafe.probes.process.file_locks import awaited_lock

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


@pytest.mark.parametrize(("pid", "found"), [(4712, FileLock(holder=4711)), (4711, None), (4713, None), (1, None)])
def test_who_waits_and_who_has_it_is_what_the_kernel_lists(tmp_path: Path, pid: int, found: FileLock | None) -> None:
    (tmp_path / "locks").write_text(LOCKS)
    assert awaited_lock(pid, tmp_path) == found


def test_a_process_that_waits_for_a_lock_of_ours_is_seen_to(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-S", "-c", WAITS, str(path)]) as process:
            ends_s, found = time.monotonic() + 30, None
            while found is None and time.monotonic() < ends_s:
                found = awaited_lock(process.pid)
            process.kill()
    assert found == FileLock(path=str(path), holder=os.getpid())


@pytest.mark.parametrize(
    ("holder", "rule", "confidence"),
    [(0, "rank-behind", Confidence.LIKELY), (-1, "rank-zero-only-work", Confidence.LIKELY)],
)
def test_who_waits_for_a_lock_that_another_rank_has_does_no_work_of_its_own(
    tmp_path: Path, holder: int, rule: str, confidence: Confidence
) -> None:
    source = tmp_path / "train.py"
    source.write_text("if rank == 1:\n    flock(file)\n")
    backward = SeenFrame(f"{SITE}/torch/autograd/graph.py", 9, "_engine_run_backward")
    times = (0.0, 12.0, 24.0)
    locked = rank(1, *(look(at_s, SeenFrame(str(source), 2, "<module>")) for at_s in times))
    locked = replace(locked, file_lock=FileLock(path="/srv/cache.lock", holder=100, rank=holder))
    waits = rank(0, *(look(at_s, user(20), backward) for at_s in times))
    first = diagnosis_of(job_facts([waits, locked])).findings[0]
    assert (first.rule, first.ranks, first.confidence) == (rule, (1,), confidence)
    assert ("waits for the lock on /srv/cache.lock, which rank 0 has" in first.summary) is (holder == 0)
    assert first.location == f"{source}:2 in <module>"
