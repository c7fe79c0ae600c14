"""What dumps and logs cannot tell."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.kit import capitalised, ranks_words, verb
from lightning_ncclsafe.rules.recorded.standstill import has_moved
from lightning_ncclsafe.rules.recorded.telling import record_kinds

_SURVIVALS = 8


def recorded_unknowns(job: JobFacts) -> Iterator[str]:
    """What cannot be told from what was read, one sentence each."""
    dumps, logs = record_kinds(job)
    for facts in [one for one in job.ranks if one.record is not None and one.record.survived][:_SURVIVALS]:
        yield (
            f"Rank {facts.rank} also raised {facts.record.survived if facts.record else ''}: as it has come as far as "
            "others that wait, that did not end it."
        )
    silent = tuple(rank for rank in job.silent if rank not in job.outdated)
    if silent:
        did = verb(silent, "it did", "they did")
        yield f"Nothing was read of {ranks_words(silent)}: what {did} is not known."
    if dumps and logs:
        without = tuple(facts.rank for facts in job.ranks if facts.record is not None and not facts.record.has_dump)
        if without:
            yield f"{capitalised(ranks_words(without))} left no dump, only lines in a log."
    unsure = tuple(facts.rank for facts in job.ranks if facts.record is not None and not facts.record.group_known)
    if dumps:
        yield from _of_moments(job, logs)
    if unsure:
        yield f"The log does not say in which process group {ranks_words(unsure)} waited: the default one is assumed."
    if job.ranks:
        yield (
            "Neither dumps nor logs say where a rank's Python stood: a line given here is one at which a collective "
            "was called, which may have been long before."
        )


def _of_moments(job: JobFacts, logs: bool) -> Iterator[str]:
    if has_moved(job):
        yield (
            "The dumps are of different moments, and the job moved in between: that ranks wait in them does not mean "
            "that it hung. Take them all at once, after a timeout."
        )
    elif not logs:
        yield (
            "Dumps do not say for how long ranks had stood there: those of a run that still moves "
            "show ranks that wait, too."
        )
