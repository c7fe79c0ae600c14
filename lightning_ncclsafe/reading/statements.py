"""What logs say in so many words: launchers of the end of a process, stores of who has come, NCCL and tools of ranks.

Each family of messages is a row of a table: a pattern, and what it comes to. What takes several lines is read by one
of the small readers below the table, which keep a bounded number of them.
"""

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from lightning_ncclsafe.facts import Statement, StatementKind
from lightning_ncclsafe.reading.values import MOST_RANKS, ranks, whole

WAITS = "still waits"
"""Said of a rank that waits at the store, and has not given up."""
OF_EACH = "Horovod"
"""Said by a launcher that reports the end of each process, whichever was the first."""
_LONGEST_LINE = 300
_LONGEST_DETAIL = 200
_MOST_LINES = 12
_MOST_LISTED = 1024
_Match = re.Match[str]


class _Row(NamedTuple):
    """Messages of one form; the words are looked for before the pattern is tried."""

    word: str
    pattern: re.Pattern[str]
    said: Callable[[_Match], Statement | None]


def _code(name: str) -> int | None:
    """Minus the number of a signal that is given by its name or number."""
    name = name.strip()
    if name.isdecimal():
        return -int(name) if len(name) < 4 else None
    try:
        return -signal.Signals[name.upper()].value
    except KeyError:
        return None


def _ended(code: int | None, *, local: str | None = None, rank: str | None = None, detail: str = "") -> Statement:
    return Statement(
        kind=StatementKind.ENDED,
        exit_code=code,
        local_rank=whole(local, 0) if local is not None else None,
        ranks=ranks([rank]) if rank is not None else (),
        detail=detail[:_LONGEST_DETAIL],
    )


def _joined(count: str, of: str, by: str | None = None) -> Statement:
    speaker = whole(by, -1) if by is not None else -1
    return Statement(
        kind=StatementKind.NOT_JOINED,
        by=speaker if 0 <= speaker < MOST_RANKS else None,
        count=max(whole(count), 0),
        of=max(whole(of), 0),
    )


def _about(kind: StatementKind, detail: str, *who: str | None) -> Statement:
    return Statement(kind=kind, ranks=ranks([one for one in who if one is not None]), detail=detail[:_LONGEST_DETAIL])


def _lost(found: _Match) -> Statement | None:
    """Programs lose connections of other kinds as well."""
    is_ours = any(word in found.string for word in _TRANSPORTS)
    return _about(StatementKind.PEER_LOST, found[0]) if is_ours else None


def _waited(found: _Match, detail: str) -> Statement | None:
    """Whoever waits for NCCL's id says for whom, and is read elsewhere."""
    if "ncclUniqueId" in found.string:
        return None
    kind = StatementKind.NOT_JOINED if _OF_INIT.search(detail) else StatementKind.STORE_WAIT
    return _about(kind, detail)


def ended_child(number: int) -> Statement:
    """That the process of this number has ended by an exception, of which torch.multiprocessing has begun to tell."""
    return replace(_ended(1, local=str(number), detail="torch.multiprocessing"), line=f"Process {number} terminated")


_FAULTS = {"Segmentation fault": -11, "Bus error": -7, "Illegal instruction": -4, "Floating point exception": -8}
# Keys by which ranks find each other when a process group, or torchrun's group of agents, is made.
_OF_INIT = re.compile(r"default_pg|store_based_barrier|torchelastic|rdzv|/ranks?\b|worker_count|//c(?:uda|pu)//|init")
_TRANSPORTS = ("gloo", "NCCL", "socket", "Net :", "c10d")
_ROWS = (
    # torchrun, and what builds on it
    _Row(
        "exitcode: ",
        re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)"),
        lambda found: _ended(whole(found[1]), local=found[2], detail="torchrun"),
    ),
    # torchrun of torch 1.9
    _Row(
        "FAILED (exitcode",
        re.compile(r"Child process \d+ \(local_rank (\d+)\) FAILED \(exitcode (-?\d+)\)"),
        lambda found: _ended(whole(found[2]), local=found[1], detail="torchrun"),
    ),
    # torch.multiprocessing.spawn
    _Row(
        "rocess ",
        re.compile(r"[Pp]rocess (\d+) terminated with (?:signal (\w+)|exit code (\d+))"),
        lambda found: _ended(
            _code(found[2]) if found[2] else whole(found[3]), local=found[1], detail="torch.multiprocessing"
        ),
    ),
    # DeepSpeed: the command is that of the process which it has started last.
    _Row(
        "return code = ",
        re.compile(r"exits with return code = (-?\d+)"),
        lambda found: _ended(whole(found[1]), detail="DeepSpeed's launcher"),
    ),
    # torch.distributed.launch before 1.9, and Accelerate: likewise
    _Row("died with <Signals.", re.compile(r"died with <Signals\.(\w+): \d+>"), lambda found: _ended(_code(found[1]))),
    _Row(
        "returned non-zero",
        re.compile(r"CalledProcessError: Command .{0,4000}returned non-zero exit status (\d+)"),
        lambda found: _ended(whole(found[1])),
    ),
    _Row(
        "Child process with PID",
        re.compile(r"\[rank: (\d+)\] Child process with PID \d+ terminated with code (-?\d+)"),
        lambda found: _ended(whole(found[2]), local=found[1], detail="Lightning"),
    ),
    _Row(
        "noticed that process rank",
        re.compile(r"noticed that process rank (\d+) .{0,300}exited on signal (\d+)"),
        lambda found: _ended(_code(found[2]), rank=found[1], detail="mpirun"),
    ),
    _Row(
        "crashed with exit code",
        re.compile(r"Rank (\d+) crashed with exit code (-?\d+)"),
        lambda found: _ended(whole(found[2]), rank=found[1], detail="composer"),
    ),
    _Row(
        "exit with status code",
        re.compile(r"Process (\d+) exit with status code (\d+)"),
        lambda found: _ended(whole(found[2]), rank=found[1], detail=OF_EACH),
    ),
    _Row(
        "MPI_ABORT",
        re.compile(r"MPI_ABORT was invoked on rank (\d+) in communicator MPI_COMM_WORLD"),
        lambda found: _ended(1, rank=found[1], detail="mpirun, MPI_ABORT"),
    ),
    _Row(
        "died, exit code",
        re.compile(r"Worker \S{1,100} pid \d+ died, exit code: (-?\d+)"),
        lambda found: _ended(whole(found[1]), detail="vLLM"),
    ),
    _Row(
        "died unexpectedly",
        # The number of a worker is its rank.
        re.compile(r"((?:Worker proc VllmWorker-(\d+)|(?:Worker|Engine core) proc )\S{0,100}) died unexpectedly"),
        lambda found: _ended(
            None, rank=found[2], detail=f"an executor of vLLM reports that {found[1]} died unexpectedly"
        ),
    ),
    _Row(
        "Worker exit type",
        re.compile(r"(?:Worker PID: (\d+) )?Worker exit type: (\w+)"),
        lambda found: _ended(None, detail=f"Ray reports that a worker died ({found[2]}{_pid_words(found[1])})"),
    ),
    # What a process prints of its own end: UCX, Open MPI
    _Row("Caught signal ", re.compile(r"Caught signal (\d+) \("), lambda found: _ended(_code(found[1]), detail="UCX")),
    _Row("Signal: ", re.compile(r"\*\*\* .{0,60}Signal: [\w ]{1,40} \((\d+)\)"), lambda found: _ended(_code(found[1]))),
    # SLURM and Kubernetes
    _Row("oom", re.compile(r"[Dd]etected \d+ oom[-_]kill event"), lambda _: _ended(-9, detail="SLURM")),
    _Row("OOMKilled", re.compile(r"\bOOMKilled\b"), lambda _: _ended(-9, detail="Kubernetes")),
    _Row(
        "srun: error",
        re.compile(
            r"srun: error: \S{1,100}: (tasks? [\d,-]{1,60}): (?:Out Of Memory|Killed|Bus error|Segmentation fault)"
        ),
        lambda found: _ended(
            None, detail=f"srun reports that {found[1]} {'were' if found[1].startswith('tasks') else 'was'} killed"
        ),
    ),
    # Stores
    _Row(
        "tore based barrier",
        re.compile(
            r"store based barrier on rank:? (\d+), for key: \S{1,100} \(world_size=(\d+), "
            r"(?:worker_count|num_workers_joined)=(\d+)"
        ),
        lambda found: _joined(found[3], found[2], found[1]),
    ),
    _Row(
        "aiting in store based barrier",
        re.compile(
            r"Waiting in store based barrier to initialize process group for .{0,40}?rank: (\d+), key: \S{1,100} "
            r"\(world_size=(\d+), (?:worker_count|num_workers_joined)=(\d+)"
        ),
        lambda found: replace(_joined(found[3], found[2], found[1]), detail=WAITS),
    ),
    _Row(
        "joined",
        re.compile(
            r"Timed out after \d+ seconds waiting for (?:clients|workers)\. (\d+)/(\d+) (?:clients|workers) joined"
        ),
        lambda found: _joined(found[1], found[2]),
    ),
    _Row(
        "RendezvousTimeoutError",
        re.compile(r"\bRendezvousTimeoutError\b"),
        lambda _: _about(StatementKind.NOT_JOINED, "for the other agents of torchrun"),
    ),
    _Row(
        "failed to connect to",
        re.compile(r"client socket has failed to connect to (\S{1,200}) \(errno: ([^)]{1,80})\)"),
        lambda found: _about(StatementKind.UNREACHABLE, f"the store at {found[1]} has not been reached ({found[2]})"),
    ),
    _Row(
        "trying to connect to",
        re.compile(r"client socket has timed out after \S{1,20} while trying to connect to \(([^)]{1,200})\)"),
        lambda found: _about(StatementKind.UNREACHABLE, f"the store at {found[1]} has not been reached"),
    ),
    _Row(
        "imed out after",
        re.compile(r"waitForInput: socket SocketImpl\([^)]{0,200}\) timed out after (\d+)ms"),
        lambda found: _about(StatementKind.STORE_WAIT, f"for {found[1]} ms"),
    ),
    _Row(
        "wait timeout after",
        re.compile(r"wait timeout after (\d+)ms, keys: (\S{1,200})"),
        lambda found: _waited(found, f"for {found[1]} ms, for key {found[2]}"),
    ),
    _Row(
        "Timeout waiting for key",
        re.compile(r"Timeout waiting for key: (\S{1,200})"),
        lambda found: _waited(found, f"for key {found[1]}"),
    ),
    _Row("Socket Timeout", re.compile(r"Error: Socket Timeout\b"), lambda found: _waited(found, "")),
    # A store that is a file, in which ranks find each other.
    _Row(
        "Wait timeout",
        re.compile(r"Error: Wait timeout\s*$"),
        lambda _: _about(StatementKind.NOT_JOINED, "for the others"),
    ),
    _Row(
        "successfully reached monitoredBarrier",
        re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier, but .{0,80}from rank (\d{1,7})"),
        lambda found: replace(_about(StatementKind.BARRIER_WAIT, "", found[2]), by=next(iter(ranks([found[1]])), None)),
    ),
    # Connections, of gloo, NCCL's sockets and its network plugins
    _Row(
        "Conne",
        re.compile(r"Connection (?:was )?(?:closed|reset) by (?:remote )?peer"),
        lambda found: _lost(found),
    ),
    _Row(
        "roken pipe",
        re.compile(r"failed : Broken pipe"),
        lambda found: _lost(found),
    ),
    _Row(
        "unexpectedly disconnected",
        re.compile(r"MPI communication peer process has unexpectedly disconnected"),
        lambda found: _about(StatementKind.PEER_LOST, found[0]),
    ),
    _Row(
        "Connect to ",
        re.compile(r"Connect to (\S{1,200}) failed : ([^\n]{1,80})"),
        lambda found: _about(StatementKind.UNREACHABLE, f"connecting to {found[1]} failed ({found[2].strip()})"),
    ),
    _Row(
        "connect to ",
        re.compile(r"connect to (\S{1,200}) (?:returned|failed : )([^\n]{1,80})"),
        lambda found: _about(StatementKind.UNREACHABLE, f"connecting to {found[1]} failed ({found[2].strip()})"),
    ),
    # How NCCL's own code came back, with the words of the system: its warning about it may have been left out.
    _Row(
        "socket.c",
        re.compile(r"NCCL INFO (?:misc/)?socket\.cc?:\d+ -> 2 \(([A-Za-z ]{1,60})\)"),
        lambda found: _about(StatementKind.UNREACHABLE, f"a connection of NCCL's could not be made ({found[1]})"),
    ),
    _Row(
        "ibv_modify_qp failed",
        re.compile(
            r"Call to ibv_modify_qp failed with (?:error )?(?:\d+ )?"
            r"(Connection timed out|No route to host|Network is unreachable)"
        ),
        lambda found: _about(StatementKind.UNREACHABLE, f"InfiniBand could not connect ({found[1]})"),
    ),
    _Row(
        "connectFullMesh failed",
        re.compile(r"Gloo connectFullMesh failed with ([^\n]{1,150})"),
        lambda found: _about(StatementKind.UNREACHABLE, f"gloo's connections could not be made ({found[1].strip()})"),
    ),
    _Row(
        "Got completion",
        re.compile(r"Got completion from peer (\S{1,200}) with (?:status=|error )(\d+)"),
        lambda found: _about(
            StatementKind.UNREACHABLE,
            f"InfiniBand gave up on {found[1]} with status {found[2]}, which can also mean a dead peer",
        ),
    ),
    # Ranks that were compared
    _Row(
        "ismatched collective",
        re.compile(r"Mismatched collective detected, please check your collective calls at and around rank (\d+)"),
        lambda found: _about(StatementKind.OTHER_OPERATIONS, "NCCL has detected a mismatched collective", found[1]),
    ),
    _Row(
        "expects same model",
        re.compile(
            r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while rank (\d+) has "
            r"inconsistent (\d+) params"
        ),
        lambda found: _about(
            StatementKind.OTHER_SIZES,
            f"rank {found[1]}'s model has {found[2]} parameters, rank {found[3]}'s {found[4]}",
            found[1],
            found[3],
        ),
    ),
    _Row(
        "Culprit rank",
        re.compile(r"Culprit rank (\d+); ([^\n]{0,200}MISMATCH[^\n]{0,200})"),
        lambda found: _about(StatementKind.OTHER_OPERATIONS, found[2], found[1]),
    ),
)


def _pid_words(pid: str | None) -> str:
    return f", pid {pid}" if pid else ""


class Statements:
    """Reads statements line by line."""

    def __init__(self) -> None:
        self._mismatch = _Mismatch()
        self._counts = _Counts()
        self._first = _FirstToEnd()
        self._fault = _Fault()
        self._subprocesses: set[str] = set()
        self._missing_at = ""

    @property
    def is_open(self) -> bool:
        """Whether one is being read that goes on in the next line."""
        return any(one.is_open for one in (self._mismatch, self._counts, self._first, self._fault))

    def read(self, text: str, rank: int | None) -> Iterator[Statement]:
        """What this line says, also of what the lines before it have begun.

        Args:
            text: The line.
            rank: The rank that says it; None where that is not known.
        """
        for row in _ROWS:
            found = row.pattern.search(text) if row.word in text else None
            said = row.said(found) if found is not None else None
            if said is not None:
                yield self._completed(said, text, rank)
        if "Killing subprocess " in text:
            self._subprocesses.add(text.rpartition(" ")[2][:20])
        yield from self._mismatch.read(text)
        yield from self._counts.read(text)
        yield from self._first.read(text)
        yield from self._fault.read(text, rank)
        yield from self._missing(text)

    def flush(self) -> Iterator[Statement]:
        """What the file's last lines have begun."""
        yield from self._mismatch.flush()
        yield from self._counts.flush()
        yield from self._fault.flush()
        self._subprocesses.clear()

    def _completed(self, said: Statement, text: str, rank: int | None) -> Statement:
        # Of the only process that DeepSpeed has started on a host, the number is known.
        is_only = said.detail.startswith("DeepSpeed") and len(self._subprocesses) == 1 and "--local_rank=0'" in text
        return replace(
            said,
            by=said.by if said.by is not None else rank,
            local_rank=0 if is_only else said.local_rank,
            line=text.strip()[:_LONGEST_LINE],
        )

    def _missing(self, text: str) -> Iterator[Statement]:
        """PyTorch's analyser of Flight Recorder dumps: who is missing stands some lines below the number."""
        if "ranks joining collective" in text:
            found = re.search(r"sequence number: (\d+)|collective:? ?(\d+)", text)
            self._missing_at = f"number {found[1] or found[2]}" if found else "a collective"
        elif (
            self._missing_at
            and "missing ranks" in text
            and (named := re.search(r"missing ranks: ?\{([\d, ]+)\}", text))
        ):
            detail = f"PyTorch's dump analyzer reports that they did not join {self._missing_at}"
            who = ranks(named[1])
            yield Statement(kind=StatementKind.ABSENT, ranks=who, detail=detail, line=text.strip()[:_LONGEST_LINE])
            self._missing_at = ""


class _Call(NamedTuple):
    """What a rank runs by PyTorch's check; what is not said is empty."""

    rank: int
    op: str
    shape: str
    seq: str

    def words(self, *, with_number: bool) -> str:
        """``"rank 1 runs allreduce of shape [51123456]"``."""
        number = f" (number {self.seq})" if with_number and self.seq else ""
        shape = f" of shape [{self.shape}]" if self.shape else ""
        return f"rank {self.rank} runs {self.op or 'something else'}{shape}{number}"


class _Mismatch:
    """``Detected mismatch between collectives on ranks. Rank 1 is running collective: …, but Rank 0 is …``."""

    _BEGINS = "Detected mismatch between collectives on ranks"
    _ONE = re.compile(
        r"Rank (?P<rank>\d+) is running (?:inconsistent )?collective: ?(?:CollectiveFingerPrint\()?(?P<body>.{0,600}?)"
        r"(?=Rank \d+ is running|Collectives differ|$)"
    )
    _OP = re.compile(r"OpType=(\w+)|^(\w+)\.?\s*$")
    _SHAPE = re.compile(r"TensorShape=\[([\d, ]*)\]")
    _SEQ = re.compile(r"SequenceNumber=(\d+)")
    _WRAPPED = re.compile(r" {5,}")

    def __init__(self) -> None:
        self._lines: list[str] = []

    @property
    def is_open(self) -> bool:
        return bool(self._lines)

    def read(self, text: str) -> Iterator[Statement]:
        begins = self._BEGINS in text
        if begins:
            yield from self.flush()
        if begins or self._lines:
            self._lines.append(text.strip()[:4000])
        if self._lines and (self._is_complete() or len(self._lines) >= _MOST_LINES):
            yield from self.flush()

    def flush(self) -> Iterator[Statement]:
        calls = self._calls()
        if calls:
            same = len(calls) > 1 and len({call.op for call in calls}) == 1
            numbers = len({call.seq for call in calls}) > 1
            words = " and ".join(call.words(with_number=numbers) for call in calls)
            yield Statement(
                kind=StatementKind.OTHER_SIZES if same else StatementKind.OTHER_OPERATIONS,
                ranks=ranks([call.rank for call in calls]),
                detail=f"PyTorch's check of collectives reports that {words}"[: 2 * _LONGEST_DETAIL],
                line=self._lines[0][:_LONGEST_LINE],
            )
        self._lines.clear()

    def _calls(self) -> list[_Call]:
        text = " ".join(self._lines)
        found = list(self._ONE.finditer(text))
        if len(found) < 2:
            # A page that was narrower than the line has torn words: five spaces stand where it was wrapped.
            found = list(self._ONE.finditer(self._WRAPPED.sub("", text))) or found
        return [self._call(whole(one["rank"]), one["body"]) for one in found][:2]

    def _call(self, rank: int, body: str) -> _Call:
        op, shape, seq = self._OP.search(body.strip()), self._SHAPE.search(body), self._SEQ.search(body)
        name = (op[1] or op[2]).lower() if op else ""
        return _Call(rank, name, shape[1] if shape else "", seq[1] if seq else "")

    def _is_complete(self) -> bool:
        calls = self._calls()
        return len(calls) == 2 and bool(calls[1].op) and bool(calls[1].shape or "." in self._lines[-1][-3:])


class _FirstToEnd:
    """Who was the first to end, by launchers of MPI programs, and some lines below how.

    Open MPI and Horovod: ``The first process to do so was:``, ``Process name: [[29973,1],0]``, ``Exit code:    1``;
    Horovod's elastic driver, which names a host and a slot of it: ``Process name: worker-1[0]``; Intel's MPI: ``RANK 2
    PID 77 RUNNING AT node-a``, ``KILLED BY SIGNAL: 9 (Killed)``; MPICH, which names no rank: ``PID 77 RUNNING AT
    node-a``, and of a signal ``EXIT STRING: Killed (signal 9)``.
    """

    _BEGINS = ("first process to do so was", " RUNNING AT ")
    _RANK = re.compile(
        r"Process name: (?:\[\[\d+,\d+\],|\[[\w.@-]{1,100},)?(\d{1,7})\]?\s*$|RANK (\d{1,7}) PID \d+ RUNNING"
    )
    _NAME = "Process name: "
    _CODE = re.compile(r"(?:Exit code|EXIT STATUS): *(\d{1,3})")
    _SIGNAL = re.compile(r"KILLED BY SIGNAL: *(\d{1,3})|EXIT STRING: [\w ]{1,60} \(signal (\d{1,3})\)")
    _MOST_BETWEEN = 8

    def __init__(self) -> None:
        self._left = 0
        self._rank: str | None = None
        self._has_name = False

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def read(self, text: str) -> Iterator[Statement]:
        if any(words in text for words in self._BEGINS):
            self._left, self._rank, self._has_name = self._MOST_BETWEEN, None, False
        elif not self._left:
            return
        self._left -= 1
        if named := self._RANK.search(text):
            self._rank = named[1] or named[2]
        self._has_name |= self._rank is not None or self._NAME in text
        code, ended_by = self._CODE.search(text), self._SIGNAL.search(text)
        if ended_by is not None or (code is not None and self._has_name):
            number = -whole(ended_by[1] or ended_by[2]) if ended_by is not None else whole(code[1] if code else "")
            self._left = 0
            yield replace(_ended(number, rank=self._rank, detail="mpirun"), line=text.strip()[:_LONGEST_LINE])


class _Fault:
    """``Fatal Python error: Segmentation fault``, and below it the stacks of the process.

    By these it is told whether it was a launcher's: of that, nothing follows about a rank.
    """

    _BEGINS = re.compile(
        r"Fatal Python error: (Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    )
    _GOES_ON = re.compile(r'\s*(?:File "|(?:Current thread|Thread) 0x|<no Python frame>|\.\.\.|$)')
    _OF_LAUNCHER = re.compile(
        r"torch/distributed/(?:run\.py|launch\.py|launcher/|elastic/agent/)|deepspeed/launcher/|accelerate/commands/launch"
    )
    # A process that was forked has its launcher's frames below its own.
    _OF_CHILD = re.compile(r'multiprocessing/process\.py", line \d+ in _bootstrap')
    _MOST_LINES = 200

    def __init__(self) -> None:
        self._said: Statement | None = None
        self._left = 0
        self._is_launcher = False
        self._is_child = False

    @property
    def is_open(self) -> bool:
        return self._said is not None

    def read(self, text: str, rank: int | None) -> Iterator[Statement]:
        begins = self._BEGINS.search(text)
        self._left -= 1
        if begins is not None or (self.is_open and (not self._left or not self._GOES_ON.match(text))):
            yield from self.flush()
        if begins is not None:
            said = _ended(_FAULTS[begins[1]], detail="Python")
            self._said = replace(said, by=rank, line=text.strip()[:_LONGEST_LINE])
            self._left, self._is_launcher, self._is_child = self._MOST_LINES, False, False
        elif self.is_open:
            self._is_launcher |= self._OF_LAUNCHER.search(text) is not None
            self._is_child |= self._OF_CHILD.search(text) is not None

    def flush(self) -> Iterator[Statement]:
        said, self._said = self._said, None
        if said is not None and (self._is_child or not self._is_launcher):
            yield said


class _Counts:
    """What NCCL's RAS says of a communicator whose ranks have not launched the same, and of what it misses."""

    _BEGINS = re.compile(r"^\s*#\d+-\d+ \(\w+\) (?:MISMATCH|INCOMPLETE)")
    _COUNT = re.compile(r"(\d+) ranks? ha(?:s|ve) launched up to operation (\d+)")
    _RANK = re.compile(r"^\s*Rank (\d+) -- ")
    _LOST = re.compile(r"Missing communicator data from")

    def __init__(self) -> None:
        self.is_open = False
        self._reset()

    def _reset(self) -> None:
        self._counts: dict[int, int] = {}
        self._listed: list[int] = []
        self._is_lost = False
        self._idle = 0
        self._line = ""

    def read(self, text: str) -> Iterator[Statement]:
        count, rank = self._COUNT.search(text), self._RANK.match(text)
        begins, lost = self._BEGINS.match(text) is not None, self._LOST.search(text) is not None
        if begins:
            yield from self.flush()
        self.is_open = self.is_open or begins or count is not None or lost
        if not self.is_open:
            return
        self._take(count, rank)
        self._line = self._line or text.strip()[:_LONGEST_LINE]
        self._is_lost = self._is_lost or lost
        self._idle = 0 if begins or count or rank or lost else self._idle + 1
        if self._idle > _MOST_LINES:
            yield from self.flush()

    def _take(self, count: _Match | None, rank: _Match | None) -> None:
        if count is not None and len(self._counts) < _MOST_LISTED:
            self._counts[whole(count[2])] = whole(count[1])
        if rank is not None and len(self._listed) < _MOST_LISTED:
            self._listed.append(whole(rank[1]))

    def flush(self) -> Iterator[Statement]:
        listed = ranks(self._listed)
        if self._is_lost and listed:
            yield Statement(
                kind=StatementKind.ABSENT, ranks=listed, detail="NCCL's RAS has no data from them", line=self._line
            )
        elif len(self._counts) > 1:
            most = max(self._counts, key=lambda operation: self._counts[operation])
            few = sum(number for operation, number in self._counts.items() if operation != most)
            words = " and ".join(
                f"{number} ranks have launched up to operation {operation}"
                for operation, number in self._counts.items()
            )
            who = listed if len(listed) == few else ()
            detail = f"NCCL's RAS reports that {words}"[:_LONGEST_DETAIL]
            yield Statement(kind=StatementKind.AHEAD, ranks=who, detail=detail, line=self._line)
        self.is_open = False
        self._reset()
