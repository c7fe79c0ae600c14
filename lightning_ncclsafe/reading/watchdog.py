"""What PyTorch prints when a collective does not end: patterns of torch 1.13 to 2.14, each as a small record.

The wording has changed often, the numbers have not. Lines that a terminal has broken may lack spaces.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from lightning_ncclsafe.facts.recorded import LOST_AT_SET_UP, SET_UP
from lightning_ncclsafe.reading.values import MOST_RANKS, ranks, whole


class TimedOut(NamedTuple):
    """A collective that NCCL's watchdog has given up: ``WorkNCCL(SeqNum=14217, OpType=ALLGATHER, …)``."""

    seq: int
    """0 if it has no number, as before torch 1.13."""
    op: str
    takes: tuple[int, ...] | None
    gives: int | None
    timeout_ms: int
    ran_ms: int
    rank: int | None
    """Within its process group, which the message does not name."""


class Standing(NamedTuple):
    """A rank's position in a group: ``[PG ID 0 PG GUID 0(default_pg) Rank 3] … last enqueued work: 61, …``."""

    group: str
    description: str
    rank: int
    """Within the group."""
    seq: int | None
    enqueued: int
    started: int
    completed: int


class Awaited(NamedTuple):
    """Ranks that PyTorch itself names as awaited."""

    by: int | None
    ranks: tuple[int, ...]
    where: str


class Reported(NamedTuple):
    """The last call of ranks that has not ended there, by a desync report; all by their number within a group."""

    by: int | None
    ranks: tuple[int, ...]
    seq: int
    op: str


WORDS = (
    "ProcessGroup",
    "WorkNCCL",
    "atchdog ",
    "[PG ",
    "onitoredBarrier",
    "ncclUniqueId",
    "join",
    "Timeout at collective",
    "] started ",
    "ranks",
    "application crash on rank",
    "CUDA error",
    "timed out",
    "orld_size",
    "WORLD_SIZE",
    "Num processes",
    "MEMBER: ",
    "Starting with ",
    "called by all ",
)
"""Every line that is read here has one of these words."""

# A line that ends like this was broken by a terminal.
_BROKEN = re.compile(
    r"[Cc]aught collective operation timeout(?!.*before timing out)"
    r"|terminated with exception: \[Rank \d+\]\s*$"
    r"|\[E[^\]]{0,60}ProcessGroupNCCL\.cpp:\d+\] ?\[(?:Rank|PG)\b(?!.*(?:timing out|work: -?\d)).*[^.:!\s]$"
    r"|(?:detected\s*by\s*watchdog\s*at\s*work|Timeout at NCCL work)(?!.*last\s*completed[^:]*:\s*-?\d)"
)
# NCCL, Ascend's HCCL, Intel's XCCL
_WORK = re.compile(r"Work[A-Z]{1,3}CCL\((?P<body>[^\n]{1,400})")
_WORK_RANK = re.compile(
    r"\[Rank (\d+)\] (?:Watchdog caught|Caught collective|Work Work[A-Z]|Collective Work[A-Z]|Found key)"
)
# With the next character, as another rank may have written into the middle of a word or number.
_SEQ = re.compile(r"SeqNum=(\d+)(?=[,)])")
_OP = re.compile(r"OpType=(\w+)(?=[,)])")
_TAKES = re.compile(r"NumelI\s*n=(\d+)(?=[,)])")
_GIVES = re.compile(r"NumelOu\s*t=(\d+)(?=[,)])")
_SHAPE = re.compile(r"TensorShape=\[([\d, ]*)\]")
_LIMIT = re.compile(r"Timeout\(ms\)=(\d+)(?=[,)])")
_RAN = re.compile(r"ran for (\d+) milliseconds")

_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?(?P<name>[^\s()\]]+)\s?(?:\((?P<about>[^)]*)\))?\s?Rank (?P<rank>\d+)\]")
_OF_ALL = "default_pg"
_AT = re.compile(r"(?:detected\s*by\s*watchdog\s*at\s*work(?:\s*sequence\s*id)?:|Timeout at NCCL work:)\s*(\d+)")
_ENQUEUED = re.compile(r"last\s*enqueued?\s*(?:NCCL\s*)?(?:d\s*)?work:\s*(-?\d+)", re.IGNORECASE)
_STARTED = re.compile(r"last\s*started[^:,]{0,30}:\s*(-?\d+)", re.IGNORECASE)
_COMPLETED = re.compile(r"last\s*completed\s*(?:NCCL\s*)?work:\s*(-?\d+)", re.IGNORECASE)

_ENDED = re.compile(r"^(?!.*\[PG ).*\[Rank (\d{1,7})\] (?:NCCL|Process group) watchdog thread terminated")
_DEVICE = re.compile(r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?CUDA error: ([^\n]{1,300})")
_STUCK = re.compile(
    r"watchdog got stuck for (\d+)\s*seconds|(Heartbeat monitor timed out|due to ProcessGroupNCCL watchdog hang)"
)
_ERROR = re.compile(
    r"(?:async exception|thread terminated with exception|encountered error set by ProcessGroupNCCL): "
    r"(NCCL error: [^\n]{1,300}|NCCL communicator [^\n]{1,300})"
)
_OWN_TIMEOUT = "due to a collective timeout from this local rank"
_NAMES_RANKS = re.compile(r"ncclUniqueId|monitoredBarrier|join collective|lagging ranks|crash on rank")
_UNIQUE_ID = re.compile(r"\[(\d+)\] is setting up NCCL communicator and retr\w+ ncclUniqueId from \[(\d+)\]")
# The end of the same message, below the stack of the store's own error
_UNIQUE_ID_ENDS = re.compile(r"This may indicate a possible application crash on rank (\d+) or a network set up issue")
_LOST = re.compile(
    r"got error: .{0,200}?(?:Connection (?:reset|closed|refused)|[Bb]roken pipe|failed to recv|was lost)"
)
_MONITORED = re.compile(r"Ranks? ([\d, ]+?) failed to pass monitoredBarrier")
_NOT_JOINED = re.compile(r"\[([\d, ]+)\] finished collective #\d+, but didn't join collective #(\d+)")
_NEVER_JOINED = re.compile(r"ranks \[([\d, ]+)\] are the lagging ranks that caused this timeout")
_TIMED_OUT_AT = re.compile(r"\[(\d+)\] Timeout at collective: \w+, #\d+")
_JOINED = re.compile(r"\[(?P<ranks>[\d, ]+)\] joined but didn't finish collective #(?P<seq>\d+)")
_SNAPSHOT = re.compile(r"#(?P<seq>\d+) (?P<how>started|finished) ranks:")
_SNAPSHOT_STARTED = re.compile(r"^\s*\[(?P<ranks>[\d, ]+)\] started (?P<op>\w+)\s*$")
_SIZES = re.compile(
    r"(?:\b|_)world_?size\"?[=:]\s?(\d+)|\bMEMBER: \d+/(\d+)|\bnranks (\d+)|Starting with (\d+) processes"
    r"|\bNum processes: (\d+)|\bcalled by all (\d+) workers in the group",
    re.IGNORECASE,
)
_SIZE_WORDS = (
    "orld_size",
    "orldsize",
    "WORLD_SIZE",
    "MEMBER: ",
    "nranks ",
    "Starting with ",
    "Num processes: ",
    "called by all ",
)
_FRAME = re.compile(r"\s*#\d+ (?P<function>.+?) from (?P<file>.+?):(?P<line>\d+)\s*$")

_OPS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "allreduce_coalesced",
    "ALLREDUCE_SPARSE": "all_reduce_sparse",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "_all_gather_base",
    "ALLGATHER_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
# "No number" of coalesced calls
_NO_NUMBER = 2**63


def is_broken(text: str) -> bool:
    """Whether the line continues in the next."""
    return _BROKEN.search(text) is not None


def timed_out(text: str) -> TimedOut | None:
    """The collective that has timed out, according to this line."""
    work = _WORK.search(text)
    # Before torch 1.13, collectives had no number; a number whose end is missing does not count.
    if work is None or not (_SEQ.search(work["body"]) or work["body"].startswith("OpType=")):
        return None
    body = work["body"]
    takes = _takes(body)
    gives = _number(_GIVES, body)
    rank = _WORK_RANK.search(text)
    return TimedOut(
        seq=_number(_SEQ, body) or 0,
        op=_operation(body, takes, gives),
        takes=takes,
        gives=gives,
        timeout_ms=_number(_LIMIT, body) or 0,
        ran_ms=_number(_RAN, body) or 0,
        rank=whole(rank[1], -1) if rank else None,
    )


def _operation(body: str, takes: tuple[int, ...] | None, gives: int | None) -> str:
    found = _OP.search(body)
    name = found[1] if found else ""
    if name == "COALESCED" and takes and gives:
        # If one side is a multiple of the other, it is no send or receive.
        small, large = sorted((takes[0], gives))
        if 0 < small < large and large % small == 0:
            return "all_gather_coalesced" if gives == large else "reduce_scatter_coalesced"
    return _OPS.get(name, name.lower())


def _takes(body: str) -> tuple[int, ...] | None:
    """The shape of the input, or its number of elements."""
    if shape := _SHAPE.search(body):
        return tuple(max(whole(length.strip()), 0) for length in shape[1].split(",") if length.strip())
    count = _number(_TAKES, body)
    return None if count is None else (count,)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    number = whole(found[1], -1) if found else -1
    return number if 0 <= number < _NO_NUMBER else None


def standing(text: str) -> Standing | None:
    """A rank's position in a group, according to this line."""
    group = _GROUP.search(text) if "work:" in text else None
    enqueued, completed = (_ENQUEUED.search(text), _COMPLETED.search(text)) if group else (None, None)
    if group is None or enqueued is None or completed is None or int(group["rank"]) >= MOST_RANKS:
        return None
    at, started = _AT.search(text), _STARTED.search(text)
    return Standing(
        group=group["name"],
        description=group["about"] or "",
        rank=int(group["rank"]),
        seq=whole(at[1]) if at else None,
        enqueued=max(whole(enqueued[1]), 0),
        started=whole(started[1], -1) if started else -1,
        completed=max(whole(completed[1]), 0),
    )


def awaited(text: str) -> Iterator[Awaited]:
    """The awaited ranks, according to this line."""
    if not _NAMES_RANKS.search(text):
        return
    if unique := _UNIQUE_ID.search(text):
        where = LOST_AT_SET_UP if _LOST.search(text, unique.end()) else SET_UP
        yield Awaited(whole(unique[1]), ranks([unique[2]]), where)
    elif ends := _UNIQUE_ID_ENDS.search(text):
        yield Awaited(None, ranks([ends[1]]), SET_UP)
    if barrier := _MONITORED.search(text):
        yield Awaited(None, ranks(barrier[1]), "monitored_barrier")
    if late := _NOT_JOINED.search(text):
        yield Awaited(None, ranks(late[1]), f"collective {late[2]}")
    if never := _NEVER_JOINED.search(text):
        yield Awaited(None, ranks(never[1]), "the first collective")


class DesyncReport:
    """PyTorch's desync report: the last call of every rank, which the rank may not have come to wait in."""

    def __init__(self) -> None:
        self._by: int | None = None
        self._started = 0

    def read(self, text: str) -> Reported | None:
        """The ranks that have called a collective which has not ended, according to this line."""
        if not self._started and "collective" not in text and "ranks:" not in text:
            return None
        if first := _TIMED_OUT_AT.search(text):
            self._by, self._started = whole(first[1]), 0
        elif section := _SNAPSHOT.search(text):
            self._started = whole(section["seq"]) if section["how"] == "started" else 0
        elif joined := _JOINED.search(text):
            return Reported(self._by, ranks(joined["ranks"]), whole(joined["seq"]), "")
        elif self._started and (started := _SNAPSHOT_STARTED.match(text)):
            op = _OPS.get(started["op"], started["op"].lower())
            return Reported(self._by, ranks(started["ranks"]), self._started, op)
        return None


def ended_rank(text: str) -> int | None:
    """The rank whose watchdog has ended, within an unknown group, or is stuck, within the default group.

    None if the line is about neither.
    """
    found = _ENDED.search(text)
    if found:
        return whole(found[1])
    group = _GROUP.search(text) if _STUCK.search(text) else None
    return whole(group["rank"]) if group and group["about"] == _OF_ALL else None


def device_error(text: str) -> str:
    """The error of the device that has ended a rank's watchdog, according to this line; empty if none."""
    return _words(_DEVICE, text)


def backend_error(text: str) -> str:
    """The error of NCCL's that has ended a collective, according to this line; empty if none."""
    return _words(_ERROR, text)


def _words(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1].strip() if found else ""


def stuck_s(text: str) -> int:
    """For how many seconds the watchdog's own thread did not move.

    1 if the line does not say how many, 0 if it is not about that.
    """
    found = _STUCK.search(text)
    return (whole(found[1]) if found[1] else 1) if found else 0


def has_timed_out_elsewhere(text: str) -> bool:
    """Whether the rank says that it has timed out itself, in a group that it does not name."""
    return _OWN_TIMEOUT in text


def world_size(text: str) -> int:
    """The number of ranks in this line; 0 if it has none."""
    if not any(word in text for word in _SIZE_WORDS):
        return 0
    found = (whole(size) for sizes in _SIZES.findall(text) for size in sizes if size)
    return max((size for size in found if size <= MOST_RANKS), default=0)


def failed_frame(text: str) -> tuple[str, int, str] | None:
    """File, line and function in a line of "Stack trace of the failed collective", innermost first."""
    found = _FRAME.match(text[:1000])
    return (found["file"].strip(), whole(found["line"]), found["function"]) if found else None
