"""The cause gpu-unhealthy: a GPU reports errors, is slowed down, or waits for a repair."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import GpuFacts
from lightning_ncclsafe.rules.kit import Checked
from lightning_ncclsafe.rules.preflight.problem import Problem, check

_LISTED = 3


@check(
    after="swap-in-use",
    remedy=(
        "Take this host out of the job and have the GPU reset (nvidia-smi --gpu-reset) or the host rebooted; where it "
        "is slowed down, look at cooling and power (nvidia-smi -q -d PERFORMANCE)."
    ),
)
def gpu_unhealthy(view: Checked) -> Iterator[Problem]:
    """The driver reports memory errors, a repair that is due, held-down clocks, Xid errors or a recovery action.

    Symptom:
        One rank is slower than all others in every step, or its collectives start and never end.

    Cause:
        Failing memory or links, heat, a power limit, a driver that has lost the GPU before.

    Remedy:
        Do without this host until its GPU is reset or replaced.

    Cannot see:
        Errors that the driver does not count; Xid errors where the kernel's log cannot be read.
    """
    for rank, facts in view.facts.items():
        words = list(_words(facts.gpu)) if facts.gpu is not None else []
        if words and facts.gpu is not None:
            yield Problem(
                ranks=(rank,), text=f"GPU {facts.gpu.index}: {', '.join(words)}", badness=float(_badness(facts.gpu))
            )


def _words(gpu: GpuFacts) -> Iterator[str]:
    if gpu.recovery_action:
        yield f"the driver asks for: {gpu.recovery_action}"
    if gpu.xids:
        yield f"Xid {', '.join(gpu.xids[-_LISTED:])}"
    if gpu.ecc_errors and gpu.ecc_errors > 0:
        yield f"{gpu.ecc_errors:,} uncorrected memory {'error' if gpu.ecc_errors == 1 else 'errors'}"
    if gpu.pending_repair:
        yield "a repair of its memory is pending or has failed"
    if gpu.throttled_by:
        yield f"clocks held down by {', '.join(gpu.throttled_by)}"


def _badness(gpu: GpuFacts) -> int:
    """What ends runs comes before what slows them."""
    return 2 * bool(gpu.recovery_action or gpu.xids) + bool(gpu.ecc_errors or gpu.pending_repair)
