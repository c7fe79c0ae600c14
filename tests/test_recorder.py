"""PyTorch's Flight Recorder is on in every rank, with the size that is wanted, whoever has launched it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe import _torch

LIMIT_S = 100
pytestmark = pytest.mark.timeout(LIMIT_S + 20)

# Looks at the recorder before there is a process group, as the guard's thread does.
FIT = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_ncclsafe import SafeDDP, SafeModelParallel, _torch, watched
from lightning_ncclsafe.probes.flight_recorder import position

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def configure_model(self): ...
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def on_train_end(self):
        recorded = sum(len(dump.get("entries", ())) for dump in _torch.recorder_dumps(collectives=True))
        sizes = {name: os.environ.get(name) for name in _torch._RECORDER_SIZES}
        Path(options["folder"], f"rank-{self.global_rank}").write_text(json.dumps([recorded, sizes]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def main():
    begin = watched.WatchedCall._begin
    def begin_and_look(call, strategy):
        begin(call, strategy)
        position()
    watched.WatchedCall._begin = begin_and_look
    kind = {"SafeDDP": SafeDDP, "SafeModelParallel": SafeModelParallel}[options["strategy"]]
    split = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    given = {"start_method": options["start_method"]} if kind is SafeDDP else split
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, default_root_dir=options["folder"], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=kind(**given),
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4))

options = json.loads(os.environ["OPTIONS"])
if __name__ == "__main__":
    main()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(folder: Path, *launcher: str, **options: Any) -> tuple[list[list[Any]], list[str]]:
    """What the recorder of each rank has at the end and the environment says of its size; and our own lines."""
    program = folder / "fit.py"
    program.write_text(FIT)
    given = {"folder": str(folder), "start_method": "popen", "strategy": "SafeDDP"}
    environment = {name: value for name, value in os.environ.items() if name not in _torch._RECORDER_SIZES}
    environment |= {"OPTIONS": json.dumps({**given, **options.pop("given", {})}), "OMP_NUM_THREADS": "1", **options}
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"rank-{rank}").read_text()) for rank in (0, 1)]
    return ranks, [line for line in done.stderr.splitlines() if line.startswith("[ncclsafe] ")]


@pytest.mark.parametrize(
    ("launcher", "given"),
    [
        ([], {"start_method": "popen"}),
        ([], {"start_method": "spawn"}),
        ([], {"start_method": "fork"}),
        (TORCHRUN, {}),
        # Without a launcher of Lightning's.
        (TORCHRUN, {"strategy": "SafeModelParallel"}),
    ],
    ids=["script", "spawn", "fork", "torchrun", "torchrun without a launcher"],
)
def test_the_recorder_is_on_with_every_launcher(launcher: list[str], given: dict[str, Any], tmp_path: Path) -> None:
    ranks, said = launch(tmp_path, *launcher, given=given)
    for recorded, sizes in ranks:
        # One collective a batch at least, and nothing is left behind.
        assert recorded >= 8
        assert sizes == dict.fromkeys(_torch._RECORDER_SIZES)
    assert not [line for line in said if "Flight Recorder" in line]


def test_a_user_s_own_size_is_kept_in_the_old_spelling(tmp_path: Path) -> None:
    name = _torch._RECORDER_SIZES[1]
    ranks, _ = launch(tmp_path, **{name: "5"})
    assert [recorded for recorded, _ in ranks] == [5, 5]
    assert all(sizes[name] == "5" for _, sizes in ranks)


def test_a_recorder_that_is_off_is_said_by_one_rank_in_one_line(tmp_path: Path) -> None:
    ranks, said = launch(tmp_path, TORCH_FR_BUFFER_SIZE="0")
    assert [recorded for recorded, _ in ranks] == [0, 0]
    (line,) = (line for line in said if "Flight Recorder" in line)
    assert "collectives with gloo, and the Flight Recorder has no entry" in line
    assert "TORCH_FR_BUFFER_SIZE=2000" in line


def test_the_size_that_a_timer_wants_is_there_although_the_guard_has_looked_before(tmp_path: Path) -> None:
    program = f"""
import os, torch, torch.distributed as dist
from types import SimpleNamespace
from lightning_ncclsafe import _torch, watched
from lightning_ncclsafe.probes.flight_recorder import position
watched.RECORDER_SIZE = 7
call = watched.WatchedCall.__new__(watched.WatchedCall)
call._trainer = SimpleNamespace(callbacks=[SimpleNamespace(settings=watched.TimerSettings())])
call._guard = None
call._place = None
call._begin = lambda strategy: position()
call.begin(None)
with call.recorder():
    dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
for _ in range(20):
    dist.all_reduce(torch.ones(1))
print([len(dump["entries"]) for dump in _torch.recorder_dumps(collectives=True) if dump.get("entries")])
print([name for name in os.environ if name in _torch._RECORDER_SIZES])
dist.destroy_process_group()
"""
    environment = {name: value for name, value in os.environ.items() if name not in _torch._RECORDER_SIZES}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["[7]", "[]"]
