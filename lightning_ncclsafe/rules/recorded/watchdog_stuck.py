"""The cause watchdog-stuck: not a collective, but the thread that watches them makes no progress."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Confidence,
    Finding,
    Timeline,
    duration_words,
    finding,
    ranks_words,
    recorded_rule,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import record_of
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import log_evidence


@recorded_rule(
    after="late-at-init",
    remedy=(
        "Look for native code that keeps the GIL while it waits or computes (an extension, a tokenizer, a data "
        "loader's thread) and for a call of CUDA that does not return: py-spy dump --native --pid PID shows both, the "
        "kernel's log (dmesg) shows Xid errors of its GPU. TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC only postpones the abort."
    ),
)
def watchdog_stuck(view: Timeline) -> Iterator[Finding]:
    """NCCL's watchdog thread on a rank made no progress, according to PyTorch's heartbeat monitor.

    Symptom:
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress".

    Cause:
        Something holds the GIL on that rank, or a CUDA call does not return: a lost GPU, a full queue of its driver.

    Remedy:
        Look with py-spy --native at that process, and at the kernel's log for Xid errors.

    Cannot see:
        Which of the two it is; whether the rank was the first to get stuck, if all ranks report it.
    """
    ranks = tuple(rank for rank, facts in sorted(view.facts.items()) if record_of(facts).stuck_s)
    if ranks and not failed(view):
        yield _finding(view, ranks)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    others = view.besides(ranks)
    times = {record_of(view.facts[rank]).stuck_s for rank in ranks}
    up_to = "up to " if len(times) > 1 else ""
    text = f"NCCL's watchdog made no progress on {ranks_words(ranks)} for {up_to}{duration_words(max(times))}"
    text += f", while it did on {ranks_words(others)}" if others else ", on every rank that the log names"
    held = f"something holds the GIL {verb(ranks, 'there', 'on them')}, or a call of CUDA does not return"
    return finding(
        view,
        ranks,
        f"{text}: {held}.",
        confidence=Confidence.LIKELY if len(ranks) < len(others) else Confidence.POSSIBLE,
        evidence=log_evidence(view, ranks[:3]),
    )
