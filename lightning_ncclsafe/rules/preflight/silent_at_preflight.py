"""The cause silent-at-preflight: a rank never told what it has found on its host."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import JobFacts
from lightning_ncclsafe.rules.kit import Checked
from lightning_ncclsafe.rules.preflight.problem import Problem, check


@check(
    after="too-many-workers",
    remedy=(
        "Look at this rank's own output: it failed, was never started, or is held up before the check, by imports from "
        "a slow file system, swapping, or loading the dataset. Compare the launcher's number of ranks with those that "
        "run."
    ),
    source="process",
)
def silent_at_preflight(view: Checked) -> Iterable[Problem]:
    """Some ranks did not take part in the check of the hosts.

    Symptom:
        The other ranks would wait for them when the process group is made, or in the first collective.

    Cause:
        A rank failed, was killed, was never started, or is much slower to start than the others.

    Remedy:
        Look at the rank's own output.

    Cannot see:
        What the rank does instead, unless a rank of the same host has seen it.
    """
    return _problems(view.job) if view.facts else ()


def _problems(job: JobFacts) -> Iterator[Problem]:
    seen = {process.rank: process.state for process in job.witnessed}
    by_state: dict[str, list[int]] = defaultdict(list)
    for rank in job.silent:
        by_state[seen.get(rank, "")].append(rank)
    for state, ranks in by_state.items():
        there = f", {'its process is' if len(ranks) == 1 else 'their processes are'} {state}" if state else ""
        text = f"no answer, {len(job.ranks):,} of {job.world_size:,} ranks answered{there}"
        yield Problem(ranks=tuple(ranks), text=text, badness=float(bool(state)))
