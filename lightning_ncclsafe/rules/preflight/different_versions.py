"""The cause different-versions: ranks run different versions of what has to work together."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import PreflightFacts
from lightning_ncclsafe.rules.kit import Checked, Groups, Severity, spread
from lightning_ncclsafe.rules.preflight.problem import Problem, check

# Between major versions of these the wire format or the order of collectives changes.
_TOGETHER = ("torch", "nccl")


@check(
    after="memory-short",
    remedy=(
        "Start all ranks in the same environment: one container image or one shared virtual environment, the same "
        "module loads, and the same driver on all hosts."
    ),
)
def different_versions(view: Checked) -> Iterator[Problem]:
    """Versions of torch, NCCL, CUDA, the driver, Lightning or Python, or the models of the GPUs, differ between ranks.

    Symptom:
        Ranks hang in their first collective or fail in it with an error that names no version; or some are slower.

    Cause:
        An environment that was updated on some hosts only, a different image, hosts of different generations.

    Remedy:
        The same environment everywhere.

    Cannot see:
        Different code of the user's own.
    """
    for name, groups in versions_of(view).items():
        if groups.differ:
            severity = Severity.ERROR if _incompatible(name, groups) else Severity.WARNING
            yield Problem(ranks=groups.deviating, text=f"{name} is {spread(groups)}", severity=severity)


def versions_of(view: Checked) -> dict[str, Groups[str]]:
    """Ranks by version, for everything that any rank tells of; the model of the GPU and its driver are among it."""
    told = {rank: _told(facts) for rank, facts in view.facts.items()}
    names = dict.fromkeys(name for versions in told.values() for name in versions)
    return {name: view.known(lambda facts, name=name: _told(facts).get(name)) for name in names}  # type: ignore[misc]


def _told(facts: PreflightFacts) -> dict[str, str]:
    gpu = {"GPU": facts.gpu.name, "driver": facts.gpu.driver} if facts.gpu is not None else {}
    return gpu | facts.versions


def _incompatible(name: str, groups: Groups[str]) -> bool:
    majors = {version.partition(".")[0] for version, _ in groups.parts}
    return name.lower() in _TOGETHER and len(majors) > 1
