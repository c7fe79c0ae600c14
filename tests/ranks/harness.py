"""Guarded ranks as forked processes with real gloo collectives, and no Trainer: what a rank does is a function."""

import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_ncclsafe._torch import stores
from lightning_ncclsafe.exchange import DirectoryExchange, FallbackExchange, TcpStoreExchange
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.guard.ending import Ending
from lightning_ncclsafe.guard.guard import Guard
from lightning_ncclsafe.guard.shared import Place
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.report.json import read_report
from lightning_ncclsafe.settings import BACKSTOP_S, Limits

Body = Callable[[int], None]
Pipes = list[tuple[Connection, Connection]]
# Of each rank: it is never used in the parent.
ENDING = Ending()
STARTS_S = 60.0
_FORK = multiprocessing.get_context("fork")


@dataclass
class Ranks:
    """How a job of forked ranks ended.

    Attributes:
        exit_codes: Of each rank; negative for a signal.
        diagnoses: What was reported, in order of incidents.
        said: What was printed, by all ranks.
    """

    exit_codes: list[int | None]
    diagnoses: list[Diagnosis]
    said: str


def run_ranks(
    world_size: int,
    body: Body,
    folder: Path,
    *,
    suspect_after_s: float = 1.0,
    timeout_s: float = 4.0,
    before_joining: Body = lambda rank: None,
    store_of_agent: bool = False,
    patience_s: float = 5.0,
    launcher_kills_after_s: float | None = None,
    write_logs: Callable[[float], None] = lambda _: None,
    report_dir: Path | None = None,
    until_reported: bool = False,
) -> Ranks:
    """Runs ``body(rank)`` in every rank under a guard.

    Args:
        world_size: Number of ranks.
        body: What each rank does once it has joined the process group.
        folder: For reports and output.
        suspect_after_s: See ``SafeDDP``.
        timeout_s: See ``SafeDDP``.
        before_joining: What each rank does before it joins the process group.
        store_of_agent: Whether the store lives in the parent, and not in rank 0.
        patience_s: How long beyond ``timeout_s`` ranks have to end by themselves, once their guards have started.
        launcher_kills_after_s: How long after the end of the first rank all others are killed.
        write_logs: What each rank does between the verdict and its end.
        report_dir: The folder of reports; in ``folder`` by default.
        until_reported: Whether all are killed as soon as there is a report: one that computes takes a core meanwhile.
    """
    limits = Limits(suspect_after_s=suspect_after_s, timeout_s=timeout_s, on_timeout="abort")
    reports_to = report_dir or folder / "reports"
    made = {"write_logs": write_logs, "report_dir": reports_to}
    pipes = [_FORK.Pipe(duplex=False) for _ in range(world_size)]
    # As torchrun's agent does; otherwise rank 0 hosts the store.
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if store_of_agent else None
    for _, tell_port in pipes:
        if agent is not None:
            tell_port.send(agent.port)
    guarded = _FORK.Semaphore(0)
    processes = [
        _FORK.Process(
            target=_rank, args=(rank, body, before_joining, limits, folder, pipes, agent is None, guarded.release, made)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    # A busy machine takes its time to start processes, which is no guard's affair.
    for _ in processes:
        guarded.acquire(timeout=STARTS_S)
    deadline = time.monotonic() + timeout_s + patience_s
    # A rank that cannot end by itself is waited for no longer than the others.
    wait_for_ends(
        processes,
        deadline,
        launcher_kills_after_s,
        lambda: until_reported and any(reports_to.glob("*/report.json")),
    )
    for process in processes:
        process.kill()
        process.join()
    reports = sorted(reports_to.glob("*/report.json"))
    return Ranks(
        exit_codes=[process.exitcode for process in processes],
        diagnoses=[read_report(path.read_bytes()) for path in reports],
        said="".join(_without_gloos(path.read_text()) for path in sorted(folder.glob("said-*"))),
    )


def wait_for_ends(
    processes: Sequence[BaseProcess], deadline: float, kill_after_s: float | None, is_enough: Callable[[], bool]
) -> None:
    """Until no rank can end by itself any more, or enough is known, or the launcher would kill them."""
    while time.monotonic() < deadline and not is_enough() and (running := [p for p in processes if can_end(p)]):
        ended = multiprocessing.connection.wait([process.sentinel for process in running], timeout=0.5)
        if ended and kill_after_s is not None:
            deadline = min(deadline, time.monotonic() + kill_after_s)


def _rank(
    rank: int,
    body: Body,
    before_joining: Body,
    limits: Limits,
    folder: Path,
    pipes: Pipes,
    hosts_store: bool,
    say_guarded: Callable[[], None],
    made: dict[str, Any],
) -> None:
    # The parent's output is captured by pytest; each rank has a file of its own.
    output = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    world_size = len(pipes)
    tracker = ActionTracker()
    trainer = TrainerProbe(SimpleNamespace(state=SimpleNamespace(stage=SimpleNamespace(value="train"))))
    place = Place(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    ENDING.note_thread()
    guard = Guard(
        place=place,
        limits=limits,
        exchange=DirectoryExchange(folder / "init"),
        probe=RankProbe(rank=rank, local_rank=rank, tracker=tracker, trainer=trainer),
        ending=ENDING,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        **made,
    )
    # Else a rank may end, or close a group, while another still connects to it: gloo's failure, and no guard's affair.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    guard.start()
    say_guarded()
    before_joining(rank)
    with tracker.action("init_process_group"):
        _join(rank, pipes, timedelta(seconds=limits.timeout_s + BACKSTOP_S), hosts_store and rank == 0)
    store = TcpStoreExchange(stores.own_connection("test"))
    guard.connect(FallbackExchange(store, DirectoryExchange(folder / "fallback")))
    trainer.started = True
    try:
        body(rank)
    except BaseException as error:
        replacement = guard.failed(error)
        print(f"rank {rank} ends with {replacement or error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    guard.finish()
    guard.close()
    os._exit(0)


def _join(rank: int, pipes: Pipes, timeout: timedelta, hosts_store: bool) -> None:
    """Joins the process group; the port of the store is chosen by the system and passed on."""
    if hosts_store:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        for _, tell_port in pipes[1:]:
            tell_port.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipes[rank][0].recv(), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(pipes), timeout=timeout)


def _without_gloos(text: str) -> str:
    """Without what gloo itself prints when a group is made, before torch 2.9."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


def can_end(process: BaseProcess) -> bool:
    """Whether a process runs and will react: one that is stopped has to be killed."""
    if not process.is_alive():
        return False
    is_stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    return not is_stopped


def all_reduce() -> None:
    """The collective that ranks wait in."""
    dist.all_reduce(torch.ones(10))
