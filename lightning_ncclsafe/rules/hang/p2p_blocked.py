"""The cause p2p-blocked: GPUs of one host cannot send to each other."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Pending,
    Plan,
    Timeline,
    batch_words,
    collective_words,
    duration_words,
    finding,
    gpu_evidence,
    gpu_of,
    hang_rule,
    pending_on_nccl,
    ranks_words,
)

# The object broadcasts and barriers of the start; a later collective has other reasons as well.
_FIRST = 8


@hang_rule(
    after="gpu-stuck",
    remedy=(
        "Run once with NCCL_P2P_DISABLE=1: if that passes, peer-to-peer transfers between these GPUs are blocked; if "
        "not, they are not the cause. With this setting, transfers go through the host, slowly. To fix it, turn off "
        "PCIe ACS (lspci -vvv | grep ACSCtl) or the IOMMU (amd_iommu=off or iommu=pt on the kernel's command line) on "
        "bare metal, or change the driver (545 is known for this). nvidia-smi topo -p2p r shows which pairs the driver "
        "allows."
    ),
    plan=Plan.RESTART_WITHOUT_HOST,
)
def p2p_blocked(view: Timeline) -> Iterator[Finding]:
    """The very first collective between the GPUs of a host never completes, although every rank called it.

    Symptom:
        Training stops at the start, after "All distributed processes registered", with 100 % GPU utilization and little
        power on all GPUs; with gloo, or on one GPU, it works.

    Cause:
        Peer-to-peer transfers between GPUs are accepted and never arrive: PCIe access control (ACS) or an IOMMU in
        between, a virtual machine, or a driver that allows it on GPUs that cannot.

    Remedy:
        Set NCCL_P2P_DISABLE=1 as a test and until it is repaired; then fix ACS, IOMMU or the driver.

    Cannot see:
        The transfers themselves: a GPU that hangs at the start looks the same (gpu-stuck, all-joined), unless its
        driver reports it.
    """
    if view.raised or view.silent or view.behind or _has_worked(view):
        return
    where = view.hosts
    for pending in pending_on_nccl(view):
        there = {where.get(rank, "") for rank in pending.calls}
        is_first = pending.first.seq <= _FIRST and not pending.completed and not pending.not_started
        if is_first and len(there) == 1 and "" not in there and not _is_p2p_off(view, pending):
            yield _finding(view, pending)


def _has_worked(view: Timeline) -> bool:
    """Whether any collective has ever completed on NCCL, so that transfers work."""
    entries = (entry for facts in view.facts.values() for entry in facts.collectives)
    return any(entry.completed and entry.backend.startswith("nccl") for entry in entries)


def _is_p2p_off(view: Timeline, pending: Pending) -> bool:
    every = [view.facts[rank].machine.settings for rank in pending.calls]
    is_disabled = any(settings.get("NCCL_P2P_DISABLE", "0") not in ("", "0") for settings in every)
    return is_disabled or any(settings.get("NCCL_P2P_LEVEL", "") in ("LOC", "0") for settings in every)


def _finding(view: Timeline, pending: Pending) -> Finding:
    ranks = tuple(sorted(pending.calls))
    facts = view.facts[ranks[0]]
    text = (
        f"The first collective, {collective_words(pending.first)}, was called by all of {ranks_words(ranks)} on "
        f"{facts.host} and has not ended on any of them for {duration_words(facts.progress.idle_s)}, "
        f"{batch_words(facts.progress)}: peer-to-peer transfers between these GPUs are probably blocked."
    )
    started = all(call.started for call in pending.calls.values())
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if started else Confidence.POSSIBLE,
        evidence=_evidence(view, pending, started),
        location="",
    )


def _evidence(view: Timeline, pending: Pending, started: bool) -> Iterator[Evidence]:
    what = "It has started on every device" if started else "Whether it has started on the devices is not known"
    yield Evidence(source="flight recorder", text=f"{what}, and nothing has ever completed on NCCL in this run.")
    for rank in sorted(pending.calls)[:LISTED]:
        facts = view.facts[rank]
        gpu = gpu_of(facts)
        if gpu is not None:
            yield Evidence(source="gpu", rank=rank, text=f"{gpu.name}, driver {gpu.driver or 'unknown'}.")
        yield from gpu_evidence(facts)
