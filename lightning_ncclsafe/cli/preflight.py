"""``ncclsafe preflight``: checks this host before training, and under a launcher the hosts of all ranks."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat

from lightning_ncclsafe.cli import failed
from lightning_ncclsafe.code.this_host import host_name
from lightning_ncclsafe.exchange import ExchangeError, MemoryExchange, TcpStoreExchange
from lightning_ncclsafe.exchange.meeting import Agreed
from lightning_ncclsafe.facts import LoadFacts, Phase, PreflightFacts, Progress, RankFacts
from lightning_ncclsafe.facts.findings import Severity
from lightning_ncclsafe.preflight.check import Preflight
from lightning_ncclsafe.probes.process.environment import Launched, launched
from lightning_ncclsafe.report.tables.preflight import render_preflight, render_preflight_all
from lightning_ncclsafe.report.terminal import shown

HELP = "check the hosts of a job before it starts"
DESCRIPTION = (
    "Checks this host within 3 s: cores, memory, swap, /dev/shm, open files, GPUs, versions, settings of NCCL and"
    " torch, network, directories. Under torchrun or srun, checks the host of every rank, and rank 0 prints what"
    " differs. Exit code: 0 if a run could start, 1 if it would fail, 2 if ranks cannot reach each other."
)
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_DAY_S = 86_400.0
_WORKERS = "total num_workers of all dataloaders of a rank"
_TIMEOUT = "seconds to wait for MASTER_ADDR (default: 10)"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--log-dir", type=str, default=".", help="where loggers will write (default: the working directory)"
    )
    parser.add_argument("--checkpoint-dir", type=str, default=None, help="where checkpoints will be saved")
    parser.add_argument("--data-dir", type=str, default=None, help="where data will be read from")
    parser.add_argument("--workers", type=NonNegativeInt, default=None, help=_WORKERS)
    parser.add_argument("--timeout", type=PositiveFloat, default=10.0, help=_TIMEOUT)
    parser.add_argument("--all", action="store_true", help="print everything, not only problems")


def run(config: Namespace) -> int:
    """Runs ``ncclsafe preflight``; returns the exit code."""
    try:
        place = launched(os.environ)
    except ValueError as error:
        return failed(str(error))
    compared = Preflight(
        lambda: _look(config, place),
        on_problem="warn",
        identity=RankFacts(
            rank=place.rank,
            local_rank=place.local_rank,
            host=host_name(),
            pid=os.getpid(),
            progress=Progress(phase=Phase.INIT),
        ),
        world_size=place.world_size,
        report_dir=None,
        say=lambda text: print(shown(text, sys.stdout), end="", flush=True),
        render=render_preflight_all if config.all else render_preflight,
        says_nothing=not config.all,
    )
    compared.begin()
    try:
        agreed = (
            compared.compare(MemoryExchange())
            if place.world_size == 1
            else _compare_all(compared, place, config.timeout)
        )
    except (ExchangeError, RuntimeError, OSError) as error:
        where = f"{place.master_addr}:{place.master_port}"
        return failed(f"rank {place.rank} cannot reach the other ranks at {where}: {error}")
    if place.rank == 0 and agreed.complete and not agreed.findings and not config.all:
        ranks = f"{place.world_size} ranks" if place.world_size > 1 else "this host"
        print(f"nothing is wrong with {ranks}")
    would_fail = any(finding.severity is Severity.ERROR for finding in agreed.findings)
    # A launcher ends the others when one fails: rank 0's exit code stands for all.
    return 1 if would_fail and place.rank == 0 else 0


def _look(config: Namespace, place: Launched) -> PreflightFacts:
    from lightning_ncclsafe.preflight.probe import preflight_facts  # psutil: not for the other commands

    named = {"logs": config.log_dir, "checkpoints": config.checkpoint_dir, "data": config.data_dir}
    directories: Mapping[str, str] = {role: str(Path(path)) for role, path in named.items() if path is not None}
    return preflight_facts(
        directories=directories,
        load=LoadFacts(loader_workers=config.workers),
        local_rank=place.local_rank,
        is_cuda=True,
    )


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Torch reads this when it is imported: otherwise it prints C++ frames at every failed attempt to connect."""
    given = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_LOG_LEVEL]


def _compare_all(compared: Preflight, place: Launched, timeout_s: float) -> Agreed:
    # These import torch, which takes some seconds: only with other ranks, and not while this host is probed.
    compared.wait()
    with _quiet_torch():
        from lightning_ncclsafe._torch import stores
    from lightning_ncclsafe.guard.ending import say_goodbye, wait_for_others

    # Torch tries for this long, and then once more.
    store = stores.launched_store(
        place.master_addr, place.master_port, place.rank, timeout_s=min(timeout_s / 2, _DAY_S)
    )
    exchange = TcpStoreExchange(store)
    try:
        agreed = compared.compare(exchange)
        say_goodbye(exchange, place.rank)
        if place.rank == 0:
            wait_for_others(exchange, 0, place.world_size)
    finally:
        exchange.close()
    return agreed
