"""Python's tracebacks in a log, line by line, also mixed ones of several ranks; frames of any machine."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_ncclsafe.facts import ExceptionFacts, Frame
from lightning_ncclsafe.reading.lines import found_in, message
from lightning_ncclsafe.reading.values import items, mapping, ranks, text, whole

_MOST = 60
_MOST_GIVEN = 1000
_NOT_USERS = re.compile(
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python3|[/\\]bin[/\\][\w.-]+$|^<(?!ipython-input)|^\?\?"
)
# C++ frames, with TORCH_FR_CPP_STACK.
_SOURCES = (".py", ">")

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
    r"|Caught collective operation timeout|Detected mismatch between collectives|DDP expects same model"
    r"|DataLoader worker .* killed by signal: (?:Terminated|Aborted)|^Wait timeout$"
)


# Errors of the rank itself that torch raises like errors between ranks.
_OWN_TEXTS = re.compile(
    r"failed to listen on any local network address|no socket interface found|Distributed package doesn't have"
    r"|(?:NCCL [Ee]rror(?: 1)?|nccl\w+ failed): unhandled cuda error"
)
_CUT = re.compile(r'\s+File "[^"\n]{1,400}", line \d+, in ')
_OF_RANK = re.compile(r"Traceback \(most recent call last\): \(RANK (\d+)\)")
_CHILD = re.compile(
    r"(?:-- |\b)Process (\d+) (?:terminated with the following error|exited with error code \d+ and exc)"
)
# Ray Train, with the rank in the job
_SNIPPET = re.compile(r"^\[Rank (\d+) Error Snippet\]:")
# Exceptions raised in these files are about another process.
_PARENTS = re.compile(
    r"torch/(?:multiprocessing/spawn|distributed/(?:run|launch|launcher/\w+|elastic/.*))\.py$"
    r"|accelerate/(?:commands/|test_utils/testing|utils/launch)|deepspeed/launcher/|horovod/run(?:ner)?/"
)
_CHAIN = re.compile(
    r"During handling of the above exception, another exception occurred|The above exception was the direct cause of"
)
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


@lru_cache(maxsize=65_536)
def frame(file: str, line: int, function: str) -> Frame:
    """A frame; equal ones are the same object."""
    return Frame(file=file, line=line, function=function, user=_NOT_USERS.search(file) is None)


@lru_cache(maxsize=16_384)
def _same(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Keeps one copy of a stack, as ranks call alike."""
    return stack


class DumpStacks:
    """The stacks of one dump, which must outlive this. Entries share frames, so each stack is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[Frame, ...]] = {}

    def read(self, value: object) -> tuple[Frame, ...]:
        """The stack of an entry, outermost frame first; dumps have the innermost first."""
        given = items(value)[:_MOST_GIVEN]
        same = tuple(map(id, given))
        if same not in self._known:
            self._known[same] = _read(given)
        return self._known[same]


def _read(given: Sequence[object]) -> tuple[Frame, ...]:
    found = []
    for item in given:
        fields = mapping(item)
        file = text(fields.get("filename"))
        if file.endswith(_SOURCES):
            found.append(frame(file, whole(fields.get("line")), text(fields.get("name"))))
    return stack(found[:_MOST][::-1])


def stack(frames: list[Frame]) -> tuple[Frame, ...]:
    """Frames, outermost first, as a stack; equal ones are the same object."""
    return _same(tuple(frames[-_MOST:]))


class Alone(NamedTuple):
    """An error in a line without a traceback, and the ranks that the line names."""

    exception: ExceptionFacts
    ranks: tuple[int, ...] = ()


def alone(text: str, *, is_of_rank: bool) -> Alone | None:
    """The error in this line, without a traceback."""
    said = next(found_in(text, _STATED), None)
    if said is not None:
        kind = said.message.kind.format(**said.groups)
        return Alone(ExceptionFacts(type=kind, message=said.words), ranks(said.of("rank", "other")))
    found = _ALONE.match(text)
    own = (found["message"] or "") if found else ""
    if found is None or not (is_of_rank or _OF_DEVICES.search(own)):
        return None
    return Alone(_exception(found["type"], own, []))


def of_worker(text: str) -> ExceptionFacts | None:
    """The failure that a loader's worker reports in this line; its parent raises the same next."""
    found = _WORKER.search(text)
    how = {"bus error": "Bus error", "segmentation fault": "Segmentation fault"}[found[1]] if found else ""
    return ExceptionFacts(type="RuntimeError", message=f"DataLoader worker is killed by signal: {how}") if how else None


def is_one(exception: ExceptionFacts, other: ExceptionFacts) -> bool:
    """Whether two exceptions describe one failure, at different length."""
    begin = other.message[: len(_NOT_REDUCED)]
    return exception.type == other.type and begin == _NOT_REDUCED == exception.message[: len(_NOT_REDUCED)]


def is_chain(text: str) -> bool:
    """Whether the next traceback only follows from the exception above."""
    return _CHAIN.search(text) is not None


def of_rank(text: str) -> int | None:
    """The rank in a first line of ``torch.distributed.checkpoint``, which prints the exceptions of others."""
    found = _OF_RANK.search(text)
    return whole(found[1]) if found else None


def child(text: str) -> int | None:
    """The number of the process whose traceback torch.multiprocessing.spawn, or PyTorch's tests, print next."""
    found = _CHILD.search(text)
    return whole(found[1]) if found else None


def announced(text: str) -> int | None:
    """The rank whose traceback Ray Train prints next."""
    found = _SNIPPET.match(text)
    return whole(found[1]) if found else None


def begins_cut(text: str) -> bool:
    """Whether this line belongs to a traceback without a first line."""
    return _CUT.match(text) is not None


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

    def __init__(self, *, has_head: bool = True, rank: int | None = None) -> None:
        """Begins to read a traceback; one without a first line counts only if its last line names an exception."""
        self.exception: ExceptionFacts | None = None
        self.rank = rank
        self._has_head = has_head
        self._frames: list[Frame] = []
        self._lines = 0

    def goes_on(self, text: str) -> bool:
        """Reads the next line; whether the traceback continues."""
        self._lines += 1
        found = _FRAME.match(text)
        if found:
            if len(self._frames) < _MOST_FRAMES:
                self._frames.append(frame(found["file"], whole(found["line"]), (found["function"] or "").strip()))
            return True
        if _GOES_ON.match(text) and self._lines < _MOST_LINES:
            return True
        self._end(text)
        return False

    def _end(self, text: str) -> None:
        found = _ENDS.match(text)
        if found is None or not self._frames:
            return
        if self._has_head or _NAMES.search(found["passed_on"] or found["type"]):
            type_ = found["passed_on"] or found["type"]
            self.exception = _exception(type_, found["message"] or "", self._frames)
