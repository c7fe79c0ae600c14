"""The cause gpu-stuck, as recorded: on one device something is open that has ended on others of its group."""

from collections.abc import Iterator

from lightning_ncclsafe.rules.kit import (
    Confidence,
    Evidence,
    Finding,
    Timeline,
    counted,
    finding,
    group_words,
    ranks_words,
    recorded_rule,
    verb,
)
from lightning_ncclsafe.rules.recorded.kit.calls import open_calls
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    consequence_evidence,
    counters_evidence,
    described,
    oldest_outstanding,
)
from lightning_ncclsafe.rules.recorded.kit.roots import Root, RootCause, roots_of


@recorded_rule(
    after="crossed-groups",
    remedy=(
        "Look at this GPU on its host: nvidia-smi -q, the kernel's log for Xid errors (dmesg | grep -i xid), its power "
        "and temperature; and in the rank's own output for a CUDA error. If the same GPU stands out in several jobs, "
        "take its host out (--exclude) and have it checked (dcgmi diag -r 3). If it moves to another GPU with the "
        "code, the cause is one of your kernels: find it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer."
    ),
)
def gpu_stuck(view: Timeline) -> Iterator[Finding]:
    """A rank has not completed what members of its group have completed, or not started what all others have.

    Symptom:
        A dump in which a collective is still "scheduled" that other dumps no longer have, or mark as completed.

    Cause:
        A GPU or driver that hangs or has failed (Xid, ECC, fallen off the bus), or a kernel that never ends.

    Remedy:
        Check that GPU and the kernel's log; take the host out.

    Cannot see:
        Which kernel runs on the GPU. Without TORCH_NCCL_ENABLE_TIMING, a kernel that never ends before a collective
        that no rank completes looks like a faulty link (all-joined). A dump that was written earlier than the others,
        and shows everything that the rank had called, looks like a GPU that has failed since.
    """
    found = [] if failed(view) else roots_of(view, RootCause.DEVICE)
    for is_sure in (True, False):
        alike = [root for root in found if root.is_sure is is_sure]
        if alike:
            yield _finding(view, alike, Confidence.LIKELY if is_sure else Confidence.POSSIBLE)


def _finding(view: Timeline, found: list[Root], confidence: Confidence) -> Finding:
    ranks = tuple(sorted({rank for root in found for rank in root.ranks}))
    parts = [_part(view, root) for root in found[:4]]
    return finding(
        view,
        ranks,
        f"{'; '.join(parts)}.",
        confidence=confidence,
        evidence=(*_evidence(view, found), *consequence_evidence(found)),
    )


def _part(view: Timeline, root: Root) -> str:
    rank = root.ranks[0]
    of = f"the {verb(root.ranks, 'GPU', 'GPUs')} of {ranks_words(root.ranks)}"
    has = verb(root.ranks, "has", "have")
    if not root.ops:
        waiting = open_calls(view.facts[rank])[0]
        if waiting.pair_number:
            return f"{of} {has} not completed {described(waiting)}, although the other side has reached it"
        return f"{of} {has} not started {described(waiting)}, although the other side has started"
    name, seq = root.ops[0]
    call = oldest_outstanding(view.facts[rank], name)
    others = tuple(
        other
        for other in view.groups_by_name[name].members
        if other in view.facts and _is_through(view, other, name, seq)
    )
    what = described(call) if call is not None else f"number {seq:,} of {group_words(name)}"
    if not others:
        return f"{of} {has} not started {what}, although all others have"
    through = f"those of {ranks_words(others)} have completed it"
    return f"{of} {has} not completed {what}, while {through}"


def _is_through(view: Timeline, rank: int, name: str, seq: int) -> bool:
    facts = view.facts[rank]
    if any(call.group == name and call.seq == seq and not call.is_p2p for call in facts.collectives):
        return any(c.group == name and c.seq == seq and c.completed and not c.is_p2p for c in facts.collectives)
    return any(group.name == name and group.last_completed >= seq for group in facts.groups)


def _evidence(view: Timeline, found: list[Root]) -> Iterator[Evidence]:
    for name in dict.fromkeys(root.ops[0][0] for root in found[:4] if root.ops):
        yield from counters_evidence(view, view.groups_by_name[name])
    for root in found[:4]:
        for rank in root.ranks[:4]:
            entries = counted(len(open_calls(view.facts[rank])), "entry")
            text = f"Its dump has {entries} that have not completed."
            yield Evidence(source="flight recorder", rank=rank, text=text)
