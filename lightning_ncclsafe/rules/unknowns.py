"""What the facts do not show, so that a report does not claim more than is known."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from lightning_ncclsafe.facts import JobFacts, NotRecorded, UnrecordedGroup
from lightning_ncclsafe.rules.kit import (
    Timeline,
    capitalised,
    clause,
    group_words,
    is_gone,
    ranks_words,
    timeline,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_dumps, has_logs, has_moved, record_of

_SURVIVALS = 8
_BY_STACKS = "who is behind is judged by stacks alone"
_REASONS = {
    NotRecorded.NO_ENTRY: (
        "{ranks} called {calls} with {backend}, and the Flight Recorder has no entry: {by_stacks}. Set "
        "TORCH_FR_BUFFER_SIZE=2000 before the program starts: it is 0, or the recorder was made before the guard."
    ),
    NotRecorded.NO_DUMP: (
        "{ranks} called {calls} with {backend}, and this build of PyTorch cannot dump their recorder: {by_stacks}. "
        "Install a build that can, as those of pytorch.org from 2.8 on."
    ),
    NotRecorded.UNKNOWN_BACKEND: (
        "{ranks} called {calls} with {backend}, an unknown recorder: {by_stacks}. Those of gloo and NCCL are known."
    ),
    NotRecorded.DRIVER_SILENT: (
        "{ranks} called {calls} with {backend}, and CUDA's driver does not answer there, so that the Flight Recorder "
        "is not read: {by_stacks}. A thread that waits for the device (cudaFree) may hold the driver's lock."
    ),
    NotRecorded.OUTSIDE: (
        "{ranks} {was} inspected from outside, where the Flight Recorder cannot be read: {by_stacks}."
    ),
    NotRecorded.LOST: (
        "{ranks} called {calls} in {group} of which the Flight Recorder has no entry left: set TORCH_FR_BUFFER_SIZE "
        "higher to keep more."
    ),
}


def not_recorded(by_rank: Mapping[int, Iterable[UnrecordedGroup]]) -> Iterator[str]:
    """Sentences about collectives that no recorder has: what follows from that, and what to do.

    Args:
        by_rank: The groups of each rank.
    """
    alike: dict[tuple[NotRecorded, str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank, groups in sorted(by_rank.items()):
        for group in groups:
            name = group_words(group.name) if group.why is NotRecorded.LOST else ""
            alike[group.why, group.backend, name][rank] += max(group.calls, 0)
    for (why, backend, name), calls in alike.items():
        yield _REASONS[why].format(
            ranks=capitalised(ranks_words([*calls])),
            calls=_calls_words(min(calls.values()), max(calls.values())),
            backend=backend or "?",
            group=name,
            was=verb([*calls], "was", "were"),
            by_stacks=_BY_STACKS,
        )


def _calls_words(fewest: int, most: int) -> str:
    if most == 0:  # they are not counted
        return "collectives"
    numbers = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    return f"{numbers} {'collective' if most == 1 else 'collectives'}"


def unknowns(job: JobFacts) -> tuple[str, ...]:
    """What these facts do not show, one sentence each."""
    view = timeline(job)
    if job.is_compared:
        # No rank waits yet, so no recorder is needed, and a rank that did not take part is a finding.
        return (*job.missing, *_missing(view))
    if job.is_recorded:
        return (*job.missing, *_of_recordings(job), *_device_state(view))
    return (
        *_silence(view),
        *_moved(job),
        *_elsewhere(view),
        *_recorder(view),
        *job.missing,
        *_missing(view),
        *_device_state(view),
    )


def _silence(view: Timeline) -> Iterator[str]:
    # A rank whose process has ended does nothing any more; of others, a witness may have read the stack.
    alive = tuple(rank for rank in view.silent if not (is_gone(view, rank) or _is_seen(view, rank)))
    if not view.facts and view.silent:
        yield "No rank answered, so nothing is known about any of them."
    elif alive:
        yield f"{capitalised(ranks_words(alive))} did not answer: what {verb(alive, 'it does', 'they do')} is unknown."


def _is_seen(view: Timeline, rank: int) -> bool:
    """Whether it is known from outside what a rank does."""
    process = view.witnesses.get(rank)
    return process is not None and bool(process.stack)


def _moved(job: JobFacts) -> Iterator[str]:
    if job.moved is not None:
        yield (
            f"Rank {job.moved} made progress again before all ranks had answered, so their facts are from different "
            "moments: a cause that compares ranks is at most possible."
        )


def _elsewhere(view: Timeline) -> Iterator[str]:
    ranks = view.job.elsewhere
    if ranks:
        yield (
            f"{capitalised(clause(ranks, 'was|were'))} not inspected: inspect all processes of "
            "the job, on every host with --output DIR, and join the hosts with ncclsafe diagnose DIR."
        )


def _recorder(view: Timeline) -> Iterator[str]:
    without = tuple(sorted(rank for rank, facts in view.facts.items() if not (facts.groups or facts.unrecorded)))
    if without and len(view.facts) + len(view.silent) > 1:
        names = capitalised(ranks_words(without))
        yield f"{names} gave no Flight Recorder data: {_BY_STACKS}."
    yield from not_recorded({rank: facts.unrecorded for rank, facts in view.facts.items()})
    lost = [rank for rank in view.facts if _has_lost(view, rank)]
    if lost:
        yield (
            f"The Flight Recorder of {ranks_words(lost)} has lost the entry of an outstanding collective: set "
            "TORCH_FR_BUFFER_SIZE higher to keep more."
        )


def _has_lost(view: Timeline, rank: int) -> bool:
    recorded = {entry.group for entry in view.facts[rank].collectives}
    groups = view.facts[rank].groups
    return any(group.last_enqueued > max(group.last_completed, 0) and group.name not in recorded for group in groups)


def _device_state(view: Timeline) -> Iterator[str]:
    backends = {doing.collective.backend for doing in view.activities.values() if doing.collective is not None}
    if "gloo" in backends:
        yield "Gloo does not report whether a collective has started, only that it was called and whether it completed."


def _missing(view: Timeline) -> Iterator[str]:
    """What ranks could not determine, one sentence for all ranks with the same text."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, facts in sorted(view.facts.items()):
        for text in (*facts.missing, *(facts.preflight.missing if facts.preflight is not None else ())):
            by_text[text].append(rank)
    for text, ranks in by_text.items():
        yield f"{capitalised(ranks_words(ranks))}: {text}"


def _of_recordings(job: JobFacts) -> Iterator[str]:
    """What dumps and logs do not show, one sentence each."""
    dumps, logs = has_dumps(job), has_logs(job)
    for facts in [one for one in job.ranks if record_of(one).survived][:_SURVIVALS]:
        yield (
            f"Rank {facts.rank} also raised {record_of(facts).survived}, but that did not end it: "
            "it reached the same point as other waiting ranks."
        )
    silent = tuple(rank for rank in job.silent if rank not in (*job.outdated, *job.left_out))
    if silent:
        did = verb(silent, "it did", "they did")
        yield f"Nothing was read of {ranks_words(silent)}: what {did} is unknown."
    if dumps and logs:
        without = tuple(facts.rank for facts in job.ranks if facts.record is not None and not facts.record.has_dump)
        if without:
            yield f"{capitalised(ranks_words(without))} left no dump, only lines in a log."
    unsure = tuple(facts.rank for facts in job.ranks if not record_of(facts).group_known)
    if dumps:
        yield from _of_moments(job, logs)
    if unsure:
        yield f"The log does not say in which process group {ranks_words(unsure)} waited: the default one is assumed."
    if job.ranks:
        yield (
            "Neither dumps nor logs say which line of Python a rank was at: a line given here is one at which a "
            "collective was called, possibly long before."
        )


def _of_moments(job: JobFacts, logs: bool) -> Iterator[str]:
    if has_moved(job):
        yield (
            "The dumps were taken at different moments, and the job made progress in between: ranks that wait in them "
            "do not mean that it hung. Take all dumps at once, after a timeout."
        )
    elif not logs:
        yield (
            "Dumps do not say how long ranks had waited there: those of a run that still makes progress "
            "also show waiting ranks."
        )
