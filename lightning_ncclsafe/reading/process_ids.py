"""Which rank a process is, where a line gives its process ID only: other lines of the log say both."""

import re

from lightning_ncclsafe.reading.values import MOST_RANKS, whole

WORDS = (" nranks ", "NCCL INFO Channel ", *(f"{word}{sign}" for word in ("pid", "PID") for sign in " :="))
"""Every line that is read here has one of these words."""

_MOST = 65_536
_SEPARATED = r"[\s,;:|/()\[\]-]{1,4}"
# ``rank 3 / size 4, pid 414``, ``pid=414 as rank=3``: nothing else may be between the two, nor of what it is the rank.
_BOTH = (
    re.compile(
        r"\b(?P<name>rank)[ =:]{1,3}(?P<rank>\d{1,7})\b(?:[\s/(]{1,3}(?:of|size|world_size)?[\s=:]{0,3}\d{1,7}\)?)?"
        rf"{_SEPARATED}(?:pid|PID)[ =:]{{1,3}}(?P<pid>\d{{2,10}})\b"
    ),
    re.compile(
        rf"\b(?:pid|PID)[ =:]{{1,3}}(?P<pid>\d{{2,10}})\b{_SEPARATED}(?:(?:as|is) )?(?P<name>(?:global |world )?rank)"
        r"[ =:]{1,3}(?P<rank>\d{1,7})\b"
    ),
)
_WORD_BEFORE = re.compile(r"(\w+)[ -]+$")
_GLOBAL = ("global", "world", "as", "is")
_OF_NCCL = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]{1,80}):(?P<pid>\d{1,10}):\d{1,10} \[\d{1,4}\] (?:\S{1,80}:\d{1,6} )?NCCL "
)
_KERNELS_XID = re.compile(r"NVRM: Xid [^\n]{0,80}\bpid='?(?P<pid>\d{1,10})")
# The rank that sends is the one that writes this, unless it says otherwise.
_CHANNEL = re.compile(r"NCCL INFO Channel \d{1,4}(?:/\d{1,4})? : (?P<rank>\d{1,7})\[\w{1,20}\] -> \d{1,7}\[")
_RECEIVES = "[receive]"
_COMMUNICATOR = re.compile(r" rank (?P<rank>\d{1,7}) nranks (?P<of>\d{1,7})\b")
_Process = tuple[str, str]


class ProcessIds:
    """Reads them line by line, in one start of a run.

    A process that is several ranks by the same kind of line is none, and neither is one of several that are one rank.
    """

    def __init__(self) -> None:
        # By host, empty if unknown, and process ID: the rank, and how many ranks the communicator has whose line says
        # so, as it may be one of only some ranks.
        self._known: dict[_Process, tuple[int, int | None]] = {}
        self._hosts: dict[str, set[str]] = {}
        # Who is which rank in communicators of a size, and sizes of which there are several communicators.
        self._members: dict[tuple[int, int], _Process] = {}
        self._several: set[int] = set()

    def read(self, text: str) -> None:
        """Keeps what the line says."""
        if " NCCL " in text:
            communicator = _COMMUNICATOR.search(text) or (_CHANNEL.search(text) if _RECEIVES not in text else None)
            process = _OF_NCCL.search(text) if communicator is not None else None
            if process is not None and communicator is not None:
                size = whole(communicator["of"]) if communicator.re is _COMMUNICATOR else 0
                self._note((process["host"], process["pid"]), whole(communicator["rank"]), size)
        elif "rank" in text:
            for found in filter(None, (pattern.search(text) for pattern in _BOTH)):
                before = _WORD_BEFORE.search(text, 0, found.start("name"))
                if before is None or before[1] in _GLOBAL:
                    self._note(("", found["pid"]), whole(found["rank"]), MOST_RANKS)

    def _note(self, process: _Process, rank: int, of: int) -> None:
        size, before = self._known.get(process, (-1, None))
        is_full = len(self._known) >= _MOST and process not in self._known
        if not 0 <= rank < MOST_RANKS or of < size or is_full:
            return
        self._known[process] = (of, rank if of > size or rank == before else None)
        self._hosts.setdefault(process[1], set()).add(process[0])
        if of < MOST_RANKS and ((of, rank) in self._members or len(self._members) < _MOST):
            is_other = self._members.setdefault((of, rank), process) != process
            self._several |= {of} if is_other else set()

    def rank_of(self, pid: str) -> int | None:
        """The rank of a process; None if no line has said it, or if it may be on one of several hosts."""
        hosts = self._hosts.get(pid, set())
        host = "" if "" in hosts else next(iter(hosts), "")
        return self._rank(host, pid) if host == "" or len(hosts) == 1 else None

    def rank_by(self, text: str) -> int | None:
        """The rank that has written one of NCCL's lines, or that an Xid is about; None for others, or if unknown."""
        if " NCCL " in text:
            found = _OF_NCCL.search(text)
            return self._rank(found["host"], found["pid"]) if found is not None else None
        xid = _KERNELS_XID.search(text) if "NVRM: Xid" in text else None
        return self.rank_of(xid["pid"]) if xid is not None else None

    def _rank(self, host: str, pid: str) -> int | None:
        # What the program itself says counts first.
        size, rank = self._known.get(("", pid)) or self._known.get((host, pid), (0, None))
        return rank if size not in self._several else None
