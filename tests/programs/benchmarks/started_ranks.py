"""Ranks as processes of this host, for benchmarks. None of them outlives its block."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

START_S = 180.0
Process = subprocess.Popen[bytes]


@contextmanager
def started_ranks(
    count: int, arguments: Callable[[int], Sequence[str]], *, output: IO[Any] | int | None = None
) -> Iterator[list[Process]]:
    """Processes of Python with the environment of ranks, which are killed at the end of the block.

    Args:
        count: How many.
        arguments: The script of a rank, and what it is given.
        output: Where they all print to; by default where this process does.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    processes: list[Process] = []
    try:
        for rank in range(count):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *arguments(rank)]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def ranks_of(
    program: str, count: int, *arguments: str, wait_for: Sequence[int], output: int | None = None
) -> Iterator[list[int]]:
    """Process ids of ranks of a program, once some of them have made the file that it is given first.

    Args:
        program: Its source.
        count: Number of ranks.
        arguments: What else it is given.
        wait_for: The ranks that make it.
        output: Where they print to.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, begun = Path(folder, "train.py"), [Path(folder, f"begun-{rank}") for rank in range(count)]
        script.write_text(program)
        with started_ranks(count, lambda rank: [str(script), str(begun[rank]), *arguments], output=output) as processes:
            ends_s = time.monotonic() + START_S
            while not all(begun[rank].exists() for rank in wait_for):
                if time.monotonic() > ends_s:
                    raise TimeoutError("the ranks did not start")
                time.sleep(0.05)
            yield [process.pid for process in processes]


def run_ranks(script: Path, arguments: Sequence[str], ranks: int, folder: str) -> list[Any]:
    """Runs a script on all ranks; what each rank has written down."""
    results = [Path(folder, f"rank{rank}.json") for rank in range(ranks)]

    def of_rank(rank: int) -> list[str]:
        return [str(script), *arguments, f"--ranks={ranks}", f"--result={results[rank]}"]

    with Path(folder, "output.txt").open("w+") as output, started_ranks(ranks, of_rank, output=output) as processes:
        if not all_have_measured(processes, results):
            output.seek(0)
            raise SystemExit(f"A rank has failed. What the ranks have printed:\n{output.read()}")
    return [json.loads(result.read_text()) for result in results]


def all_have_measured(processes: Sequence[Process], results: Sequence[Path]) -> bool:
    """Waits for the end of all, or for the first that has no result: the others would wait for that one.

    A process of gloo, stock ones included, now and then aborts on its way out; what it has measured is there by then.
    """
    while True:
        ended = [process.poll() is not None for process in processes]
        if any(has_ended and not result.exists() for has_ended, result in zip(ended, results, strict=True)):
            return False
        if all(ended):
            return True
        time.sleep(0.1)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
