"""Ranks that disagree about their data do not start, and uneven data does not hang: whole Trainers, three ranks.

All cases are trained one after the other in the same three processes: to start them takes longer than any case.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("data_cases.py")
RANKS = 3
LIMIT_S = 150
# Of the first call of a case's fixture, which runs all of them.
pytestmark = pytest.mark.timeout(LIMIT_S + 20)

Outcomes = dict[str, list[dict[str, Any]]]


def run(folder: Path, *names: str) -> Outcomes:
    """What became of each case, by rank; of all cases if none is named."""
    results = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    environment |= {"OMP_NUM_THREADS": "1"}
    processes = []
    with (folder / "output.txt").open("w+") as output:
        for rank, result in enumerate(results):
            command = [sys.executable, str(CASES), *names, f"--result={result}"]
            its_own = environment | {"LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=its_own, stdout=output, stderr=output))
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [124]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        printed = output.read()
    by_rank = [json.loads(result.read_text()) if result.exists() else {} for result in results]
    assert not any(codes), f"exit codes {codes}, after {list(by_rank[0])}:\n{printed[-8000:]}"
    outcomes: Outcomes = {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
    return outcomes | {"printed": [{"text": printed}]}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(tmp_path_factory.mktemp("data"))
