"""The cause failed-rank, in a log: a rank raised an exception, which ended it."""

import re
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import ExceptionFacts, RankFacts, StatementKind
from lightning_ncclsafe.rules.hang.failed_rank import is_reported_as_exception
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Timeline,
    at_words,
    deepest_user_frame,
    exception_place,
    finding,
    location_of,
    message_of,
    ranks_by,
    ranks_words,
    recorded_rule,
    type_and_place,
)
from lightning_ncclsafe.rules.recorded.kit.calls import record_of
from lightning_ncclsafe.rules.recorded.kit.ends import a_timeout_expired, died, failed_in_nccl, is_error, raised
from lightning_ncclsafe.rules.recorded.kit.evidence import exception_in_log, waited_words
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, compared, stated

_GIST = 200
_OF_DEVICE = (
    "Look at this GPU and at its host: nvidia-smi -q, the kernel's log (dmesg | grep -i xid), its ECC counters. Take "
    "the host out if it happens again; if it moves to another GPU with the code, CUDA_LAUNCH_BLOCKING=1 finds its "
    "kernel. What other ranks print about timeouts or connections follows from it."
)
_REMEDIES = {
    "CUDA error": _OF_DEVICE,
    "CUDA failure": _OF_DEVICE,
    "Xid": _OF_DEVICE,
    "Duplicate GPU": (
        "Give every rank its own GPU: torch.cuda.set_device(LOCAL_RANK) before the process group is created, no "
        "fixed device in the code, no more processes on a host than CUDA_VISIBLE_DEVICES has GPUs."
    ),
    "No network interface": (
        "Let NCCL_SOCKET_IFNAME name an interface of this host that leads to the others (ip -brief address lists "
        "them), or unset it; in a container, check that it has any besides lo."
    ),
    "DistNetworkError": (
        "Give every launch its own port (torchrun --rdzv-endpoint, MASTER_PORT), and end what earlier ones have "
        "left running (ss -ltnp shows who listens)."
    ),
    "Mismatched NCCL version": "Install one version of PyTorch, or of NCCL, on all hosts; see LD_LIBRARY_PATH.",
}
_OF_PEERS = (StatementKind.PEER_LOST, StatementKind.UNREACHABLE, StatementKind.NOT_JOINED, StatementKind.ENDED)
_ENDED_WORKER = re.compile(r"DataLoader worker .{0,40}killed by signal: Terminated")
# These have one meaning only.
_SURE = ("Duplicate GPU", "Mismatched NCCL version", "CUDA error")
_NUMBERS = re.compile(r"\d+")
# So many characters: behind them, messages of one kind differ in addresses, names of devices and hints.
_COMPARED = 60


@recorded_rule(superseded=is_reported_as_exception)
def failed_rank(view: Timeline) -> Iterator[Finding]:
    """A rank's traceback is in the log, of an error that is not about communication.

    Symptom:
        One rank's traceback far above the timeouts of the others, or between them.

    Cause:
        An error on one rank only: a bad sample, no memory left on its device, a path that exists on one host only.

    Remedy:
        Fix the error at the line given. The messages of the other ranks are a consequence.

    Cannot see:
        Whether the rank's own code caught the exception and continued; which rank it was if the log does not say.
    """
    alike = ranks_by({rank: (type_and_place(view.facts[rank]), _placeless(view.facts[rank])) for rank in raised(view)})
    for ranks in alike.values():
        yield _finding(view, ranks)
    unnamed = [exception for exception in view.job.unnamed if not exception.is_consequence]
    for exception in unnamed:
        yield _unnamed(view, exception)
    if not alike and not unnamed:
        found = tuple(_ended_first(view))
        yield from found
        if not found:
            yield from _ended_nameless(view)
            yield from _lost_its_worker(view)
            yield from _in_nccl(view)


def _placeless(facts: RankFacts) -> str:
    """What an exception without a place says: only that shows whether it is the same as another one."""
    exception = facts.exception
    return _NUMBERS.sub("", exception.message)[:_COMPARED] if exception is not None and not exception.stack else ""


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    exception, frame = facts.exception, exception_place(facts)
    name, message = (exception.type, exception.message) if exception else ("", "")
    what = f"{name}: {_cut(message)}" if message else name
    at = at_words(frame)
    waited = waited_words(view, ranks)
    is_sure = bool(waited) or name in _SURE or any(_ended(view, rank) for rank in ranks)
    return finding(
        view,
        ranks,
        f"{ranks_words(ranks)} raised {what}{at}{waited}.",
        confidence=Confidence.LIKELY if is_sure else Confidence.POSSIBLE,
        location=location_of(frame),
        evidence=_evidence(view, ranks),
        remedy=_remedy(name, at, "the other ranks print"),
    )


def _remedy(name: str, at: str, what: str) -> str:
    known = next((remedy for start, remedy in _REMEDIES.items() if name.startswith(start)), "")
    return known or f"Correct the {name}{at}. What {what} about timeouts or connections follows from it."


def _ended(view: Timeline, rank: int) -> bool:
    """Whether a launcher says that an error of its own has ended this rank."""
    return is_error(record_of(view.facts[rank]).exit_code)


def _is_in_vain(view: Timeline, rank: int) -> bool:
    """Whether a rank waited for others, or could not connect to one: its end follows from that."""
    return view.waits(rank) or rank in stated(view, StatementKind.UNREACHABLE).by


def _ended_first(view: Timeline) -> Iterator[Finding]:
    """A launcher reports that a rank was the first to fail, or one of several, by an error that no log shows."""
    codes: dict[int, int] = {}
    for rank, facts in sorted(view.facts.items()):
        record = record_of(facts)
        code = record.exit_code if record.ended_first else None
        if code is not None and is_error(code) and facts.exception is None and not _is_in_vain(view, rank):
            codes[rank] = code
    ranks, words = tuple(codes), " or ".join(map(str, sorted(set(codes.values()))))
    if not ranks:
        return
    one = f"{ranks_words(ranks)} was the first to end, with exit code {words}; its traceback was not read."
    several = f"{ranks_words(ranks)} ended with exit code {words}; the log does not say which was the first."
    yield finding(
        view,
        ranks,
        one if len(ranks) == 1 else several,
        confidence=Confidence.POSSIBLE,
        evidence=tuple(
            Evidence(source="log", rank=rank, text=f"Its launcher reports exit code {codes[rank]}, no earlier one.")
            for rank in ranks[:LISTED]
        ),
        remedy="Look for the traceback in the output of these ranks, and pass those files as well."
        if len(ranks) > 1
        else "Look for the traceback in this rank's own output, and pass that file as well.",
    )


def _lost_its_worker(view: Timeline) -> Iterator[Finding]:
    """SIGTERM ended a worker, as when a job is stopped, and the log is about no other rank."""
    for rank, facts in view.facts.items():
        message = message_of(facts)
        if len(view.facts) == 1 and not a_timeout_expired(view) and _ENDED_WORKER.search(message):
            yield finding(
                view,
                (rank,),
                f"Rank {rank} raised {_cut(message)}: somebody ended its loader's worker, or the whole job.",
                confidence=Confidence.POSSIBLE,
                evidence=_evidence(view, (rank,)),
                remedy="Look at who sends SIGTERM on that host: a scheduler, a script that ends leftover processes.",
            )


def _in_nccl(view: Timeline) -> Iterator[Finding]:
    """NCCL failed on ranks and names no peer: it is their own error, or one of a peer that the log does not show."""
    ranks = failed_in_nccl(view)
    if not ranks or a_timeout_expired(view) or died(view) or stated(view, *_OF_PEERS):
        return
    message = _cut(message_of(view.facts[ranks[0]]))
    yield finding(
        view,
        ranks,
        f"{ranks_words(ranks)} raised {message}; the log does not say why, and a peer that has ended may be behind it.",
        confidence=Confidence.POSSIBLE,
        evidence=_evidence(view, ranks),
        remedy="Run again with NCCL_DEBUG=WARN: NCCL then says what has failed. Read the logs of all ranks and hosts.",
    )


def _ended_nameless(view: Timeline) -> Iterator[Finding]:
    """Processes ended with an error, and the log does not name their ranks, or which of several ended first."""
    if a_timeout_expired(view) or compared(view) or died(view):
        return
    ends = LogStatements(one for one in stated(view, StatementKind.ENDED) if is_error(one.exit_code))
    several = tuple(rank for rank in sorted(view.facts) if _ended(view, rank) and not _is_in_vain(view, rank))
    if not ends and not several:
        return
    codes = {one.exit_code for one in ends} | {record_of(view.facts[rank]).exit_code for rank in several}
    who = f"{ranks_words(several)} ended" if several else "a process ended"
    which = "which of them was the first" if several else "which rank it was"
    by = f" ({ends.details[0]})" if ends.details else ""
    text = f"{who} with exit code {' or '.join(map(str, sorted(codes, key=str)))}{by}; the log does not say {which}"
    ended = tuple(
        Evidence(source="log", rank=rank, text="Its launcher reports that it ended.") for rank in several[:LISTED]
    )
    yield finding(
        view,
        (),
        f"{text}, and its traceback was not read.",
        confidence=Confidence.POSSIBLE,
        evidence=ends.evidence or ended,
        remedy="Look for the first traceback in the output of all ranks, and pass that file as well.",
    )


def _unnamed(view: Timeline, exception: ExceptionFacts) -> Finding:
    frame = deepest_user_frame(exception.stack)
    what = f"{exception.type}: {_cut(exception.message)}" if exception.message else exception.type
    at = at_words(frame)
    is_sure = any(_ended(view, rank) for rank in view.facts)
    doubt = "" if is_sure else "; the log does not say whether that ended it"
    return finding(
        view,
        (),
        f"A rank that the log does not name raised {what}{at}{waited_words(view)}{doubt}.",
        confidence=Confidence.LIKELY if is_sure else Confidence.POSSIBLE,
        location=location_of(frame),
        evidence=(exception_in_log(exception),),
        remedy=_remedy(exception.type, at, "ranks print"),
    )


def _cut(message: str) -> str:
    return message.rstrip(".") if len(message) <= _GIST else f"{message[:_GIST]}…"


def _evidence(view: Timeline, ranks: Iterable[int]) -> tuple[Evidence, ...]:
    exceptions = ((rank, view.facts[rank].exception) for rank in ranks)
    return tuple(exception_in_log(one, rank) for rank, one in exceptions if one is not None)[:LISTED]
