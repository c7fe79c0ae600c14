"""Explicit statements in logs: launchers report ends of processes, stores who has joined, NCCL and tools name ranks.

Each message of one line is an entry in a table here; ``spanning`` reads messages of several lines.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from lightning_ncclsafe.facts import Statement, StatementKind
from lightning_ncclsafe.reading.lines import Found, found_in, message
from lightning_ncclsafe.reading.spanning import WORDS as SPANNING
from lightning_ncclsafe.reading.spanning import Spanning
from lightning_ncclsafe.reading.values import ranks, whole
from lightning_ncclsafe.report.lines import cut

WAITS = "still waits"
"""The detail of a rank that waits at the store and has not given up."""
OF_EACH = "Horovod"
"""The detail of a launcher that reports the end of every process, not only of the first."""
_LONGEST_LINE = 300
_LONGEST_DETAIL = 200

# Keys by which ranks find each other when a process group, or torchrun's group of agents, is made.
_OF_INIT = r"default_pg|store_based_barrier|torchelastic|rdzv|/ranks?\b|worker_count|//c(?:uda|pu)//|init"
# Ranks that wait for NCCL's id name the awaited rank, and are read elsewhere.
_AT_STORE = r"^(?!.*ncclUniqueId).*"
# Programs also lose other connections.
_OF_RANKS = r"^(?=.*(?:gloo|NCCL|socket|Net :|c10d)).*?"
_SRUN = r"srun: error: \S{1,100}"
_KILLED = r"(?:Out Of Memory|Killed|Bus error|Segmentation fault)"

_ended = partial(message, StatementKind.ENDED)
_not_joined = partial(message, StatementKind.NOT_JOINED)
_waited = partial(message, StatementKind.STORE_WAIT)
_unreachable = partial(message, StatementKind.UNREACHABLE)
_lost = partial(message, StatementKind.PEER_LOST)
_LAUNCHERS = r"torch\.distributed|torchrun|deepspeed|accelerate|lightning|mpirun|mpiexec|horovodrun|\bsrun\b"
_LISTED = r"\[(?P<listed>\d[\d, ]{0,4000})\]"

# Groups of the patterns: ``code``, or ``signal`` by its name or number, with which a process ended; ``rank`` and
# ``other``, or those ``listed``, whom it is about; ``local``, its number within its host; ``by``, who says so; ``came``
# of how many; ``pid``, whose rank another line may give.
_MESSAGES = (
    # torchrun, and what builds on it; of torch 1.9
    _ended("exitcode: ", r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: \d+\)", "torchrun"),
    _ended(
        "FAILED (exitcode",
        r"Child process \d+ \(local_rank (?P<local>\d+)\) FAILED \(exitcode (?P<code>-?\d+)\)",
        "torchrun",
    ),
    # torch.multiprocessing.spawn
    _ended(
        "terminated with ",
        r"[Pp]rocess (?P<local>\d+) terminated with (?:signal (?P<signal>\w+)|exit code (?P<code>\d+))",
        "torch.multiprocessing",
    ),
    _ended(
        "ProcessExitedException",
        r"ProcessExitedException: process (?P<local>\d+) terminated with\s*$",
        "torch.multiprocessing says that process {local} ended",
    ),
    # DeepSpeed: the command is that of the process started last.
    _ended("return code = ", r"exits with return code = (?P<code>-?\d+)", "DeepSpeed's launcher"),
    # torch.distributed.launch before 1.9, and Accelerate: likewise
    _ended(" died", r"died with <Signals\.(?P<signal>\w+): \d+>"),
    _ended("CalledProcessError", r"CalledProcessError: Command .{0,4000}returned non-zero exit status (?P<code>\d+)"),
    _ended(
        "terminated with ",
        r"(?:\[rank: (?P<local>\d+)\] )?Child process with PID \d+ terminated with code (?P<code>-?\d+)",
        "Lightning",
    ),
    _ended(
        "exited on signal",
        r"noticed that process rank (?P<rank>\d+) .{0,300}exited on signal (?P<signal>\d+)",
        "mpirun",
    ),
    _ended("exited with code", r"Global rank (?P<rank>\d+) \(PID \d+\) exited with code (?P<code>-?\d+)", "composer"),
    _ended("crashed with exit code", r"Rank (?P<rank>\d+) crashed with exit code (?P<code>-?\d+)", "composer"),
    _ended("exit with status code", r"Process (?P<rank>\d+) exit with status code (?P<code>\d+)", OF_EACH),
    _ended(
        "MPI_ABORT",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator MPI_COMM_WORLD",
        "mpirun, MPI_ABORT",
        code=1,
    ),
    _ended(" died", r"Worker \S{1,100} pid (?P<pid>\d+) died, exit code: (?P<code>-?\d+)", "vLLM"),
    # The number of a worker is its rank.
    _ended(
        " died",
        r"(?P<who>(?:Worker proc VllmWorker-(?P<rank>\d+)|(?:Worker|Engine core) proc )\S{0,100}) died unexpectedly",
        "an executor of vLLM reports that {who} died unexpectedly",
    ),
    _ended("Worker exit type", r"(?<!\d )Worker exit type: (?P<how>\w+)", "Ray reports that a worker died ({how})"),
    _ended(
        "Worker exit type",
        r"Worker PID: (?P<pid>\d+) Worker exit type: (?P<how>\w+)",
        "Ray reports that a worker died ({how}, pid {pid})",
    ),
    _ended(
        "running low on memory",
        r"Task was killed due to the node running low on memory|the node was running low on memory",
        "Ray's memory monitor",
        code=-9,
    ),
    _ended(
        "memory pressure",
        r"\b[1-9]\d{0,6} Workers \(tasks / actors\) killed due to memory pressure",
        "Ray's memory monitor",
        code=-9,
    ),
    _ended(
        "has been marked dead",
        r"The node with node id: \w{1,80} and address: (?P<where>\S{1,100}) .{0,200}has been marked dead",
        "Ray reports that the host {where} is dead, or does not answer",
    ),
    _ended("its node has died", r"The actor died because its node has died", "Ray reports that a host has died"),
    # The number of a worker of Ray's trainers is its rank.
    _ended(
        "has failed",
        r"^Worker (?P<rank>\d+) has failed\.?\s*$",
        "Ray reports that its trainer's worker {rank} has failed",
    ),
    _ended(
        "status failed", r"Container rank (?P<rank>\d+) status failed .{0,4000}\bcode (?P<code>-?\d+) log", "Paddle"
    ),
    # What a process prints about its own end: UCX, Open MPI
    _ended("Caught signal ", r"Caught signal (?P<signal>\d+) \(", "UCX"),
    _ended("Signal: ", r"\*\*\* .{0,60}Signal: [\w ]{1,40} \((?P<signal>\d+)\)"),
    # The kernel's log: it reports processes that are no ranks in the same way.
    _ended(
        "Killed process",
        r"ut of memory: Killed process (?P<pid>\d+) \((?:python|pt_)[\w.-]{0,20}\)",
        "the kernel's log",
        code=-9,
    ),
    # A shell, about a program that is no launcher
    *(
        _ended(
            word,
            rf"\bline \d+:\s+(?P<pid>\d+) {word}\b(?!.*(?:{_LAUNCHERS})).{{0,200}}\bpython",
            "the shell",
            code=code,
        )
        for word, code in (("Killed", -9), ("Segmentation fault", -11), ("Bus error", -7))
    ),
    # SLURM and Kubernetes
    _ended("oom", r"[Dd]etected \d+ oom[-_]kill event", "SLURM", code=-9),
    _ended("OOMKilled", r"\bOOMKilled\b", "Kubernetes", code=-9),
    _ended(
        "srun: error",
        rf"{_SRUN}: (?P<who>task (?P<rank>\d{{1,7}})): {_KILLED}",
        "srun reports that {who} was killed",
    ),
    _ended(
        "srun: error",
        rf"{_SRUN}: (?P<who>tasks [\d,-]{{1,60}}): {_KILLED}",
        "srun reports that {who} were killed",
    ),
    # Stores
    _not_joined(
        "store based barrier",
        r"store based barrier on rank:? (?P<by>\d+), for key: \S{1,100} \(world_size=(?P<of>\d+), "
        r"(?:worker_count|num_workers_joined)=(?P<came>\d+)",
    ),
    _not_joined(
        "store based barrier",
        r"Waiting in store based barrier to initialize process group for .{0,40}?rank: (?P<by>\d+), key: \S{1,100} "
        r"\(world_size=(?P<of>\d+), (?:worker_count|num_workers_joined)=(?P<came>\d+)",
        WAITS,
    ),
    _not_joined(
        "joined",
        r"Timed out after \d+ seconds waiting for (?:clients|workers)\. (?P<came>\d+)/(?P<of>\d+) (?:clients|workers) "
        r"joined",
    ),
    _not_joined("RendezvousTimeoutError", r"\bRendezvousTimeoutError\b", "for the other agents of torchrun"),
    _unreachable(
        "connect to ",
        r"client socket has failed to connect to (?P<where>\S{1,200}) \(errno: (?P<why>[^)]{1,80})\)",
        "the store at {where} has not been reached ({why})",
    ),
    _unreachable(
        "connect to ",
        r"client socket has timed out after \S{1,20} while trying to connect to \((?P<where>[^)]{1,200})\)",
        "the store at {where} has not been reached",
    ),
    _waited(
        "timed out after",
        r"waitForInput: socket SocketImpl\([^)]{0,200}\) timed out after (?P<ms>\d+)ms",
        "for {ms} ms",
    ),
    *(
        message(kind, word, rf"{_AT_STORE}{pattern}(?P<key>{is_it}\S{{1,200}})", words)
        for kind, is_it in (
            (StatementKind.NOT_JOINED, rf"(?=\S{{0,200}}(?:{_OF_INIT}))"),
            (StatementKind.STORE_WAIT, rf"(?!\S{{0,200}}(?:{_OF_INIT}))"),
        )
        for word, pattern, words in (
            ("keys: ", r"wait timeout after (?P<ms>\d+)ms, keys: ", "for {ms} ms, for key {key}"),
            ("waiting for key", r"Timeout waiting for key: ", "for key {key}"),
        )
    ),
    _waited("Error: Socket Timeout", rf"{_AT_STORE}Error: Socket Timeout\b"),
    # A file as store
    _not_joined("Error: Wait timeout", r"Error: Wait timeout\s*$", "for the others"),
    message(
        StatementKind.BARRIER_WAIT,
        "onitoredBarrier",
        r"Rank (?P<by>\d{1,7}) successfully reached monitoredBarrier, but .{0,80}from rank (?P<rank>\d{1,7})",
    ),
    # Ray Train: workers that wait in a report, and those that have not called it when it is given up
    message(
        StatementKind.LATE,
        "to join the `",
        rf"to join the `(?P<call>[\w.]{{1,100}})` call: {_LISTED}",
        "Ray warns that others wait in `{call}`",
    ),
    message(
        StatementKind.ABSENT,
        "The following ranks have not",
        rf"The following ranks have not (?:called it|joined [\w ]{{1,60}}): {_LISTED}",
        "others have waited in vain in a report, according to Ray",
    ),
    # Connections, of gloo, NCCL's sockets and its network plugins
    _lost("Connection ", rf"{_OF_RANKS}(?P<said>Connection (?:was )?(?:closed|reset) by (?:remote )?peer)", "{said}"),
    _lost("roken pipe", rf"{_OF_RANKS}(?P<said>failed : Broken pipe)", "{said}"),
    _lost(
        "unexpectedly disconnected",
        r"MPI communication peer process has unexpectedly disconnected",
        "MPI communication peer process has unexpectedly disconnected",
    ),
    _unreachable(
        "onnect to ",
        r"[Cc]onnect to (?P<where>\S{1,200}) (?:returned|failed : )(?P<why>[^\n]{1,80})",
        "connecting to {where} failed ({why})",
    ),
    # NCCL retries for a while, and says what failed when it gives up.
    _unreachable(
        "exceeded error retry count",
        r"socketPollConnect: connect (?!to )(?:\S{1,200} )?returned (?P<why>[^,\n]{1,80}), exceeded error retry count",
        "a connection of NCCL's could not be made ({why})",
    ),
    # NCCL's trace of a failed call, with the system's words: the warning before it may be missing.
    _unreachable(
        "socket.c",
        r"NCCL INFO (?:misc/)?socket\.cc?:\d+ -> 2 \((?P<why>[A-Za-z ]{1,60})\)",
        "a connection of NCCL's could not be made ({why})",
    ),
    _unreachable(
        "ibv_modify_qp failed",
        r"Call to ibv_modify_qp failed with (?:error )?(?:\d+ )?"
        r"(?P<why>Connection timed out|No route to host|Network is unreachable)",
        "InfiniBand could not connect ({why})",
    ),
    _unreachable(
        "connectFullMesh failed",
        r"Gloo connectFullMesh failed with (?P<why>[^\n]{1,150})",
        "gloo's connections could not be made ({why})",
    ),
    _unreachable(
        "Got completion",
        r"Got completion from peer (?P<where>\S{1,200}) with (?:status=(?:\w+\()?|error )(?P<why>\d+)",
        "InfiniBand gave up on {where} with status {why}, which can also mean a dead peer",
    ),
    # Comparisons of ranks, and data of another length
    message(
        StatementKind.OTHER_SIZES,
        "preamble.length",
        r"op\.preamble\.length <= op\.nbytes\. (?P<got>\d+) vs (?P<room>\d+)",
        "gloo has received {got} bytes where a collective called for {room}",
    ),
    message(
        StatementKind.OTHER_SIZES,
        "collective mismatch error",
        r"collective mismatch error, local size (?P<mine>\d+) remote size (?P<theirs>\d+)",
        "NCCL reports {mine} bytes at one end of a transfer and {theirs} at the other",
    ),
    message(
        StatementKind.OTHER_OPERATIONS,
        "ismatched collective",
        r"Mismatched collective detected, please check your collective calls at and around rank (?P<rank>\d+)",
        "NCCL has detected a mismatched collective",
    ),
    message(
        StatementKind.OTHER_MODEL,
        "expects same model",
        r"DDP expects same model across all ranks, but Rank (?P<by>(?P<rank>\d+)) has (?P<mine>\d+) params, while rank "
        r"(?P<other>\d+) has inconsistent (?P<theirs>\d+) params",
        "rank {rank}'s model has {mine} parameters, and it has read {theirs} from rank {other}",
    ),
    message(
        StatementKind.OTHER_MODEL,
        "appears not to match",
        r"\[(?P<by>(?P<rank>\d+))\]: (?P<which>params\[\d+\]) in this process with sizes (?P<mine>\[[\d, ]*\]) "
        r"appears not to match \w+ of the same param in process (?P<other>\d+)",
        "{which} of rank {rank} has sizes {mine}, and it has read others from rank {other}",
    ),
    message(
        StatementKind.OTHER_OPERATIONS,
        "Culprit rank",
        # One line may name several.
        r"Culprit rank (?P<rank>\d+); (?P<why>(?:(?!Culprit)[^\n]){0,200}?MISMATCH(?:(?!,? Culprit)[^\n]){0,200})",
        "{why}",
    ),
)

# About processes that DeepSpeed starts and ends, see below.
WORDS = (*(one.word for one in _MESSAGES), *SPANNING, "Killing subprocess ", "Completed store-based barrier")
"""Every line that is read here has one of these words."""


def _code(found: Found[StatementKind]) -> int | None:
    """The exit code of a process; for a signal, by name or number, minus its number."""
    if code := found.groups.get("code"):
        return whole(code)
    name = found.groups.get("signal", "")
    if name.isdecimal():
        return -int(name) if len(name) < 4 else None
    try:
        return -signal.Signals[name.upper()].value
    except KeyError:
        return found.message.code


def _said(found: Found[StatementKind]) -> Statement:
    by, local, came, of = ([*found.of(name), None][0] for name in ("by", "local", "came", "of"))
    return Statement(
        kind=found.message.kind,
        ranks=ranks([*found.of("rank", "other"), *found.groups.get("listed", "").split(",")]),
        by=next(iter(ranks([by])), None),
        detail=cut(found.words, _LONGEST_DETAIL),
        exit_code=_code(found) if found.message.kind is StatementKind.ENDED else None,
        local_rank=whole(local) if local is not None else None,
        count=max(whole(came), 0),
        of=max(whole(of), 0),
    )


def ended_child(number: int) -> Statement:
    """The end of the process with this number, whose traceback torch.multiprocessing has begun to print."""
    return Statement(
        kind=StatementKind.ENDED,
        exit_code=1,
        local_rank=number,
        detail="torch.multiprocessing",
        line=f"Process {number} terminated",
    )


class Statements:
    """Reads statements line by line."""

    def __init__(self) -> None:
        self._spanning = Spanning()
        self._subprocesses: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether a message continues in the next line."""
        return self._spanning.is_open

    def read(
        self, text: str, rank: int | None, rank_of: Callable[[str], int | None] = lambda _: None
    ) -> Iterator[Statement]:
        """The statements in this line, and those that it ends.

        Args:
            rank: Who has written it; None if unknown.
            rank_of: Gives the rank of a process ID, or None.
        """
        for found in found_in(text, _MESSAGES):
            said = self._completed(_said(found), text, rank)
            process = rank_of(found.groups.get("pid", "")) if not said.ranks else None
            yield replace(said, ranks=(process,)) if process is not None else said
        if "Killing subprocess " in text:
            self._subprocesses.add(text.rpartition(" ")[2][:20])
        yield from self._spanning.read(text, rank)

    def flush(self) -> Iterator[Statement]:
        """The statements that the last lines of the file have begun."""
        yield from self._spanning.flush()
        self._subprocesses.clear()

    def _completed(self, said: Statement, text: str, rank: int | None) -> Statement:
        # If DeepSpeed has started only one process on the host, its local rank is 0.
        is_only = said.detail.startswith("DeepSpeed") and len(self._subprocesses) == 1 and "--local_rank=0'" in text
        return replace(
            said,
            by=said.by if said.by is not None else rank,
            local_rank=0 if is_only else said.local_rank,
            line=cut(text.strip(), _LONGEST_LINE),
        )
