"""The cause late-at-init, in a log: PyTorch itself names the rank that others have waited for."""

from collections import Counter
from collections.abc import Iterator

from lightning_ncclsafe.facts import StatementKind
from lightning_ncclsafe.facts.recorded import LOST_AT_SET_UP
from lightning_ncclsafe.rules.kit import Confidence, Finding, Timeline, clause, finding, ranks_words, recorded_rule
from lightning_ncclsafe.rules.recorded.kit.calls import record_of
from lightning_ncclsafe.rules.recorded.kit.ends import AT_INIT, failed
from lightning_ncclsafe.rules.recorded.kit.evidence import NO_LONGER_TIMEOUT, log_evidence
from lightning_ncclsafe.rules.recorded.kit.statements import LogStatements, stated

_REMEDY_JOIN = (
    "Look at the output of the missing ranks: a rank that was never started, that failed before, that has a different "
    "world size, address or port (WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or that prepares data first. "
) + NO_LONGER_TIMEOUT
_REMEDY_LOST = (
    "Look at the output of the process that keeps the store, rank 0 or its launcher: it ends there with its own error. "
    "If it has not ended, look at the network between the two hosts."
)
_REMEDY_STORE = (
    "Give every launch its own port (torchrun --rdzv-endpoint, MASTER_PORT), or a new file with "
    "init_method=file://, and start each rank once: torchrun and a script that starts processes itself make them twice."
)


@recorded_rule(
    after="out-of-step",
    remedy=(
        "The network is not to blame: look at what this rank does before its first collective. Do downloads, "
        "tokenising, indexing and reading of large files once, ahead of the job or in prepare_data; see whether its "
        "host swaps. " + NO_LONGER_TIMEOUT
    ),
)
def late_at_init(view: Timeline) -> Iterator[Finding]:
    """Ranks waited for another one while the process group or its first communicator was set up.

    Symptom:
        "[5] is setting up NCCL communicator and retrieving ncclUniqueId from [0] … Socket Timeout"; "Timed out
        initializing process group in store based barrier … (world_size=8, worker_count=4", "1/2 clients joined".

    Cause:
        The rank named there prepares data, downloads, compiles or swaps, or failed before its first collective.

    Remedy:
        Prepare ahead of the job or in prepare_data; if the host swaps, use less memory per rank.

    Cannot see:
        What that rank did; that is in its own output, or in a report of this package's guard.
    """
    if failed(view):
        return
    if awaited := _awaited(view):
        yield _finding(view, awaited)
    else:
        yield from _not_joined(view, stated(view, StatementKind.NOT_JOINED))


def _not_joined(view: Timeline, found: LogStatements) -> Iterator[Finding]:
    """The finding of a store that has counted the ranks that joined."""
    if not found:
        return
    last = max(found, key=lambda one: one.count)
    if not last.of:
        waited = f"{found.by_words} waited in vain {found[0].detail} while the process group was being made"
        text = f"{waited}; the log does not say who is missing"
        yield finding(view, (), f"{text}.", evidence=found.evidence, remedy=_REMEDY_JOIN)
        return
    came = found.by
    too_many = last.count >= last.of
    names_all = len(came) == last.count and all(rank < last.of for rank in came)
    ranks = tuple(rank for rank in range(last.of) if rank not in came) if names_all and not too_many else ()
    if too_many:
        text = (
            f"{last.count:,} ranks joined a store that was made for {last.of:,}: two launches share its address, "
            "or an earlier one left its keys in it"
        )
    else:
        who = clause(ranks, "has|have") if ranks else f"{last.of - last.count:,} ranks have"
        text = f"{last.count:,} of {last.of:,} ranks joined the store while the process group was being made, {who} not"
    yield finding(
        view,
        ranks,
        f"{text}.",
        confidence=Confidence.POSSIBLE if too_many or all(one.detail for one in found) else Confidence.LIKELY,
        evidence=found.evidence,
        remedy=_REMEDY_STORE if too_many else _REMEDY_JOIN,
    )


def _awaited(view: Timeline) -> dict[int, int]:
    """How many ranks waited for each."""
    counts: Counter[int] = Counter()
    for facts in view.facts.values():
        if record_of(facts).awaited_in in AT_INIT:
            counts.update(record_of(facts).awaited)
    return dict(counts)


def _finding(view: Timeline, awaited: dict[int, int]) -> Finding:
    ranks = tuple(sorted(awaited))
    where = {rank: record_of(facts).awaited_in for rank, facts in view.facts.items()}
    waited = tuple(rank for rank, place in where.items() if place in AT_INIT)
    is_lost = all(where[rank] == LOST_AT_SET_UP for rank in waited)
    text = (
        f"{clause(ranks, 'has|have not reached the first collective, for whose set-up')} {ranks_words(waited)} waited"
    )
    if is_lost:
        text = (
            f"{ranks_words(waited)} waited for {ranks_words(ranks)} to set up the first collective, and lost the store "
            f"meanwhile: {clause(ranks, 'has|have ended, or')} the network has failed"
        )
    return finding(
        view,
        ranks,
        f"{text}.",
        confidence=Confidence.POSSIBLE if is_lost else Confidence.LIKELY,
        evidence=log_evidence(view, waited[:3]),
        remedy=_REMEDY_LOST if is_lost else "",
    )
