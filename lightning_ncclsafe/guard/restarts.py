"""The starts of one job: how they differ on a store that outlives them, and what the previous one has left.

torchrun's agent keeps one store for all its starts of the ranks, with all keys of those before (torch 2.13), and its
count of restarts may differ between hosts. So the ranks of a start give it a name of its own.
"""

import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_ncclsafe.code.marks import Mark, marked
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for
from lightning_ncclsafe.rules.kit.wording import ranks_words


@marked(Mark.STORE)
def agree_on_start(
    exchange: Exchange, *, rank: int, world_size: int, deadline_s: float, clear: Callable[[], None]
) -> str:
    """Returns a name that all ranks of this start share, and no earlier start had. All ranks call it; rank 0 waits.

    Args:
        exchange: What the ranks share, which may hold what earlier starts have left.
        rank: This rank.
        world_size: Number of ranks.
        deadline_s: Seconds that the others are waited for.
        clear: Called on rank 0 while all others wait: takes away what earlier starts have left for others.

    Raises:
        ExchangeError: The others have not come, or the exchange is lost.
    """
    poll_s = poll_interval_s(world_size)
    if rank == 0:
        return _lead(exchange, world_size, deadline_s, poll_s, clear)
    mine = uuid.uuid4().hex

    def welcome() -> str:
        found = exchange.get_many([f"hello/{rank}", f"welcome/{rank}"])
        welcomed, _, name = found.get(f"welcome/{rank}", b"").decode().partition(" ")
        if welcomed == mine:
            return name
        # Also where rank 0 has cleared it away since.
        if found.get(f"hello/{rank}", b"").decode() != mine:
            exchange.set(f"hello/{rank}", mine.encode())
        return ""

    with suppress(ExchangeError):
        if name := wait_for(welcome, deadline_s=deadline_s, poll_s=poll_s, forgive=exchange):
            return name
    raise _never_came(exchange, "rank 0")


def _lead(exchange: Exchange, world_size: int, deadline_s: float, poll_s: float, clear: Callable[[], None]) -> str:
    name, waiting = uuid.uuid4().hex[:12], list(range(1, world_size))
    for rank in waiting:
        # What an earlier start has left there; whatever comes from now on is of this one.
        exchange.set(f"hello/{rank}", b"")
    clear()

    def all_are_welcome() -> bool:
        for rank, hello in _hellos(exchange, waiting).items():
            exchange.set(f"welcome/{rank}", hello + b" " + name.encode())
            waiting.remove(rank)
        return not waiting

    with suppress(ExchangeError):
        wait_for(all_are_welcome, deadline_s=deadline_s, poll_s=poll_s, forgive=exchange)
    if waiting:
        raise _never_came(exchange, ranks_words(waiting))
    return name


def _hellos(exchange: Exchange, waiting: list[int]) -> dict[int, bytes]:
    found = exchange.get_many([f"hello/{rank}" for rank in waiting])
    return {int(key.rpartition("/")[2]): hello for key, hello in found.items() if hello}


def _never_came(exchange: Exchange, whom: str) -> ExchangeError:
    return ExchangeError(f"{whom} did not announce a start within the limit: {exchange.lost or 'no answer'}.")


def launch_words(environ: Mapping[str, str] = os.environ) -> str:
    """What started the job, the same for all its starts: ``"SLURM job 4711"``; empty where nothing can start it again.

    Args:
        environ: Of this process.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return f"torchrun {environ['TORCHELASTIC_RUN_ID']}"
    return f"SLURM job {environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environ else ""


def incident_before(report_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """How the previous start of this job ended, in words; empty if this is the first one, or it left nothing.

    Args:
        report_dir: The folder of all incidents.
        environ: Of this process.
    """
    not_before_s = _earlier_starts_since_s(environ)
    if not_before_s is None:
        return ""
    with suppress(OSError, ValueError, LookupError, TypeError):
        folder = max(path.parent for path in report_dir.glob("*/report.json"))
        if folder.stat().st_mtime < not_before_s:
            return ""
        job = json.loads((folder / "report.json").read_bytes())["job"]
        with (folder / "report.txt").open(encoding="utf-8") as report:
            answer = report.readline().strip()
        if job["launch"] == launch_words(environ):
            return f"the previous start ended with incident {job['incident']['number']}: {folder}: {answer}"
    return ""


def _earlier_starts_since_s(environ: Mapping[str, str]) -> float | None:
    """Since when, in seconds since the epoch, there may have been other starts of this job; None if there were none."""
    if "TORCHELASTIC_RUN_ID" in environ:
        # Names of runs are often used again; all starts of this one are children of one agent.
        with suppress(psutil.Error):
            return psutil.Process(os.getppid()).create_time()
        return None
    return 0.0 if environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0") else None
