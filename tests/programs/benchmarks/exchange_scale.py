"""Whether many ranks can share over one store: ``python tests/programs/benchmarks/exchange_scale.py --ranks 512``.

Rank 0 hosts a real TCPStore and reports; every other rank has a connection of its own, a thread of one of some
processes. All publish facts of a realistic size at the same moment, rank 0 gathers, judges and tells, and all learn the
verdict, as after a standstill. ``--stuck`` lets one rank publish and then be stopped with its answer half read,
``--silent`` another one never answer.
"""

import argparse
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from torch.distributed import PrefixStore, TCPStore

sys.path.insert(0, str(Path(__file__).parent))

from judging_scale import NCCL, build

from lightning_ncclsafe.exchange import TcpStoreExchange
from lightning_ncclsafe.facts import JobFacts, RankFacts, codec
from lightning_ncclsafe.guard.gathering import Gathering
from lightning_ncclsafe.guard.reporter import Verdict
from lightning_ncclsafe.report.text import render_text
from lightning_ncclsafe.rules.judging import judge

SCENE = "slow step"
LIMIT_S = 300.0
_FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """What one rank has seen, seconds since all were let go."""

    rank: int
    published_s: float
    verdict_s: float
    answer: str


def store_at(port: int) -> PrefixStore:
    """A connection of its own. It may take seconds where addresses are looked up, and holds up all others then."""
    return PrefixStore("ncclsafe", TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60)))


def gathering_of(facts: RankFacts, world: int, exchange: TcpStoreExchange) -> Gathering:
    return Gathering(
        exchange, round_number=0, rank=facts.rank, world_size=world, peers=(), witness=lambda _: [], is_dropped=bool
    )


def rank(facts: RankFacts, job: JobFacts, port: int, go: threading.Event, told: list[Outcome]) -> None:
    store = store_at(port)
    store.set(f"connected/{facts.rank}", "")
    go.wait()
    exchange = TcpStoreExchange(store)
    began = time.monotonic()
    answer, published = "no verdict", began
    try:
        gathering = gathering_of(facts, job.world_size, exchange)
        gathering.publish(facts)
        published = time.monotonic()
        verdict = gathering.hold(job.incident, lambda _: Verdict(incident=job.incident, answer="by another rank"))
        answer = verdict.answer if verdict is not None else "no verdict"
    except Exception as error:  # counted and shown
        answer = f"{type(error).__name__}: {error}"
    told.append(Outcome(facts.rank, published - began, time.monotonic() - began, answer))
    exchange.close()


def some_ranks(job: JobFacts, ranks: list[int], start: Connection, results: Connection) -> None:
    """A process with a thread for each of these ranks; the port comes first, and then the word to go."""
    by_rank = {facts.rank: facts for facts in job.ranks}
    port, go, told = start.recv(), threading.Event(), list[Outcome]()
    threads = [threading.Thread(target=rank, args=(by_rank[one], job, port, go, told)) for one in ranks]
    for thread in threads:
        thread.start()
    start.recv()
    go.set()
    for thread in threads:
        thread.join()
    results.send(told)


def stuck_rank(facts: RankFacts, port: int) -> None:
    """Asks for far more than fits a socket's buffers, and is stopped before it reads the answer."""
    store = store_at(port)
    store.set("large", "x" * 7_000_000)
    store.set(f"connected/{facts.rank}", "")
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    while True:
        store.get("large")


def split(job: JobFacts, processes: int, away: int) -> Iterator[list[int]]:
    """The ranks but 0 and those at the end that are away."""
    others = [facts.rank for facts in job.ranks][1 : len(job.ranks) - away]
    yield from (others[index::processes] for index in range(processes))


def measure(ranks: int, processes: int, *, stuck: bool, silent: bool) -> None:
    job = build(SCENE, NCCL, ranks)
    pipes = [(_FORK.Pipe(), _FORK.Pipe()) for _ in range(processes)]
    children = [
        _FORK.Process(target=some_ranks, args=(job, mine, start[1], results[1]))
        for mine, (start, results) in zip(split(job, processes, stuck + silent), pipes, strict=True)
    ]
    for child in children:
        child.start()
    began = time.monotonic()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for start, _ in pipes:
        start[0].send(server.port)
    # Where one is silent as well, the last one is.
    stuck_one = start_stuck(job.ranks[-1 - silent], server.port) if stuck else None
    exchange = TcpStoreExchange(store_at(server.port))
    wait_until_connected(server, job.ranks[1 : len(job.ranks) - silent])
    size_kb = sum(len(codec.encode(facts)) for facts in job.ranks) / len(job.ranks) / 1e3
    print(
        f"{ranks:,} ranks of {size_kb:.0f} kB in {processes} processes: connected in {time.monotonic() - began:.1f} s"
    )
    before_mb = psutil.Process().memory_info().rss / 1e6
    own = report_as_rank_0(job, exchange, pipes)
    after_mb = psutil.Process().memory_info().rss / 1e6
    told = [outcome for _, results in pipes for outcome in results[0].recv()]
    for child in children:
        child.join()
    if stuck_one is not None:
        stuck_one.kill()
        stuck_one.join()
    exchange.close()
    show(told, own, before_mb, after_mb)


def start_stuck(facts: RankFacts, port: int) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=stuck_rank, args=(facts, port))
    process.start()
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    return process


def wait_until_connected(server: TCPStore, ranks: Sequence[RankFacts]) -> None:
    keys = [f"connected/{facts.rank}" for facts in ranks]
    while not PrefixStore("ncclsafe", server).check(keys):
        time.sleep(0.05)


def report_as_rank_0(
    job: JobFacts, exchange: TcpStoreExchange, pipes: list[tuple[tuple[Connection, Connection], ...]]
) -> dict[str, float]:
    times: dict[str, float] = {}

    def report(gathered: JobFacts) -> Verdict:
        times["gathered"] = time.monotonic() - began
        diagnosis = judge(gathered)
        render_text(diagnosis)
        times["told"] = time.monotonic() - began
        times["answered"] = len(gathered.ranks)
        return Verdict(incident=job.incident, answer=diagnosis.findings[0].summary, findings=diagnosis.findings)

    for start, _ in pipes:
        start[0].send("go")
    began = time.monotonic()
    gathering = gathering_of(job.ranks[0], job.world_size, exchange)
    gathering.publish(job.ranks[0])
    gathering.hold(job.incident, report)
    times["done"] = time.monotonic() - began
    return times


def show(told: list[Outcome], own: dict[str, float], before_mb: float, after_mb: float) -> None:
    published = sorted(outcome.published_s for outcome in told)
    verdicts = sorted(outcome.verdict_s for outcome in told)
    failed = [outcome for outcome in told if not outcome.answer.startswith("Rank ")]
    print(
        f"published: median {published[len(published) // 2]:.2f} s, last {published[-1]:.2f} s\n"
        f"rank 0: {own['answered']:,.0f} answers read after {own['gathered']:.2f} s, judged and told after"
        f" {own['told']:.2f} s, left after {own['done']:.2f} s\n"
        f"verdict known: median {verdicts[len(verdicts) // 2]:.2f} s, last {verdicts[-1]:.2f} s\n"
        f"failures: {len(failed)} {[(one.rank, one.answer[:100]) for one in failed[:3]]}\n"
        f"memory of rank 0 with the store: {before_mb:.0f} MB before, {after_mb:.0f} MB after,"
        f" peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--stuck", action="store_true", help="one rank stops reading in the middle of an answer")
    parser.add_argument("--silent", action="store_true", help="one rank never answers")
    options = parser.parse_args()
    signal.alarm(int(LIMIT_S))
    measure(options.ranks, options.processes, stuck=options.stuck, silent=options.silent)


if __name__ == "__main__":
    main()
