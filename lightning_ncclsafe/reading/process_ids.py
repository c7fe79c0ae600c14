"""Which rank a process is, where a line gives its process ID only: other lines of the log say both."""

import re

from lightning_ncclsafe.reading.values import MOST_RANKS, whole

WORDS = (" nranks ", "NCCL INFO Channel ", "pid ", "pid:", "pid=", "PID ")
"""Every line that is read here has one of these words."""

_MOST = 65_536
_NO_RANK = r"(?<!local )(?<!local-)(?<!node )(?<!machine )"
_BOTH = (
    re.compile(
        rf"{_NO_RANK}\brank[ =:]{{1,3}}(?P<rank>\d{{1,7}})\b(?![.:]\d)[^\n\d]{{0,30}}(?:\d+[^\n\d]{{1,20}})?"
        r"\bpid[ =:]{1,3}(?P<pid>\d{2,10})\b",
        re.IGNORECASE,
    ),
    re.compile(
        rf"\bpid[ =:]{{1,3}}(?P<pid>\d{{2,10}})\b[^\n\d]{{0,30}}?{_NO_RANK}\brank[ =:]{{1,3}}(?P<rank>\d{{1,7}})\b",
        re.IGNORECASE,
    ),
)
_OF_NCCL = re.compile(r"(?<![\w.-])[\w.-]{1,80}:(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] (?:\S{1,80}:\d{1,6} )?NCCL ")
_KERNELS_XID = re.compile(r"NVRM: Xid [^\n]{0,80}\bpid='?(?P<pid>\d{1,10})")
# The rank that sends is the one that writes this, unless it says otherwise.
_CHANNEL = re.compile(r"NCCL INFO Channel \d{1,4}(?:/\d{1,4})? : (?P<rank>\d{1,7})\[\w{1,20}\] -> \d{1,7}\[")
_RECEIVES = "[receive]"
_COMMUNICATOR = re.compile(r" rank (?P<rank>\d{1,7}) nranks (?P<of>\d{1,7})\b")


class ProcessIds:
    """Reads them line by line. A process that is several ranks by the same kind of line, on several hosts, is none."""

    def __init__(self) -> None:
        # The rank, and how many ranks the communicator has whose line says so: it may be one of only some ranks.
        self._known: dict[str, tuple[int, int | None]] = {}
        # Who is which rank in communicators of a size, and sizes of which there are several communicators.
        self._members: dict[tuple[int, int], str] = {}
        self._several: set[int] = set()

    def read(self, text: str) -> None:
        """Keeps what the line says."""
        if " NCCL " in text:
            communicator = _COMMUNICATOR.search(text) or (_CHANNEL.search(text) if _RECEIVES not in text else None)
            process = _OF_NCCL.search(text) if communicator is not None else None
            if process is not None and communicator is not None:
                size = whole(communicator["of"]) if communicator.re is _COMMUNICATOR else 0
                self._note(process["pid"], whole(communicator["rank"]), size)
        elif "rank" in text.lower():
            for found in filter(None, (pattern.search(text) for pattern in _BOTH)):
                self._note(found["pid"], whole(found["rank"]), MOST_RANKS)

    def _note(self, pid: str, rank: int, of: int) -> None:
        size, before = self._known.get(pid, (-1, None))
        if not 0 <= rank < MOST_RANKS or of < size or (pid not in self._known and len(self._known) >= _MOST):
            return
        self._known[pid] = (of, rank if of > size or rank == before else None)
        if of < MOST_RANKS and self._members.setdefault((of, rank), pid) != pid:
            self._several.add(of)

    def rank_of(self, pid: str) -> int | None:
        """The rank of a process; None if no line has said it, or only its number in one of several groups."""
        size, rank = self._known.get(pid, (0, None))
        return rank if size not in self._several else None

    def rank_by(self, text: str) -> int | None:
        """The rank that has written one of NCCL's lines, or that an Xid is about; None for others, or if unknown."""
        pattern = _OF_NCCL if " NCCL " in text else _KERNELS_XID if "NVRM: Xid" in text else None
        found = pattern.search(text) if pattern is not None else None
        return self.rank_of(found["pid"]) if found is not None else None
