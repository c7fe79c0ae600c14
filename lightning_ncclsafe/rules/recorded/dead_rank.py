"""The cause dead-rank, in a log: by its launcher's word a signal has ended a rank's process."""

from collections import defaultdict
from collections.abc import Iterable

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.rules.recorded.ended import FATAL, died, fatal_exit, raised
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, ranks_words, verb

_REMEDY = "Look at the kernel's log (dmesg) of its host and at the end of its own output."
_REMEDIES = {
    -9: (
        "If the kernel's log (dmesg) of its host names the out-of-memory killer, need less memory on the host: fewer "
        "loader workers, a smaller prefetch_factor, no full copy of the dataset in every rank; or give the job more."
    ),
    -7: "Give the job more shared memory (docker run --shm-size, an emptyDir of medium Memory), or use fewer workers.",
}


def dead_rank(job: JobFacts) -> Iterable[Finding]:
    """The launcher says that a signal ended a rank's process, and not the watchdog's own abort.

    Symptom:
        "exitcode: -9", "Signal 11 (SIGSEGV)", "task 3: Out Of Memory" at the end of the log; the others time out.

    Cause:
        The out-of-memory killer, a scheduler, a segmentation fault, a full /dev/shm.

    Remedy:
        Look at the kernel's log of that host. Need less host memory if the out-of-memory killer struck.

    Cannot see:
        Who sent a SIGKILL: launchers send one, too, to whoever does not end after SIGTERM.
    """
    view = timeline(job)
    alike: dict[int, list[int]] = defaultdict(list)
    for rank in died(view):
        alike[fatal_exit(view, rank)].append(rank)
    if raised(view):
        # Whoever else was ended then was ended because of that.
        return
    for code, ranks in alike.items():
        yield _finding(view, code, tuple(ranks))


def _finding(view: Timeline, code: int, ranks: tuple[int, ...]) -> Finding:
    others = tuple(rank for rank in view.waiting if rank not in ranks)
    tail = f"; {ranks_words(others)} waited in vain" if others else ""
    text = f"{ranks_words(ranks)} {verb(ranks, 'was', 'were')} {FATAL[code]}{tail}."
    return Finding(
        rule="dead-rank",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY if len(ranks) == 1 else Confidence.POSSIBLE,
        summary=capitalised(text),
        ranks=ranks,
        evidence=tuple(
            Evidence(source="log", rank=rank, text=f"Its launcher says: exit code {code}.") for rank in ranks[:8]
        ),
        remedy=_REMEDIES.get(code, _REMEDY),
    )
