"""PyTorch's Flight Recorder is on in every rank, with the size that is wanted, whoever has launched it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from warm import Warm, ranks_of

LIMIT_S = 150

FIT = Path(__file__).with_name("recorder_fit.py")
NEW, OLD = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
FIRST = [("lightning", "spawn"), ("lightning", "popen")]


class Outcome(NamedTuple):
    """How many entries the recorder of each rank has, what the environment says of its size, and our own lines."""

    recorded: list[int]
    sizes: list[dict[str, str | None]]
    said: list[str]


def run_program(warm: Warm, folder: Path, launcher: str, start_method: str, *variables: str) -> Outcome:
    added = {"OMP_NUM_THREADS": "1", **dict(variable.split("=") for variable in variables)}
    envs = [added | rank for rank in {"lightning": [{}], "torchrun": torchrun(), "slurm": slurm()}[launcher]]
    # Ranks that Lightning starts: it spawns both, and starts one more as a program beside the first.
    children = {"spawn": 2, "popen": 1}.get(start_method, 0) if launcher == "lightning" else 0
    argv = [str(FIT), str(folder), start_method]
    codes, output = warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs, children=children)
    assert set(codes) == {0}, output
    ranks = [json.loads((folder / f"rank-{rank}").read_text()) for rank in (0, 1)]
    said = [line for line in output.splitlines() if line.startswith("[ncclsafe] ")]
    return Outcome([recorded for recorded, _ in ranks], [sizes for _, sizes in ranks], said)


def torchrun() -> list[dict[str, str]]:
    """What its agent gives to ranks."""
    job = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "4711"}
    return [job | rank | {"RANK": rank["LOCAL_RANK"]} for rank in ranks_of(2)]


def slurm() -> list[dict[str, str]]:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_PORT": ranks_of(1)[0]["MASTER_PORT"]}
    return [job | {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"} for rank in range(2)]


@pytest.mark.parametrize(
    "launched",
    [
        pytest.param(by, marks=pytest.mark.program(*by), id=" ".join(by))
        for by in [*FIRST, ("lightning", "fork"), ("torchrun", "popen"), ("torchrun", "none"), ("slurm", "popen")]
    ],
)
def test_the_recorder_is_on_with_every_launcher(launched: Any, outcome: Outcome) -> None:
    assert all(recorded >= 8 for recorded in outcome.recorded)  # one collective a batch at least
    assert outcome.sizes == [dict.fromkeys([NEW, OLD])] * 2  # nothing is left behind
    assert not [line for line in outcome.said if "Flight Recorder" in line]


@pytest.mark.program("lightning", "fork", f"{OLD}=5")
def test_a_user_s_own_size_is_kept_in_the_old_spelling(outcome: Outcome) -> None:
    assert outcome.recorded == [5, 5]
    assert all(sizes[OLD] == "5" for sizes in outcome.sizes)


@pytest.mark.program("lightning", "fork", f"{NEW}=0")
def test_one_rank_reports_in_one_line_that_the_recorder_is_off(outcome: Outcome) -> None:
    assert outcome.recorded == [0, 0]
    (line,) = (line for line in outcome.said if "Flight Recorder" in line)
    assert "collectives with gloo, and the Flight Recorder has no entry" in line
    assert "TORCH_FR_BUFFER_SIZE=2000" in line


def test_the_size_that_a_timer_wants_is_there_although_the_guard_has_looked_before(warm: Warm, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = f"""
import os, torch, torch.distributed as dist
from types import SimpleNamespace
from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.strategies import guarded_call
from lightning_ncclsafe.probes.process.flight_recorder import position
guarded_call.RECORDER_SIZE = 7
call = guarded_call.GuardedCall.__new__(guarded_call.GuardedCall)
call._trainer = SimpleNamespace(callbacks=[SimpleNamespace(settings=guarded_call.TimerSettings())])
call._guard = None
call._place = None
call._begin = lambda strategy: position()
call.begin(None)
with call.recorder():
    dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
for _ in range(20):
    dist.all_reduce(torch.ones(1))
print([len(dump["entries"]) for dump in recorders.dumps(collectives=True) if dump.get("entries")])
print([name for name in os.environ if name in recorders._SIZES])
dist.destroy_process_group()
"""
    program.write_text(text)
    codes, output = warm.run([str(program)], tmp_path, timeout_s=60)
    assert codes == [0], output
    assert output.splitlines()[-2:] == ["[7]", "[]"], output
