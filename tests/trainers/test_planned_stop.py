"""Wrong code is not started again: the start after it ends before it trains, with a status of its own, and says why."""

from pathlib import Path

import pytest
from warm import Warm, ranks_of

from lightning_ncclsafe.errors import STOP_CODE
from lightning_ncclsafe.facts.findings import Plan
from lightning_ncclsafe.report.json import PLAN_FILE, read_plan

SCENARIO = Path(__file__).with_name("scenario.py")
LIMIT_S = 150


def start(warm: Warm, folder: Path, *options: str, job: str = "bert") -> tuple[list[int], str]:
    argv = [str(SCENARIO), *options, f"--root-dir={folder}"]
    envs = [rank | {"NCCLSAFE_JOB": job} for rank in ranks_of(2)]
    return warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs)


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_restart_with_the_same_faulty_code_ends_before_training(warm: Warm, tmp_path: Path) -> None:
    codes, output = start(warm, tmp_path, "misspell")
    assert all(codes) and STOP_CODE not in codes, output
    assert output.count("[ncclsafe] next: stop: the fault recurs until the code") == 1, output
    (path,) = tmp_path.glob(f"ncclsafe/*/{PLAN_FILE}")
    plan = read_plan(path)
    assert plan is not None and (plan.plan, plan.rule, plan.launch) == (Plan.STOP, "failed-rank", "job bert")

    codes, output = start(warm, tmp_path, "nothing")
    assert codes == [STOP_CODE, STOP_CODE], output
    ours = [line for line in output.splitlines() if line.startswith("[ncclsafe]")]
    assert output.count("this start ends before training: the previous start ended with failed-rank") == 1
    assert any(str(path) in line for line in ours) and "Traceback" not in output, output
    assert len([*tmp_path.glob("ncclsafe/*/report.json")]) == 1, "it is not an incident of its own"

    path.unlink()
    codes, output = start(warm, tmp_path, "nothing")
    assert codes == [0, 0], output
