"""What torchrun and srun say of a rank's end."""

import re
from typing import NamedTuple

from lightning_ncclsafe.reading.values import MOST_RANKS, whole

_FIRST = "Root Cause (first observed failure)"
_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)")
_HOST = re.compile(r"^\s*host\s*:\s*(\S{1,100})")
_EXIT = re.compile(r"^\s*exitcode\s*:\s*(-?\d+) \(pid: \d+\)")
_SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>[A-Za-z ]+)")
_CHILD = re.compile(r"\[rank: (\d+)\] Child process with PID (\d+) terminated with code (-?\d+)")
_ENDINGS = (
    (
        re.compile(r"Received (?:15|Signals\.SIGTERM) death signal|SignalException: Process \d+ got signal: 15"),
        "A launcher was told to end (SIGTERM): by a scheduler, or by whoever has stopped the job.",
    ),
    (re.compile(r"CANCELLED AT \S{1,40} DUE TO TIME LIMIT"), "SLURM ended the job because its time was up."),
    (re.compile(r"CANCELLED AT \S{1,40} DUE TO PREEMPTION"), "SLURM ended the job for another one (preemption)."),
    (re.compile(r"DUE TO NODE FAILURE|NODE_FAIL"), "SLURM says that a node has failed."),
)
# What becomes of a process that waits: the watchdog's abort, and whoever ends it after that.
_FOLLOWS = (0, -6, -15)
# What srun's words mean as an exit code; "Killed" and "Aborted" are what becomes of all others.
_SRUN_SIGNALS = {"Out Of Memory": -9, "Segmentation fault": -11, "Bus error": -7}


class Ended(NamedTuple):
    """How the process of a rank ended."""

    rank: int
    exit_code: int
    host: str = ""
    is_first: bool = False


class Summary:
    """torchrun's summary, which has a line for each of host, rank and exit code."""

    def __init__(self) -> None:
        self._host = ""
        self._rank: int | None = None
        self._is_first = False

    def add(self, text: str) -> Ended | None:
        """Reads the next line; an end where this line completes one."""
        if _FIRST in text:
            self._is_first = True
        elif host := _HOST.match(text):
            self._host, self._rank = host[1], None
        elif rank := _RANK.match(text):
            self._rank = whole(rank[1], MOST_RANKS)
        elif (code := _EXIT.match(text)) and self._rank is not None and self._rank < MOST_RANKS:
            ended = Ended(self._rank, whole(code[1]), self._host, self._is_first)
            self._host, self._rank, self._is_first = "", None, False
            return ended
        return None


def remark(text: str) -> str:
    """A sentence on what a launcher says of the job, or of a child that Lightning's has seen end; empty if none."""
    child = _CHILD.search(text)
    if child is not None and whole(child[3]) not in _FOLLOWS:
        # What it calls the rank is that within the host, which is the rank on the first host alone.
        who = f"its child process {child[2]}, local rank {child[1]}, was the first to end"
        return f"Lightning says that {who}, with code {child[3]}; on which host is not said."
    return next((sentence for pattern, sentence in _ENDINGS if pattern.search(text)), "")


def starts_again(text: str) -> bool:
    """Whether torchrun says here that it starts all ranks again."""
    return "will restart worker group" in text


def has_started(text: str) -> bool:
    """Whether rank 0 says here, in Lightning's words, that all ranks have come: of a log that goes on, the next start.

    A process says so once, however many Trainers it makes.
    """
    return "All distributed processes registered. Starting with" in text


def srun_ended(text: str) -> list[Ended]:
    """The ends of ranks in a line of srun's: ``"srun: error: node-7: task 13: Out Of Memory"``."""
    found = _SRUN.search(text)
    code = _SRUN_SIGNALS.get(found["how"].strip()) if found else None
    if found is None or code is None:
        return []
    return [Ended(task, code, found["host"][:100]) for task in _tasks(found["tasks"])]


def _tasks(words: str) -> list[int]:
    """``[3, 8, 9]`` of ``"3,8-9"``."""
    tasks: list[int] = []
    for part in words.split(",")[:1000]:
        first, _, last = part.partition("-")
        low = whole(first, -1)
        high = whole(last, low) if last else low
        if 0 <= low <= high < MOST_RANKS:
            tasks += range(low, min(high, low + 1024) + 1)
    return tasks
