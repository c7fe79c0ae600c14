"""Whole programs as launchers and schedulers start them: on two hosts, started again, in a notebook."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from warm import Warm, ranks_of

PROGRAM = Path(__file__).with_name("launched.py")
LIMIT_S = 150
FIRST = [("agents",), ("hosts",)]


@dataclass
class Outcome:
    """How the programs ended, and what was said and written."""

    codes: list[int]
    output: str
    root: Path
    skipped: str = ""

    @property
    def said(self) -> list[str]:
        return [line.removeprefix("[ncclsafe] ") for line in self.output.splitlines() if line.startswith("[ncclsafe]")]

    def reports(self, host: str = "") -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.root / host).glob("ncclsafe/*/report.json"))]


def run_program(warm: Warm, folder: Path, kind: str, *options: str) -> Outcome:
    """Runs the programs of one job."""
    root = folder / "root"
    if kind == "hosts":
        return on_two_hosts(warm, folder, root)
    if kind == "agents":
        return under_two_agents(warm, folder, root)
    argv = [str(PROGRAM), *options, f"--root-dir={root}"] if options else [str(PROGRAM), kind, str(root)]
    envs = {"notebook": [{}], "slurm": slurm(), "kubeflow": kubeflow()}[kind]
    codes, output = warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs)
    return Outcome(codes, output, root)


def slurm() -> list[dict[str, str]]:
    """Two nodes of two tasks each, dealt out in turn: ``srun --distribution=cyclic``."""
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost",
        "NODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    ranks = [{"SLURM_PROCID": f"{r}", "SLURM_NODEID": f"{r % 2}", "SLURM_LOCALID": f"{r // 2}"} for r in range(4)]
    return [job | rank for rank in ranks]


def kubeflow() -> list[dict[str, str]]:
    """Two pods of one task each."""
    job = {"KUBERNETES_PORT": "tcp://127.0.0.1:443", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "NODES": "2"}
    return [job | {"MASTER_PORT": port, "RANK": str(rank)} for port in [free_port()] for rank in range(2)]


def free_port() -> str:
    return ranks_of(1)[0]["MASTER_PORT"]


def under_two_agents(warm: Warm, folder: Path, root: Path) -> Outcome:
    """Two of torchrun's agents, each with one rank; what goes wrong does so in the first start only."""
    port, marker = free_port(), folder / "started"
    # The first agent's store serves both starts.
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    agent += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    program = [
        str(PROGRAM),
        "raise-once",
        "--rank=1",
        "--devices=1",
        "--suspect-after=3",
        "--pace=0.05",
        f"--root-dir={root}",
    ]
    envs = [{"NODES": "2", "ONCE": str(marker), "PET_NODE_RANK": str(node)} for node in range(2)]
    # One for each start.
    codes, output = warm.run([*agent, *program], folder, timeout_s=LIMIT_S, envs=envs, children=2)
    return Outcome(codes, output, root)


def on_two_hosts(warm: Warm, folder: Path, root: Path) -> Outcome:
    """One rank on each of two hosts; the second takes its own link down."""
    names = [f"host-a-{os.getpid()}", f"host-b-{os.getpid()}"]
    with network_of(names) as problem:
        if problem:
            return Outcome([], "", root, skipped=problem)
        job = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0", "NODES": "2"}
        envs = [
            job
            | {"NODE_RANK": str(node), "NAMESPACE": f"/run/netns/{name}", "LINK": "up0", "GLOO_SOCKET_IFNAME": "up0"}
            for node, name in enumerate(names)
        ]
        argv = [str(PROGRAM), "cut", "--devices=1", "--suspect-after=1.5", "--timeout=4", f"--root-dir={root}"]
        # Not before the ranks have told one another where they are.
        argv += ["--pace=0.25", "--batch=5"]
        codes, output = warm.run(argv, folder, timeout_s=LIMIT_S, envs=envs)
    return Outcome(codes, output, root)


@contextmanager
def network_of(names: list[str]) -> Iterator[str]:
    """Two network namespaces with one link; says what is in the way where this machine does not let us."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield "two hosts need network namespaces: root, and the command ip"
        return
    first, second = names
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add up0 netns {first} type veth peer name up0 netns {second}"]
    commands += [f"-n {name} addr add 10.77.0.{node}/24 dev up0" for node, name in enumerate(names, start=1)]
    commands += [f"-n {name} link set {link} up" for name in names for link in ("lo", "up0")]
    try:
        done = [subprocess.run(["ip", *command.split()], capture_output=True, text=True) for command in commands]
        yield "".join(f"ip could not make network namespaces: {one.stderr}" for one in done if one.returncode)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.program("hosts")
def test_both_sides_name_a_disconnected_host(outcome: Outcome) -> None:
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    here, there = (f"host-{side}-{os.getpid()}" for side in "ab")
    for host, other, ranks in ((here, there, [1]), (there, here, [0])):
        reports = outcome.reports(host)
        assert reports, outcome.output
        finding = reports[-1]["findings"][0]
        assert (finding["rule"], finding["ranks"]) == ("unreachable-host", ranks), finding
        assert f"on {other} has not answered since" in finding["summary"]
        assert f"cannot be reached from {host}" in finding["summary"]
    assert all(outcome.codes), outcome.output


@pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch cannot list the previous start's keys")
@pytest.mark.program("agents")
def test_torchrun_on_two_nodes_restarts_and_prints_the_previous_incident(outcome: Outcome) -> None:
    assert outcome.codes == [0, 0], outcome.output
    (report,) = outcome.reports()
    (folder,) = (outcome.root / "ncclsafe").iterdir()
    assert (report["findings"][0]["rule"], report["findings"][0]["ranks"]) == ("failed-rank", [1])
    first, second = (line for line in outcome.said if line.startswith("watching 2 ranks"))
    assert "the previous start" not in first
    answer = (folder / "report.txt").read_text().splitlines()[0]
    assert second.endswith(f"; the previous start ended with incident 1: {folder}: {answer}")
    assert outcome.output.count("left behind: []") == 2


@pytest.mark.program("slurm", "raise", "--rank=1", "--suspect-after=3")
def test_slurm_ranks_may_alternate_over_nodes(outcome: Outcome) -> None:
    assert outcome.said[0].startswith("watching 4 ranks"), outcome.output
    (report,) = outcome.reports()
    assert (report["findings"][0]["rule"], report["findings"][0]["ranks"]) == ("failed-rank", [1])
    assert [facts["rank"] for facts in report["job"]["ranks"]] == [0, 1, 2, 3]
    assert report["job"]["launch"] == "SLURM job 4711"


@pytest.mark.program("kubeflow", "raise", "--rank=1", "--suspect-after=3", "--devices=1")
def test_kubeflow_runs_one_rank_per_pod(outcome: Outcome) -> None:
    assert outcome.said[0].startswith("watching 2 ranks"), outcome.output
    (report,) = outcome.reports()
    assert (report["findings"][0]["rule"], report["findings"][0]["ranks"]) == ("failed-rank", [1])
    assert socket.gethostname() in report["job"]["ranks"][0]["host"]


@pytest.mark.program("notebook")
def test_a_notebook_continues_after_a_failed_cell(outcome: Outcome) -> None:
    assert outcome.codes == [0], outcome.output
    assert outcome.output.count("the cell has raised ") == 1
    (report,) = outcome.reports()
    assert report["findings"][0]["rule"] == "failed-rank"
    assert [line for line in outcome.said if line.startswith("watching 2 ranks")] == outcome.said[:1] + outcome.said[
        -1:
    ]
    assert "left behind: ['MainThread']" in outcome.output
