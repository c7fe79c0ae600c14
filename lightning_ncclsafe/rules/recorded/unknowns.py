"""What dumps and logs cannot tell."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.recorded.telling import record_kinds
from lightning_ncclsafe.rules.wording import capitalised, ranks_words, verb


def recorded_unknowns(job: JobFacts) -> Iterator[str]:
    """What cannot be told from what was read, one sentence each."""
    dumps, logs = record_kinds(job)
    if job.silent:
        did = verb(job.silent, "it did", "they did")
        yield f"Nothing was read of {ranks_words(job.silent)}: what {did} is not known."
    if dumps and logs:
        without = tuple(facts.rank for facts in job.ranks if facts.record is not None and not facts.record.has_dump)
        if without:
            yield f"{capitalised(ranks_words(without))} left no dump, only lines in a log."
    unsure = tuple(facts.rank for facts in job.ranks if facts.record is not None and not facts.record.group_known)
    if unsure:
        yield f"The log does not say in which process group {ranks_words(unsure)} waited: the default one is assumed."
    if job.ranks:
        yield (
            "Neither dumps nor logs say where a rank's Python stood: a line given here is one at which a collective "
            "was called, which may have been long before."
        )
