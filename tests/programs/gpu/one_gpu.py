"""Ranks that share one GPU, each as a program of its own: what each is told, how they are started and how they end.

NCCL refuses two ranks on one GPU only where both report the same host. So each rank is a node of its own: it sees one
device, and reports a host of its own making (``NCCL_HOSTID``). The ranks talk over loopback sockets then, which is
slow: good for what is detected and for ratios, not for the speed of a collective.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REHEARSAL = "NCCLSAFE_REHEARSE"
"""Set to 1, the kit runs on CPUs with gloo: what it needs NCCL for is left out, all else is exercised."""

# Of whoever starts the tests: a cluster's own, or a launcher's, would be taken for ours.
_NOT_OURS = ("SLURM_", "TORCHELASTIC_", "PYTEST", "PL_", "NCCL_", "KUBERNETES_", "LOCAL_RANK", "NODE_RANK", "RANK")
_POLL_S = 0.1


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job have ended.

    Attributes:
        exit_codes: Of each rank, negative for a signal; None where it had not ended in time and was killed.
        said: What each rank has printed.
    """

    exit_codes: tuple[int | None, ...]
    said: tuple[str, ...]

    @property
    def story(self) -> str:
        """All of it, for the message of a test that fails."""
        return "\n".join(
            f"--- rank {rank}, exit code {code}\n{said}"
            for rank, (code, said) in enumerate(zip(self.exit_codes, self.said, strict=True))
        )


def is_rehearsal() -> bool:
    """Whether CPUs and gloo stand for the GPU and NCCL."""
    return os.environ.get(REHEARSAL) == "1"


def missing() -> str:
    """What is missing here to run NCCL; empty if nothing is."""
    if is_rehearsal():
        return ""
    if not _driver_sees_a_gpu():
        return "needs an NVIDIA GPU, and this host has none (tests/programs/gpu/README.md)"
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings():
        # Of a driver that is too old; the answer is no, then.
        warnings.simplefilter("ignore")
        has_cuda = torch.cuda.is_available()
    if not has_cuda:
        return f"needs torch built for CUDA; {torch.__version__} sees no GPU (tests/programs/gpu/README.md)"
    if not dist.is_nccl_available():
        return f"needs torch built with NCCL; {torch.__version__} has none (tests/programs/gpu/README.md)"
    return ""


def _driver_sees_a_gpu() -> bool:
    """Asked of the driver: to ask torch means to import it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        return bool(pynvml.nvmlDeviceGetCount() > 0)
    finally:
        pynvml.nvmlShutdown()


def environment(rank: int, ranks: int, port: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the process of one rank is told.

    Args:
        rank: Its number.
        ranks: How many there are.
        port: A free port of this host, the same for all.
        inherited: What else there is; of a launcher's own variables nothing is kept.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_OURS)}
    return (
        kept
        | sharing(rank, inherited)
        | {
            # Lightning: nodes with one device each. A Trainer is given devices=1, and the number of nodes by the last.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "PL_TRAINER_NUM_NODES": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )


def sharing(rank: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What NCCL is told in the process of a rank that shares a GPU with others.

    Args:
        rank: Its number.
        inherited: What else there is.
    """
    first_gpu = inherited.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {
        # One GPU for all.
        "CUDA_VISIBLE_DEVICES": "" if is_rehearsal() else first_gpu,
        "NCCL_HOSTID": f"fake{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        # Whatever plugin a cluster has installed.
        "NCCL_NET": "Socket",
        "NCCL_NVLS_ENABLE": "0",
        # Its kernels wait for the other ranks' while they run: all of them have to fit on the GPU at once.
        "NCCL_MAX_CTAS": "2",
    }


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_ranks(
    arguments: Sequence[str], ranks: int, folder: Path, *, timeout_s: float, more: Mapping[str, str] | None = None
) -> Ended:
    """Runs ``python *arguments`` as every rank, and waits for the end of all.

    Args:
        arguments: A script and its arguments, the same for all ranks.
        ranks: How many there are.
        folder: For what they print; made if it is not there.
        timeout_s: Seconds after which those that still run are killed, with all that they have started.
        more: What is added to the environment of every rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, outputs = free_port(), [folder / f"said-{rank}" for rank in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            env = environment(rank, ranks, port) | dict(more or {})
            command = [sys.executable, *arguments]
            with output.open("wb") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True))
        codes = _wait_for_all(processes, timeout_s)
    finally:
        for process in processes:
            _end_session(process)
    return Ended(codes, tuple(output.read_text(errors="replace") for output in outputs))


def _wait_for_all(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> tuple[int | None, ...]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
    return tuple(process.poll() for process in processes)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
