"""Which rank this is, under every launcher and scheduler that Lightning knows by its variables."""

import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from guard_of import begun
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_ncclsafe import SafeDDP
from lightning_ncclsafe.strategies.call_exchanges import meeting_place

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
ELASTIC |= {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODELIST": "a,b",
}
LSF = {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "0", "LSB_JOBID": "1"}

CASES = [
    pytest.param(TorchElasticEnvironment, ELASTIC, 2, (3, 1, 4), id="torchrun"),
    pytest.param(
        SLURMEnvironment,
        SLURM | {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
        2,
        (3, 1, 4),
        id="slurm",
    ),
    pytest.param(
        SLURMEnvironment,
        SLURM | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
        2,
        (1, 0, 4),
        id="slurm, dealt out in turn",
    ),
    pytest.param(KubeflowEnvironment, {"RANK": "2", "WORLD_SIZE": "4"}, 1, (2, 0, 4), id="kubeflow"),
    pytest.param(LSFEnvironment, LSF, 2, (2, 0, 4), id="lsf"),
    pytest.param(LightningEnvironment, {"NODE_RANK": "1", "LOCAL_RANK": "1"}, 2, (3, 1, 4), id="lightning"),
]


def strategy_of(environment: ClusterEnvironment, devices: int) -> SafeDDP:
    strategy = SafeDDP(cluster_environment=environment, parallel_devices=[torch.device("cpu")] * devices)
    strategy.num_nodes = 4 // devices
    return strategy


@pytest.fixture(autouse=True)
def environ(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = request.node.callspec.params["variables"]
    (tmp_path / "hosts").write_text("launch\nother\nother\nhere\nhere\n")
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # strategies set it, for all of the process
    for name, value in (MASTER | {"LSB_DJOB_RANKFILE": str(tmp_path / "hosts")} | given).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("kind", "variables", "devices", "place"), CASES)
def test_the_place_is_that_of_lightnings_environment(
    kind: type[ClusterEnvironment], variables: dict[str, str], devices: int, place: tuple[int, int, int]
) -> None:
    strategy = strategy_of(kind(), devices)
    begun(strategy, guard := MagicMock()).close()
    found = guard.call_args.kwargs["place"]
    environment = strategy.cluster_environment
    assert environment is not None and environment.creates_processes_externally
    assert (found.rank, found.local_rank, found.world_size) == place
    assert (found.rank, found.world_size) == (environment.global_rank(), environment.world_size())
    assert (found.local_world_size, found.master_port) == (devices, str(environment.main_port))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (ELASTIC | {"GROUP_WORLD_SIZE": "1"}, "10.0.0.1-29500-job-1"),
        # Each of torchrun's agents counts by itself.
        (ELASTIC, "10.0.0.1-29500-job"),
        ({"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "2"}, "10.0.0.1-29500-4711-2"),
    ],
)
def test_the_ranks_of_one_start_meet_under_one_name(variables: dict[str, str], says: str) -> None:
    assert os.environ["MASTER_PORT"] == "29500"
    assert meeting_place(strategy_of(TorchElasticEnvironment(), 2)) == says
