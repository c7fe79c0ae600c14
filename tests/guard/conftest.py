"""Makes jobs of ranks that are threads, and sees to it that nothing of them is left."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from thread_ranks import Job

from lightning_ncclsafe.guard import after_verdict, reporter
from lightning_ncclsafe.settings import Limits, OnTimeout


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(
        *, on_timeout: OnTimeout = "abort", timeout_s: float = 1000.0, learned: bool = False, **changes: object
    ) -> Job:
        limits = Limits(suspect_after_s=0.1, timeout_s=timeout_s, on_timeout=on_timeout, learned=learned)
        job = Job(folder=tmp_path / "reports", limits=limits, **changes)  # type: ignore[arg-type]
        jobs.append(job)
        # Ranks that are threads never leave their process.
        monkeypatch.setattr(after_verdict, "_FAILED_LEAVE_S", 0.05)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        # It has a moment only, and where that is too short it is said.
        monkeypatch.setattr(reporter, "write_page", lambda *_: "")
        monkeypatch.setattr(after_verdict, "end_run", lambda *, rank, **_: job.end(rank))
        return job

    yield make
    for job in jobs:
        job.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ncclsafe")]
