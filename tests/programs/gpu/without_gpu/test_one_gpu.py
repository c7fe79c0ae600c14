"""How ranks that share a GPU are told apart, started and ended; here they are programs that use none."""

import sys
import time
from contextlib import suppress
from pathlib import Path

import one_gpu
import psutil
import pytest

ME = "import os; print(os.environ['NODE_RANK'], os.environ['NCCL_HOSTID'], flush=True)\n"


def test_ranks_are_nodes_with_one_device_that_report_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(one_gpu.REHEARSAL, raising=False)
    first, last = (one_gpu.environment(rank, 4, 29500, {"CUDA_VISIBLE_DEVICES": "3,5"}) for rank in (0, 3))
    assert {name for name in first if first[name] != last[name]} == {"NODE_RANK", "NCCL_HOSTID"}
    assert (last["NODE_RANK"], last["LOCAL_RANK"], last["PL_TRAINER_NUM_NODES"]) == ("3", "0", "4")
    assert first["CUDA_VISIBLE_DEVICES"] == last["CUDA_VISIBLE_DEVICES"] == "3"
    assert (last["NCCL_HOSTID"], last["NCCL_SOCKET_IFNAME"], last["NCCL_MAX_CTAS"]) == ("fake3", "lo", "2")
    assert (last["NCCL_IB_DISABLE"], last["NCCL_NVLS_ENABLE"]) == ("1", "0")


@pytest.mark.parametrize(("rehearses", "device"), [("0", "3"), ("1", "")])
def test_ranks_that_are_started_otherwise_are_told_only_how_to_share(
    rehearses: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(one_gpu.REHEARSAL, rehearses)
    inherited = {"CUDA_VISIBLE_DEVICES": "3,5"}
    told = one_gpu.sharing(2, inherited)
    assert {name for name in told if not name.startswith("NCCL_")} == {"CUDA_VISIBLE_DEVICES"}
    assert (told["NCCL_HOSTID"], told["CUDA_VISIBLE_DEVICES"]) == ("fake2", device)
    assert told.items() <= one_gpu.environment(2, 4, 29500, inherited).items()


def test_what_a_launcher_has_set_is_not_passed_on() -> None:
    theirs = {"SLURM_NTASKS": "8", "TORCHELASTIC_RUN_ID": "x", "RANK": "7", "NCCL_DEBUG": "INFO", "HOME": "/h"}
    env = one_gpu.environment(0, 2, 1, theirs)
    assert not {"SLURM_NTASKS", "TORCHELASTIC_RUN_ID", "RANK", "NCCL_DEBUG"} & env.keys()
    assert env["HOME"] == "/h"


def test_lightning_takes_the_number_of_nodes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples give their Trainer no ``num_nodes``; by this the ranks of several nodes find each other."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.argparse import _parse_env_variables

    monkeypatch.setenv("PL_TRAINER_NUM_NODES", one_gpu.environment(1, 3, 1)["PL_TRAINER_NUM_NODES"])
    assert _parse_env_variables(Trainer).num_nodes == 3


def test_every_rank_runs_and_is_heard(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"{ME}import sys; sys.exit(int(os.environ['NODE_RANK']) * int(os.environ['TIMES']))\n")
    ended = one_gpu.run_ranks([str(script)], 2, tmp_path / "out", timeout_s=30, more={"TIMES": "3"})
    assert ended.exit_codes == (0, 3)
    assert ended.said == ("0 fake0\n", "1 fake1\n")
    assert "--- rank 1, exit code 3\n1 fake1" in ended.story


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_rank_that_does_not_end_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    child = f"[{sys.executable!r}, '-c', 'import time; time.sleep(100)']"
    script.write_text(
        f"import os, subprocess, time\nif os.environ['NODE_RANK'] == '1':\n"
        f"    print(subprocess.Popen({child}).pid, flush=True)\n    time.sleep(100)\n"
    )
    began = time.monotonic()
    ended = one_gpu.run_ranks([str(script)], 2, tmp_path, timeout_s=2)
    assert ended.exit_codes == (0, None)
    child_pid = int(ended.said[1])
    while (ended_within_s := time.monotonic() - began) < 20 and runs(child_pid):
        time.sleep(0.01)
    assert ended_within_s < 20
