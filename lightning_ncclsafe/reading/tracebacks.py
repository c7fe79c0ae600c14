"""Exceptions in a log of several ranks: tracebacks, which may be mixed or cut, errors without one, and their ranks."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lightning_ncclsafe.facts import ExceptionFacts, Frame
from lightning_ncclsafe.reading.lines import Line, found_in, message
from lightning_ncclsafe.reading.values import frame, ranks, stack, whole

_Key = tuple[int | None, str]
_MOST_OPEN = 4096
_MOST_IDLE = 5000
_MOST_NAMELESS = 16
_MOST_FRAMES = 120
_LONGEST_MESSAGE = 2000
_MOST_LINES = 3000

_BEGINS = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<function>.{1,200}))?')
# Ray puts the exception that it passes on in brackets.
_ENDS = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,120})(?:\((?P<passed_on>\w{1,60})\))?(?::\s(?P<message>.*))?$")
_GOES_ON = re.compile(r"\s|\^|~|\.\.\.|$")

# These only say that a collective failed, that a peer or child is gone, or that something ended the process.
_CONSEQUENCE_TYPES = re.compile(
    r"(?:^|\.)(?:Dist\w*Error|ChildFailedError|ProcessExitedException|ProcessRaisedException|CalledProcessError"
    r"|SignalException|SIGTERMException|KeyboardInterrupt|SystemExit|CollectiveTimeoutError|RendezvousClosedError"
    r"|BrokenPipeError|ConnectionResetError|ActorDiedError|RayActorError|WorkerCrashedError|EngineDeadError"
    r"|nccl(?:System|Remote|Internal)Error)$"
)
_CONSEQUENCE_TEXTS = re.compile(
    r"gloo/|Gloo connect|\[c10d\]|[Cc]onnection (?:closed|reset) by|pair closure|Broken pipe|NCCL|ncclUniqueId"
    r"|monitored_?[Bb]arrier|store based barrier|Socket Timeout|wait timeout after|waiting for (?:clients|key)"
    r"|[Cc]aught collective operation timeout|Detected mismatch between collectives|DDP expects same model"
    r"|appears not to match \w+ of the same param|driver shutting down"
    r"|DataLoader worker .* killed by signal: Terminated|^Wait timeout$"
)
# Errors of the rank itself that torch raises like errors between ranks.
_OWN_TEXTS = re.compile(
    r"failed to listen on any local network address|no socket interface found|Distributed package doesn't have"
    r"|(?:NCCL [Ee]rror(?: 1)?|nccl\w+ failed): unhandled cuda error"
)
# A line of a traceback whose first line is missing.
_CUT = re.compile(r'\s+File "[^"\n]{1,400}", line \d+, in ')
# torch.distributed.checkpoint prints the exceptions of other ranks.
_OF_RANK = re.compile(r"Traceback \(most recent call last\): \(RANK (\d+)\)")
# torch.multiprocessing.spawn and PyTorch's tests, before the traceback of a process.
_CHILD = re.compile(
    r"(?:-- |\b)Process (\d+) (?:terminated with the following error|exited with error code \d+ and exc)"
)
# Ray Train, before the traceback of a rank.
_SNIPPET = re.compile(r"^\[Rank (\d+) Error Snippet\]:")
# Exceptions raised in these files are about another process.
_PARENTS = re.compile(
    r"torch/(?:multiprocessing/spawn|distributed/(?:run|launch|launcher/\w+|elastic/.*))\.py$"
    r"|accelerate/(?:commands/|test_utils/testing|utils/launch)|deepspeed/launcher/|horovod/run(?:ner)?/"
)
# Between an exception and the traceback of one that only follows from it.
_CHAIN = re.compile(
    r"During handling of the above exception, another exception occurred|The above exception was the direct cause of"
)
# What a loader's worker has raised follows the exception that its parent process raises from it.
_OF_WORKER = re.compile(r"Caught \w{1,80} in DataLoader worker process \d+")
_ORIGINAL = "Original Traceback (most recent call last)"
_NAMES = re.compile(r"(?:Error|Exception|Interrupt|Exit|StopIteration)$")
_ALONE = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,120}(?:Error|Exception))(?::\s(?P<message>.{0,4000}))$")
# These say enough without a traceback and a rank.
_OF_DEVICES = re.compile(
    r"CUDA error|CUDA out of memory|out of memory\. Tried|CUBLAS_STATUS|CUDNN_STATUS|DataLoader worker"
    r"|failed to listen on any local network address"
)
_NOT_REDUCED = "Expected to have finished reduction in the prior iteration before starting a new one"
# A loader's worker prints this before its parent raises.
_WORKER = re.compile(r"ERROR: Unexpected (bus error|segmentation fault) encountered in worker")
# Explicit errors of NCCL, the driver and DDP, about a device, the start of processes, or a model. ``rank`` and
# ``other`` are the ranks that raised them.
_STATED = (
    message(
        "Duplicate GPU",
        "Duplicate GPU detected",
        r"Duplicate GPU detected ?: rank (?P<rank>\d+) and rank (?P<other>\d+) both on CUDA device (?P<device>\w+)",
        "ranks {rank} and {other} are both on CUDA device {device}",
    ),
    message(
        "Mismatched NCCL version",
        "Mismatched NCCL version",
        r"Mismatched NCCL version detected ?: rank (?P<rank>\d+) version (?P<mine>\d+) rank (?P<other>\d+) version "
        r"(?P<theirs>\d+)",
        "rank {rank} has {mine}, rank {other} has {theirs}",
    ),
    message(
        "Rank given twice",
        "ranks has already checked in",
        r"Bootstrap Root : rank (?P<rank>\d+) of (?P<of>\d+) ranks has already checked in",
        "two processes are rank {rank} of {of}",
    ),
    message(
        "Mismatched world size",
        "mismatch in rank count",
        r"Bootstrap Root : mismatch in rank count from procs (?P<mine>\d+) : (?P<theirs>\d+)",
        "one process gave NCCL {mine} ranks, another one {theirs}",
    ),
    message(
        "No network interface",
        "interface found",
        r"(?:Bootstrap ?: no socket|no NCCL_SOCKET_IFNAME) interface found",
        "NCCL has found none that it may use",
    ),
    message(
        "RuntimeError",
        "did not receive grad for rank",
        r"Parameter(?:s| indices) which did not receive grad for rank (?P<rank>\d+): (?P<which>[^\n]{1,100})",
        f"{_NOT_REDUCED} (rank {{rank}}: parameters {{which}} received no gradient)",
    ),
    # An uncaught exception
    message("CUDA error", "CUDA error", r"^\s*what\(\): +CUDA error: (?P<why>[^\n]{1,200})", "{why}"),
    # A warning, as NCCL can do without some of these calls
    message("CUDA failure", "Cuda failure", r"NCCL WARN Cuda failure (?:\d+ )?'(?P<why>[^'\n]{1,200})'", "{why}"),
    message(
        "No room in /dev/shm",
        "posix_fallocate failed",
        r"NCCL WARN Call to posix_fallocate failed ?: (?P<why>No space left on device)",
        "Error while creating shared memory segment: {why}",
    ),
    message(
        "Xid {number}",
        "NVRM: Xid",
        r"NVRM: Xid \((?P<device>PCI:[^)]{1,40})\): (?P<number>\d+),? ?(?P<why>[^\n]{0,200})",
        "{why} ({device})",
    ),
)
WORDS = (
    *(one.word for one in _STATED),
    "Traceback (most",
    '  File "',
    "Error",
    "xception",
    "NCCL WARN",
    "encountered in worker",
)
"""Every line that is read here has one of these words."""


def _exception(type_: str, message: str, frames: list[Frame]) -> ExceptionFacts:
    message = message[:_LONGEST_MESSAGE].strip()
    return ExceptionFacts(
        type=type_.rpartition(".")[2],
        message=message,
        stack=stack(frames),
        is_consequence=is_consequence(type_, message) or bool(frames and _PARENTS.search(frames[-1].file)),
    )


def is_consequence(type_: str, message: str) -> bool:
    """Whether an exception says only that a collective failed or that another process is gone."""
    if _OWN_TEXTS.search(message):
        return False
    return bool(_CONSEQUENCE_TYPES.search(type_) or _CONSEQUENCE_TEXTS.search(message))


def is_telling(exception: ExceptionFacts) -> bool:
    """Whether it reports an own error, or that a peer is gone, and not only that something ended the process."""
    return not exception.is_consequence or _CONSEQUENCE_TEXTS.search(exception.message) is not None


def begins(text: str) -> bool:
    """Whether a traceback begins with this line."""
    return _BEGINS.search(text) is not None


class Traceback:
    """A traceback that is being read.

    Attributes:
        exception: The exception, once the traceback has ended; None if it was no traceback.
        rank: The rank in its first line; None if it has none.
    """

    def __init__(self, *, has_head: bool = True, rank: int | None = None, around: ExceptionFacts | None = None) -> None:
        """Begins to read a traceback; one without a first line counts only if its last line names an exception.

        Args:
            around: What the process has raised that passes on this exception of another one.
        """
        self.exception: ExceptionFacts | None = None
        self.rank = rank
        self.around = around
        self._has_head = has_head
        self._frames: list[Frame] = []
        self._lines = self._indent = 0

    def goes_on(self, text: str) -> bool:
        """Reads the next line; whether the traceback continues."""
        self._lines += 1
        found = _FRAME.match(text)
        if found:
            if len(self._frames) < _MOST_FRAMES:
                self._frames.append(frame(found["file"], whole(found["line"]), (found["function"] or "").strip()))
            self._indent = _indent(text)
            return True
        # In a quotation that is indented, the last line is, too; source is further in than the line of its frame.
        if 0 < _indent(text) <= self._indent and (last := _ENDS.match(text.lstrip())) and _NAMES.search(last["type"]):
            self._end(text.lstrip())
            return False
        if _GOES_ON.match(text) and self._lines < _MOST_LINES:
            return True
        self._end(text)
        return False

    def cut(self) -> ExceptionFacts | None:
        """What is known of an exception that another process has passed on, without the end of its own traceback."""
        return replace(self.around, stack=stack([*self.around.stack, *self._frames])) if self.around else None

    def _end(self, text: str) -> None:
        self.exception = self.cut()
        found = _ENDS.match(text)
        if found is None or not self._frames:
            return
        if (self._has_head and self.around is None) or _NAMES.search(found["passed_on"] or found["type"]):
            type_ = found["passed_on"] or found["type"]
            self.exception = _exception(type_, found["message"] or "", self._frames)
            if self.around is not None:
                self.exception = _passed_on(self.around, self.exception, self._frames)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _passed_on(around: ExceptionFacts, own: ExceptionFacts, frames: list[Frame]) -> ExceptionFacts:
    """The exception of a loader's worker, which its process has raised again."""
    worker = around.message.removesuffix(".").rpartition(" in ")[2]
    message = f"{own.message} (in {worker})".strip()
    return replace(own, message=message, stack=stack([*around.stack, *frames]))


class RankException(NamedTuple):
    """An exception and its rank, if known."""

    rank: int | None
    exception: ExceptionFacts


class Tracebacks:
    """Reads the exceptions of one file after the other, line by line.

    Attributes:
        nameless: Exceptions of unknown ranks in this file.
        ends_within: Whether a traceback went on in the last line.
        child: Number of the process whose traceback a parent has announced; None if it has announced none.
    """

    def __init__(self) -> None:
        self.nameless: list[ExceptionFacts] = []
        self.child: int | None = None
        self.ends_within = False
        self._open: dict[_Key, Traceback] = {}
        self._chained: set[_Key] = set()
        self._of_workers: dict[_Key, RankException] = {}
        self._idle = 0
        self._worker: RankException | None = None
        self._begun: _Key | None = None

    @property
    def is_open(self) -> bool:
        """Whether a traceback goes on in the next line."""
        return bool(self._open)

    def begin(self) -> None:
        """Another file begins."""
        self.nameless = []
        self._open.clear()
        self._chained.clear()
        self._of_workers.clear()
        self.child, self._worker = None, None
        self.ends_within = False

    def flush(self) -> Iterator[RankException]:
        """The failure of a loader's worker that its process has not reported, or whose own traceback is not there."""
        yield from self._of_workers.values()
        for reading in self._open.values():
            if (cut := reading.cut()) is not None:
                yield RankException(reading.rank, cut)
        if self._worker is not None:
            yield self.owned(*self._worker)

    def keep(self, exception: ExceptionFacts) -> None:
        """Keeps an exception of an unknown rank."""
        if len(self.nameless) < _MOST_NAMELESS:
            self.nameless.append(exception)

    def owned(self, rank: int | None, exception: ExceptionFacts) -> RankException:
        """The exception with its rank, which is the announced child if no other is known."""
        child, self.child = self.child, None
        if "DataLoader worker" in exception.message:
            self._worker = None
        return RankException(child if rank is None else rank, exception)

    def read(self, line: Line, rank: int | None, text: str, *, has_numbers: bool) -> tuple[list[RankException], bool]:
        """Reads the next line; the exceptions that end with it, and whether the line is about an exception.

        Args:
            text: The line, joined with what a terminal has broken off.
            has_numbers: Whether the number of a child is its rank.
        """
        key = (line.rank, line.stream)
        before = self._of_workers.pop(key, None)
        if before is not None and _ORIGINAL in text and len(self._open) < _MOST_OPEN:
            self._open[key] = Traceback(rank=before.rank, around=before.exception)
            return [], True
        found, is_read = self._read(key, line, rank, text, has_numbers=has_numbers)
        self.ends_within = key in self._open
        if found and _OF_WORKER.match(found[-1].exception.message) and found[-1].exception.stack:
            # The next line may begin the traceback of the worker.
            self._of_workers[key] = found.pop()
        return [before, *found] if before is not None else found, is_read

    def _read(
        self, key: _Key, line: Line, rank: int | None, text: str, *, has_numbers: bool
    ) -> tuple[list[RankException], bool]:
        self._loses_its_prefix(key, text)
        reading = self._open.get(key)
        self._idle = 0 if reading is not None else self._idle + 1
        if self._idle > _MOST_IDLE:
            # Their ranks were ended in the middle of them.
            self._open.clear()
        self._between(key, text, has_numbers=has_numbers)
        if reading is not None and not reading.goes_on(text):
            del self._open[key]
            if reading.exception is not None and key in self._chained:
                # The exception above is the original one.
                self._chained.discard(key)
                return [], True
            if reading.exception is not None:
                return [self.owned(rank if reading.rank is None else reading.rank, reading.exception)], True
        if begins(text) and len(self._open) < _MOST_OPEN:
            self._open[key] = Traceback(rank=_number(_OF_RANK.search(text)))
            self._begun = key if line.rank is not None else None
        elif reading is None and _CUT.match(text) and len(self._open) < _MOST_OPEN:
            self._open[key] = Traceback(has_head=False)
            self._open[key].goes_on(text)
        elif reading is None:
            return self._without_traceback(rank, text)
        return [], True

    def _loses_its_prefix(self, key: _Key, text: str) -> None:
        """Finds the rank where a logger puts it before the first line of a traceback only."""
        begun, self._begun = self._begun, None
        if begun in self._open and key == (None, "") and key not in self._open and _CUT.match(text):
            reading = self._open.pop(begun)
            reading.rank = begun[0] if reading.rank is None else reading.rank
            self._open[key] = reading

    def _between(self, key: _Key, text: str, *, has_numbers: bool) -> None:
        """Reads what is said about the next traceback."""
        if _CHAIN.search(text):
            self._chained.add(key)
        child = _number(_CHILD.search(text)) if has_numbers else None
        rank = _number(_SNIPPET.match(text))
        if child is not None or rank is not None:
            self.child = child if rank is None else rank

    def _without_traceback(self, rank: int | None, text: str) -> tuple[list[RankException], bool]:
        if worker := _WORKER.search(text):
            died = f"DataLoader worker is killed by signal: {worker[1].capitalize()}"
            self._worker = RankException(rank, ExceptionFacts(type="RuntimeError", message=died))
            return [], True
        said = next(found_in(text, _STATED), None)
        found = _ALONE.match(text)
        if said is not None:
            kind = said.message.kind.format(**said.groups)
            exception = ExceptionFacts(type=kind, message=said.words)
        elif found is not None and (rank is not None or _OF_DEVICES.search(found["message"] or "")):
            exception = _exception(found["type"], found["message"] or "", [])
        else:
            return [], False
        same = next((one for one in self.nameless if _are_one(one, exception)), None)
        if same is not None:
            # Its traceback did not give the rank, but this line does.
            self.nameless.remove(same)
        named = ranks(said.of("rank", "other")) if said is not None else ()
        return [self.owned(one, same or exception) for one in named or (rank,)], True


def _number(found: re.Match[str] | None) -> int | None:
    return whole(found[1]) if found else None


def _are_one(exception: ExceptionFacts, other: ExceptionFacts) -> bool:
    """Whether two exceptions describe one failure of DDP's reducer, at different length."""
    return exception.type == other.type and all(one.message.startswith(_NOT_REDUCED) for one in (exception, other))
