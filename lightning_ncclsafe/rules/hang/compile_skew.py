"""The cause compile-skew: some ranks compile while the others, which have done so or need not, wait for them."""

from collections.abc import Iterator

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.facts.findings import Evidence, Finding
from lightning_ncclsafe.rules.kit.expected import is_compiling
from lightning_ncclsafe.rules.kit.kinds import hang_rule
from lightning_ncclsafe.rules.kit.sentences import finding, how_we_know, standing, while_others_wait
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import ranks_words, short_location, verb

_LISTED = 8
_REMEDY = (
    "Give the first batch more time (PhaseTimeouts(first_batch=…)), and let the hosts have the same warm caches: "
    "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR on a path that all share or that is copied there, compiled once "
    "ahead of the job. If it compiles again later in a run, shapes differ between ranks: torch.compile(dynamic=True), "
    "or TORCH_LOGS=recompiles to see why."
)


@hang_rule(after="checkpoint-skipped-barrier", remedy=_REMEDY)
def compile_skew(view: Timeline) -> Iterator[Finding]:
    """A rank compiles or tunes (torch.compile, Triton, an extension) while others wait in a collective.

    Symptom:
        The first step, the first validation, or a step with a new shape takes minutes on some ranks only, long enough
        for the others to time out.

    Cause:
        A cache of compiled code that is cold on one host; shapes that only one rank's data has; one rank that tunes.

    Remedy:
        Warm and shared caches, more time for the first batch.

    Cannot see:
        How long compiling will take; kernels that cuDNN tries out (torch.backends.cudnn.benchmark), which leave no
        frame in Python.
    """
    compiling = tuple(rank for rank in view.working(view.stragglers) if is_compiling(view.facts[rank].stack))
    if compiling and view.waiting:
        yield _finding(view, compiling)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    text = (
        f"{ranks_words(ranks)} {verb(ranks, 'compiles', 'compile')}, {standing(view, ranks[0])}"
        f"{while_others_wait(view, ranks)}{_cold(view, ranks)}."
    )
    return finding(view, ranks, text, evidence=(*_evidence(view, ranks), *how_we_know(view, ranks)))


def _cold(view: Timeline, ranks: tuple[int, ...]) -> str:
    """The hosts of those that compile, where none of the others is on them."""
    hosts = {view.facts[rank].host for rank in ranks}
    others = {view.facts[rank].host for rank in view.held_up(ranks)}
    if "" in hosts or hosts & others:
        return ""
    return f": the caches of compiled code on {', '.join(sorted(hosts)[:_LISTED])} are cold, it seems"


def _evidence(view: Timeline, ranks: tuple[int, ...]) -> Iterator[Evidence]:
    for rank in ranks[:_LISTED]:
        facts = view.facts[rank]
        frame = _compiler_frame(facts.stack)
        if frame is not None:
            yield Evidence(source="stack", rank=rank, text=f"Compiles at {short_location(frame)}.")


def _compiler_frame(stack: tuple[Frame, ...]) -> Frame | None:
    return next((frame for frame in reversed(stack) if is_compiling((frame,))), None)
