"""Live processes, inspected from outside."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest
from polling import until
from warm import Warm, ranks_of

from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.inspection import inspect
from lightning_ncclsafe.inspecting.looks import StackReader
from lightning_ncclsafe.inspecting.ranks import SeenProcess, python_processes

PLAIN = """
    import os, sys, time

    def evaluate():
        open(sys.argv[1], "w").close()
        time.sleep(100)

    rank = int(os.environ["LOCAL_RANK"])
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        evaluate()
    dist.barrier()
"""
FAILED = """
    import atexit, sys, time

    def meet():
        open(sys.argv[1], "w").close()
        time.sleep(100)

    def train():
        raise KeyError("caption")

    atexit.register(meet)
    train()
"""
MOVING = """
    import sys

    def work(path):
        count = 0
        while True:
            count += 1
            if count == 1000:
                open(path, "w").close()

    work(sys.argv[1])
"""


@contextmanager
def started(text: str, folder: Path, **env: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that has said that it has begun."""
    program, begun = folder / "train.py", folder / "begun"
    program.write_text(dedent(text))
    process = subprocess.Popen([sys.executable, "-S", str(program), str(begun)], env=os.environ | env)
    try:
        until(begun.exists)
        yield process
    finally:
        process.kill()
        process.wait(10)


def diagnosis_of(text: str, folder: Path) -> Diagnosis:
    """What is said of a program that is the only rank of its job, found by its environment."""
    with started(text, folder, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="1") as process:
        (seen,) = (one for one in python_processes() if one.pid == process.pid)
        (diagnosis,) = inspect(looks=3, over_s=0.5, processes=lambda: [seen]).diagnoses
        assert process.poll() is None, "the inspection does not disturb it"
    return diagnosis


def test_the_stack_reader_is_installed() -> None:
    """It is installed with the test requirements: without it these tests could find nothing."""
    assert StackReader().is_there


def test_a_hanging_plain_script_is_explained(warm: Warm, tmp_path: Path) -> None:
    program, begun = tmp_path / "train.py", tmp_path / "begun"
    program.write_text(dedent(PLAIN))
    envs = ranks_of(2)
    with (tmp_path / "output").open("wb") as output:
        running = [
            warm.start([str(program), str(begun)], output=output.fileno(), cwd=tmp_path, env={**os.environ, **env})
            for env in envs
        ]
        try:
            until(begun.exists)
            # In a fork of a warm process the environment is not that of its start.
            seen = [SeenProcess(pid=one.pid, environment=env) for one, env in zip(running, envs, strict=True)]
            (diagnosis,) = inspect([one.pid for one in running], looks=3, over_s=1.0, processes=lambda: seen).diagnoses
        finally:
            for one in running:
                one.end_session()
                one.wait(10)
    first = diagnosis.findings[0]
    line = 1 + dedent(PLAIN).splitlines().index("    time.sleep(100)")
    assert (first.rule, first.ranks) == ("rank-zero-only-work", (0,)), first
    assert first.location == f"{program}:{line} in evaluate"
    assert "if rank == 0:" in first.summary and "for at least" in first.summary


def test_a_moving_process_is_found_by_its_environment(tmp_path: Path) -> None:
    diagnosis = diagnosis_of(MOVING, tmp_path)
    (facts,) = diagnosis.job.ranks
    assert facts.inspection is not None and facts.inspection.moved
    assert diagnosis.findings == () and facts.stack[-1].function == "work"


def test_an_uncaught_exception_is_read_while_atexit_waits(tmp_path: Path) -> None:
    (facts,) = diagnosis_of(FAILED, tmp_path).job.ranks
    assert facts.stack[-1].function == "meet" and facts.exception is not None
    assert (facts.exception.type, facts.exception.message) == ("KeyError", "'caption'")
    assert (facts.exception.stack[-1].function, facts.exception.stack[-1].code) == (
        "train",
        'raise KeyError("caption")',
    )


@pytest.mark.parametrize("arguments", [["--looks", "1"], ["--seconds", "0"]])
def test_a_single_look_is_refused(arguments: list[str]) -> None:
    from lightning_ncclsafe.cli import main

    assert main(["inspect", *arguments]) == 2


def test_diagnose_reads_the_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_ncclsafe.cli import main

    with started(MOVING, tmp_path) as process:
        folder = tmp_path / "evidence"
        options = ["--looks", "2", "--seconds", "0.3", "--format", "json", "--output", str(folder)]
        assert main(["inspect", "--pid", str(process.pid), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["findings"], report["job"]["incident"]["kind"]) == (1, [], "inspected")
    assert {path.name for path in folder.glob("*/*/*")} == {"report.html", "report.json", "report.txt"}
    assert main(["diagnose", str(folder)]) == 1
    assert "the job makes progress" in capsys.readouterr().out


def test_a_missing_process_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_ncclsafe.cli import main

    assert main(["inspect", "--pid", "999999999"]) == 2
    assert "process 999999999 is not a running Python process" in capsys.readouterr().err
