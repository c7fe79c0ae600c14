"""The cause unpresented-loader: a rank never came to the point at which all present their loaders."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.kit import Evidence, Finding, JobData, agreement_rule, disagreement, ranks_words, verb

_LISTED = 8


@agreement_rule(
    after="loader-count",
    remedy=(
        "Look at this rank's own output: it has failed, is still preparing its data, or has taken another path than "
        "the others. Call the same methods of the Trainer on all ranks, and leave slow preparation to prepare_data, so "
        "that all ranks come to their loaders at about the same time."
    ),
)
def unpresented_loader(view: JobData) -> Iterator[Finding]:
    """Some ranks presented their loaders and others never did.

    Symptom:
        The ranks that did would wait in their first collective until it times out.

    Cause:
        A rank failed, was killed, reads or tokenises data alone, or never called this stage.

    Remedy:
        Look at the rank's own output; let all ranks call the same stages.

    Cannot see:
        What the rank does instead; a report about the hang says that.
    """
    if view.silent:
        others, silent = tuple(view.data), view.silent
        text = (
            f"{ranks_words(silent)} never presented {verb(silent, 'its', 'their')} {view.stage}, "
            f"{ranks_words(others)} did."
        )
        yield disagreement(silent, text, evidence=_evidence(view.job, others))


def _evidence(job: JobFacts, others: tuple[int, ...]) -> Iterator[Evidence]:
    yield Evidence(source="loader", text=f"{len(others):,} of {job.world_size:,} ranks presented their loaders.")
    for process in job.witnessed[:_LISTED]:
        yield Evidence(source="process", rank=process.rank, text=f"Process {process.pid} is {process.state}.")
