"""SLURM's requeue: the job is queued again, once, when its state is saved."""

import os
import subprocess
from collections.abc import Callable, Mapping

from lightning_ncclsafe.exchange import Exchange, ExchangeError, first_rank

# The controller answers within a second or so; a scheduler does not wait for longer than its grace period.
_DEADLINE_S = 10.0


def requeue_once(
    exchange: Exchange, rank: int, say: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> None:
    """Has SLURM queue the job again; only one of the ranks that call it does so.

    Args:
        exchange: What the ranks share.
        rank: This rank.
        say: Prints a line to the user.
        environ: Of this process.
    """
    try:
        is_mine = first_rank(exchange, "requeue", rank) == rank
    except ExchangeError:
        is_mine = rank == 0
    job = _job(environ)
    if not is_mine or not job:
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, timeout=_DEADLINE_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        reason = said.decode(errors="replace").strip() if said else str(error)
        say(f"rank {rank} could not requeue SLURM job {job}: {reason}")
    else:
        say(f"rank {rank} requeued SLURM job {job}")


def _job(environ: Mapping[str, str]) -> str:
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID", "")
