"""The cause compile-skew: some ranks compile while the others, which have compiled already or need not, wait."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Phase, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Evidence,
    Finding,
    Timeline,
    clause,
    finding,
    hang_rule,
    how_we_know,
    is_compiling,
    short_location,
    where_words,
    while_others_wait,
)

_REMEDY = (
    "Give the first batch more time (PhaseTimeouts(first_batch=…)), and give all hosts the same warm caches: "
    "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR on a shared or copied path, filled once before the job. If it "
    "compiles again later in a run, shapes differ between ranks: torch.compile(dynamic=True), or "
    "TORCH_LOGS=recompiles to see why."
)
_REMEDY_AGAIN = (
    "The first batches are over, so this one probably has another shape or type, or takes another branch, than the "
    "code was compiled for: TORCH_LOGS=recompiles shows which. Give all batches one shape (drop_last=True, padding), "
    "or compile for any (torch.compile(dynamic=True)). To let the others wait for it, raise the limit of the phase "
    "(PhaseTimeouts)."
)


@hang_rule(after="checkpoint-skipped-barrier", remedy=_REMEDY)
def compile_skew(view: Timeline) -> Iterator[Finding]:
    """A rank compiles or tunes (torch.compile, Triton, an extension) while the others wait in a collective.

    Symptom:
        The first step, the first validation, or a step with a new shape takes minutes on some ranks only, long enough
        for the others to time out.

    Cause:
        A cold compile cache on one host; shapes that occur only in one rank's data; autotuning on one rank.

    Remedy:
        Share warm caches; allow more time for the first batch.

    Cannot see:
        How long compilation will take; kernels that cuDNN tries out (torch.backends.cudnn.benchmark), which leave no
        Python frame.
    """
    ranks = tuple(rank for rank in view.awaited if is_compiling(view.facts[rank].stack))
    if ranks:
        text = f"{clause(ranks, 'compiles|compile')}, {where_words(view, ranks[0])}{while_others_wait(view, ranks)}"
        evidence = (*_evidence(view, ranks), *how_we_know(view, ranks))
        is_again = all(_has_trained(view.facts[rank]) for rank in ranks)
        remedy = _REMEDY_AGAIN if is_again else _REMEDY
        yield finding(view, ranks, f"{text}{_cold_cache_words(view, ranks)}.", evidence=evidence, remedy=remedy)


def _has_trained(facts: RankFacts) -> bool:
    """Whether a rank compiles in a batch of training after its first ones."""
    return facts.progress.phase is Phase.TRAIN and facts.steps.with_backward > 1


def _cold_cache_words(view: Timeline, ranks: tuple[int, ...]) -> str:
    """That the caches on their hosts seem cold, if none of the waiting ranks is on these hosts; else empty."""
    hosts = {view.facts[rank].host for rank in ranks}
    others = {view.facts[rank].host for rank in view.waiting_besides(ranks)}
    if "" in hosts or hosts & others:
        return ""
    return f": the caches of compiled code on {', '.join(sorted(hosts)[:LISTED])} seem to be cold"


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    for rank in ranks[:LISTED]:
        frame = next((frame for frame in reversed(view.facts[rank].stack) if is_compiling((frame,))), None)
        if frame is not None:
            yield Evidence(source="stack", rank=rank, text=f"Compiles at {short_location(frame)}.")
