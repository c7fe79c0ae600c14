"""The cause worker-died: a loader's worker was killed, or has failed without a word, and its rank waits for it."""

import re
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import JobFacts, RankFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.machine_facts import EndedProcess
from lightning_ncclsafe.rules.memory import memory_evidence, short_of_memory
from lightning_ncclsafe.rules.sentences import batch_words, how_we_know, location, severity, standing, while_others_wait
from lightning_ncclsafe.rules.shared_memory import says_shm_is_full
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised

# As torch's loader says it, and Python's pool of processes.
_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly)"
    r"|process pool was terminated abruptly"
)
# Where a process waits for what another one sends it.
_WAITS = re.compile(
    r"/multiprocessing/(?:queues|connection|pool|popen_fork|synchronize|managers)\.py$|/queue\.py$"
    r"|/concurrent/futures/|/torch/utils/data/dataloader\.py$"
)
# What a rank gets in place of a batch whose maker dies while it hands it over, and where.
_BROKEN = ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError", "FileNotFoundError")
_HANDS_OVER = re.compile(r"/torch/multiprocessing/reductions\.py$|/multiprocessing/resource_sharer\.py$")
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
_KILLS = ("SIGKILL", "Killed")
_REMEDY = (
    "A worker that is killed by SIGSEGV, SIGABRT or SIGBUS has failed in native code (a decoder, a library that was "
    "initialised before the fork): run with num_workers=0 to see the error, or with multiprocessing_context='spawn'."
)
_REMEDY_KILLED = (
    "SIGKILL mostly is the kernel's out-of-memory killer (dmesg, memory.events of the control group) or a scheduler: "
    "need less memory, with fewer workers, a smaller prefetch_factor, data in arrays instead of Python objects."
)


def worker_died(job: JobFacts) -> Iterable[Finding]:
    """A process that makes a rank's batches is dead.

    Symptom:
        One rank raises "DataLoader worker (pid 4711) is killed by signal" at whatever line it has come to, or waits
        for a queue that nobody fills; all others wait for it.

    Cause:
        The out-of-memory killer, a segmentation fault in a decoder, a bus error; a library that does not survive a
        fork.

    Remedy:
        Need less memory; run without workers to see the error.

    Cannot see:
        What killed it, beyond the signal and the kernel's counter; a worker that its parent has already replaced, as
        multiprocessing's Pool does.
    """
    view = timeline(job)
    for rank in view.raised:
        facts = view.facts[rank]
        if (found := _died(facts)) and not says_shm_is_full(facts):
            yield _raised(view, rank, found["pids"] or "", (found["signal"] or "").strip(), Confidence.CERTAIN)
        elif _breaks_off(facts):
            yield _broken_off(view, facts)
    for rank in view.working(view.suspects):
        facts = view.facts[rank]
        if facts.machine.ended and (view.activities[rank].waits_for_data or _waits_for_a_process(facts)):
            yield _waits_in_vain(view, rank)


def _died(facts: RankFacts) -> re.Match[str] | None:
    return _DIED.search(facts.exception.message) if facts.exception is not None else None


def _breaks_off(facts: RankFacts) -> bool:
    """Whether its loader's worker was gone before a batch of its had been handed over."""
    exception = facts.exception
    if exception is None or exception.type not in _BROKEN:
        return False
    files = [frame.file.replace("\\", "/") for frame in exception.stack]
    return any(map(_HANDS_OVER.search, files)) and any(map(_LOADER.search, files))


def _broken_off(view: Timeline, facts: RankFacts) -> Finding:
    # The others are asked to end, and do so with code 0.
    killed = next((child for child in facts.machine.ended if child.signal), None)
    confidence = Confidence.CERTAIN if killed else Confidence.LIKELY
    return _raised(view, facts.rank, str(killed.pid) if killed else "", killed.signal if killed else "", confidence)


def _waits_for_a_process(facts: RankFacts) -> bool:
    return any(_WAITS.search(frame.file.replace("\\", "/")) for frame in facts.stack[-4:])


def _raised(view: Timeline, rank: int, pids: str, signal: str, confidence: Confidence) -> Finding:
    facts = view.facts[rank]
    who = f"The loader's worker {pids}" if pids else "A worker process"
    how = f"was killed by a signal ({signal})" if signal else "has ended without a word"
    text = (
        f"{who} of rank {rank} {how}{_killer(facts)}, {batch_words(facts.progress)}{while_others_wait(view, (rank,))}."
    )
    exception = facts.exception
    said = Evidence(source="exception", rank=rank, text=f"{exception.type}: {exception.message}" if exception else "")
    return Finding(
        rule="worker-died",
        severity=Severity.ERROR,
        confidence=confidence,
        summary=text,
        ranks=(rank,),
        evidence=(said, *_evidence(facts)),
        remedy=_remedy(facts, signal),
    )


def _waits_in_vain(view: Timeline, rank: int) -> Finding:
    facts = view.facts[rank]
    ended = facts.machine.ended
    killed = tuple(child for child in ended if child.signal)
    chosen = (killed or ended)[0]
    text = (
        f"Rank {rank} waits for worker {chosen.pid}, which {_end_words(chosen)}{_killer(facts)}: {standing(view, rank)}"
        f"{while_others_wait(view, (rank,))}."
    )
    return Finding(
        rule="worker-died",
        severity=severity(view.job),
        # Of one that has exited by itself it is not known whether anything was expected of it.
        confidence=Confidence.CERTAIN if killed else Confidence.LIKELY,
        summary=capitalised(text),
        ranks=(rank,),
        location=location(view, (rank,)),
        evidence=(*_evidence(facts), *how_we_know(view, (rank,))),
        remedy=_remedy(facts, chosen.signal),
    )


def _end_words(child: EndedProcess) -> str:
    return f"was killed by {child.signal}" if child.signal else f"has exited with code {child.exit_code}"


def _killer(facts: RankFacts) -> str:
    return ", and the kernel's out-of-memory killer has struck on its host" if facts.host_facts.oom_kills else ""


def _evidence(facts: RankFacts) -> Iterator[Evidence]:
    for child in facts.machine.ended[:8]:
        text = f"Process {child.pid}, a child of this rank, {_end_words(child)}."
        yield Evidence(source="process", rank=facts.rank, text=text)
    if kills := facts.host_facts.oom_kills:
        text = (
            f"The kernel's out-of-memory killer has ended {kills} process{'' if kills == 1 else 'es'} since the start."
        )
        yield Evidence(source="host", rank=facts.rank, text=text)
    for loader in facts.loaders:
        text = f"{loader.dataset or 'A dataset'} is read with num_workers={loader.num_workers}."
        yield Evidence(source="loader", rank=facts.rank, text=text)
    yield from memory_evidence(facts)


def _remedy(facts: RankFacts, signal: str) -> str:
    memory = signal in _KILLS or bool(facts.host_facts.oom_kills) or short_of_memory(facts.host_facts)
    return _REMEDY_KILLED if memory else _REMEDY
