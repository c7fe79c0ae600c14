"""The cause out-of-step: ranks of one group time out in different numbers, so some are ahead of the others."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import RankFacts, StatementKind
from lightning_ncclsafe.rules.kit import (
    ROOTED,
    Confidence,
    Finding,
    GroupView,
    Timeline,
    clause,
    finding,
    group_words,
    recorded_rule,
)
from lightning_ncclsafe.rules.recorded.kit.calls import has_dumps, idle_behind
from lightning_ncclsafe.rules.recorded.kit.divergences import OF_TWO
from lightning_ncclsafe.rules.recorded.kit.ends import failed
from lightning_ncclsafe.rules.recorded.kit.evidence import (
    counters_evidence,
    log_evidence,
    one_element_evidence,
    waiting_in,
    waiting_words,
)
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, stated


@recorded_rule(
    after="diverged-collectives",
    remedy=(
        "Most often a rank called one collective more or fewer than the others: look for a barrier, a logged value, a "
        "metric or a checkpoint under a condition on the rank or on the data, a skipped batch, one batch more on a "
        "rank. If the code agrees, suspect the GPU of the ranks that are furthest behind, or its link (dmesg, "
        "nvidia-smi -q). Flight Recorder dumps decide between the two (TORCH_FR_BUFFER_SIZE=2000, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1): they show what every rank called under each number. No timeout is long enough "
        "for a skipped or extra call."
    ),
)
def out_of_step(view: Timeline) -> Iterator[Finding]:
    """Some ranks wait in a collective that others have completed, and what these called under its number is unknown.

    Symptom:
        Timeouts with different SeqNum on the ranks of one group: 532339 on two ranks, 532341 on another.

    Cause:
        A rank called one collective more or fewer than the others; or a GPU does not complete one that the others have
        completed.

    Remedy:
        Make every rank call the same collectives in the same order; otherwise check that GPU.

    Cannot see:
        Which of the two it is, from logs: a rank names only what it waits in. Dumps distinguish them
        (diverged-collectives, gpu-stuck).
    """
    if failed(view) or has_dumps(view.job):
        return
    # Of several communicators, one that shows which ranks they are.
    said = sorted(stated(view, StatementKind.AHEAD), key=lambda one: not one.ranks)
    if first := LogStatements(said[:1]):
        yield finding(view, first[0].ranks, f"{first[0].detail}.", evidence=first.evidence)
    for group in view.groups:
        seq = group.seq or 0
        later = [rank for rank, oldest in sorted(group.oldest.items()) if oldest > seq]
        ahead = tuple(rank for rank in later if not _is_known(view.facts[rank], group.name, seq))
        # The root of a small broadcast continues before a late rank has called it.
        of_two = any(call.op in OF_TWO for call in waiting_in(view, group).values())
        if ahead and not of_two and not idle_behind(view, group):
            yield _finding(view, group, seq, ahead)
            return


def _is_known(facts: RankFacts, group: str, seq: int) -> bool:
    """Whether the call of this rank under a number is known."""
    return any(call.group == group and call.seq == seq and not call.is_p2p for call in facts.collectives)


def _finding(view: Timeline, group: GroupView, seq: int, ahead: tuple[int, ...]) -> Finding:
    least = tuple(sorted(rank for rank, oldest in group.oldest.items() if oldest == seq))
    waiting = waiting_in(view, group)
    rooted = waiting[least[0]].op in ROOTED
    # If both sides are equally many, those behind are named, as the others wait for them.
    ranks = ahead if len(ahead) < len(least) else least
    text = (
        f"{clause(ahead, 'has|have completed number')} {seq:,} of "
        f"{group_words(group.name)}, in which {clause(least, 'waits|wait')}: "
        f"{waiting_words(waiting)}"
    )
    return finding(
        view,
        ranks,
        f"{text}.",
        confidence=Confidence.POSSIBLE if rooted and len(ahead) == 1 else Confidence.LIKELY,
        evidence=(
            *counters_evidence(view, group),
            *one_element_evidence(waiting.values()),
            *log_evidence(view, (least[0], ahead[0])),
        ),
    )
