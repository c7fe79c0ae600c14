"""The cause host-starved: a rank has work to do, but lacks a core, CPU quota or memory of its host."""

from collections.abc import Iterator
from enum import Enum

from lightning_ncclsafe.facts import MainThreadFacts, PressureFacts, ProcessFacts, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    TOO_LITTLE_MEMORY,
    Evidence,
    Finding,
    Reason,
    Timeline,
    duration_words,
    hang_rule,
    how_we_know,
    is_starved,
    is_swapped_out,
    memory_evidence,
    ranks_by,
    silent_finding,
    silent_processes,
    straggler_finding,
    waits_for_memory,
)

# Above these shares of the time, a rank is late because of them, and not merely a little slower.
_QUEUED = 0.5
_THROTTLED = 0.5
_STALLED = 0.3
# A rank that gets more of a core is slower by less than what counts as unusual (guard/thresholds.py): that it is late
# has another reason.
_ENOUGH = 0.25
# A shorter measurement shows nothing.
_SHORTEST_S = 1.0


class _Need(Enum):
    """What a rank lacks: words that follow "Rank 3", and what to do."""

    def __init__(self, words: str, remedy: str) -> None:
        self.words = words
        self.remedy = remedy

    CORES = (
        "is|are waiting for a core most of the time",
        "Give this rank its own cores: fewer loader workers and threads (OMP_NUM_THREADS) for all ranks of the host "
        "together, no other job on it, a CPU mask that does not put several ranks on one core (taskset, srun "
        "--cpus-per-task, --cpu-bind).",
    )
    QUOTA = (
        "is|are held up by the CPU quota of its|their control group",
        "Raise the CPU limit of its control group (docker --cpus, Kubernetes resources.limits.cpu, the scheduler's), "
        "or use fewer loader workers and threads: all of them together share that quota.",
    )
    MEMORY = (
        "is|are waiting for memory that is swapped out",
        TOO_LITTLE_MEMORY,
    )


@hang_rule(after="all-joined", is_of_machine=True)
def host_starved(view: Timeline) -> Iterator[Finding]:
    """A rank is late because its host lets it run only part of the time.

    Symptom:
        One rank, or all ranks of one host, are slow everywhere, with no line that explains it; loggers, heartbeats and
        the watchdog are late too.

    Cause:
        More threads and workers than cores, another job on the host, an exhausted CPU quota of the container (cpu.stat:
        nr_throttled), a CPU mask with several ranks on one core, or swapping.

    Remedy:
        Use fewer workers and threads, reserve cores for each rank, raise the quota, or use less memory per rank.

    Cannot see:
        Which other process takes the cores; what happened more than 20 seconds ago.
    """
    for rank, process in _starved(view):
        swapped = process.state == "disk-sleep"
        starved = f"starved of CPU time: it got {process.ran_share or 0:.0%} of a core"
        yield silent_finding(
            view,
            rank,
            process,
            "swapped out in part and waits for its memory" if swapped else starved,
            remedy=_Need.MEMORY.remedy if swapped else f"{_Need.CORES.remedy} {_Need.QUOTA.remedy}",
        )
    needs = {rank: next(_needs(view.facts[rank], view.witnesses.get(rank)), None) for rank in view.awaited}
    for need, ranks in ranks_by(needs).items():
        if need is None:
            continue
        evidence = (
            *(item for rank in ranks[:LISTED] for item in _evidence(view.facts[rank])),
            *how_we_know(view, ranks),
        )
        amount = _amount(view.facts[ranks[0]], need, view.witnesses.get(ranks[0]))
        yield straggler_finding(view, ranks, need.words, amount, evidence=evidence, remedy=need.remedy)


def _starved(view: Timeline) -> Iterator[tuple[int, ProcessFacts]]:
    """Silent ranks that lack a core or memory, including those that collect garbage slowly for that reason."""
    yield from silent_processes(view, Reason.STARVED)
    for rank, process in silent_processes(view, Reason.COLLECTING):
        if is_starved(process) or (process.state == "disk-sleep" and is_swapped_out(process)):
            yield rank, process


def _needs(facts: RankFacts, seen: ProcessFacts | None) -> Iterator[_Need]:
    """What it lacks, the most direct sign first; as others have seen it if it was too slow to report it."""
    pressure, thread = facts.machine.pressure, facts.machine.main_thread
    if pressure is not None and _is_throttled(pressure):
        yield _Need.QUOTA
    if _lacks_cores(thread) if thread is not None else seen is not None and is_starved(seen):
        yield _Need.CORES
    if waits_for_memory(facts):
        yield _Need.MEMORY


def _lacks_cores(thread: MainThreadFacts) -> bool:
    if thread.over_s < _SHORTEST_S or (thread.ran_s or 0.0) >= _ENOUGH * thread.over_s:
        return False
    return _queued_s(thread) >= _QUEUED * thread.over_s


def _queued_s(thread: MainThreadFacts) -> float:
    """Seconds that it waited for a core, including the present wait, which the kernel does not count before its end."""
    counted_s = thread.queued_s or 0.0
    always_ready = thread.looks > 1 and thread.running_looks == thread.looks
    waited_s = thread.over_s - thread.ran_s if always_ready and thread.ran_s is not None else 0.0
    return min(max(counted_s, waited_s), thread.over_s)


def _is_throttled(pressure: PressureFacts) -> bool:
    if pressure.over_s < _SHORTEST_S or not pressure.periods or pressure.throttled_periods is None:
        return False
    often = pressure.throttled_periods >= _THROTTLED * pressure.periods
    return often and (pressure.throttled_s or 0.0) >= _STALLED * pressure.over_s


def _amount(facts: RankFacts, need: _Need, seen: ProcessFacts | None) -> str:
    pressure, thread = facts.machine.pressure, facts.machine.main_thread
    if need is _Need.CORES and thread is None and seen is not None:
        return f" (it got {seen.ran_share or 0:.0%} of one)"
    if need is _Need.CORES and thread is not None:
        return f" ({duration_words(_queued_s(thread))} of the last {duration_words(thread.over_s)})"
    if need is _Need.QUOTA and pressure is not None:
        return f" (in {pressure.throttled_periods} of the last {pressure.periods} periods)"
    return ""


def _evidence(facts: RankFacts) -> Iterator[Evidence]:
    thread, pressure, host = facts.machine.main_thread, facts.machine.pressure, facts.host_facts
    if thread is not None:
        text = "; ".join(_thread_words(thread))
        yield Evidence(
            source="process", rank=facts.rank, text=f"In the last {thread.over_s:.0f} s its main thread {text}."
        )
    if pressure is not None and (words := list(_pressure_words(pressure))):
        yield Evidence(source="host", rank=facts.rank, text=f"In the last {pressure.over_s:.0f} s {'; '.join(words)}.")
    if host.load_1min is not None and host.cores:
        text = f"The load average of its host is {host.load_1min:.1f}; it may run on {host.cores} cores."
        yield Evidence(source="host", rank=facts.rank, text=text)
    yield from memory_evidence(facts)


def _thread_words(thread: MainThreadFacts) -> Iterator[str]:
    if thread.ran_s is not None and thread.queued_s is not None:
        yield f"ran for {thread.ran_s:.1f} s and waited for a core for {thread.queued_s:.1f} s"
    if thread.preempted is not None:
        yield f"it was preempted {thread.preempted:,} times"
    if thread.major_faults:
        yield f"{thread.major_faults:,} pages had to be read back"


def _pressure_words(pressure: PressureFacts) -> Iterator[str]:
    if pressure.throttled_periods:
        yield (
            f"the quota of its control group was used up in {pressure.throttled_periods} of {pressure.periods} "
            f"periods, which took {pressure.throttled_s or 0.0:.1f} s"
        )
    shares = (
        (pressure.cpu_waited, "some task waited for a core"),
        (pressure.memory_stalled, "all tasks waited for memory"),
        (pressure.io_stalled, "all tasks waited for storage"),
    )
    yield from (f"{what} {share:.0%} of the time" for share, what in shares if share)
