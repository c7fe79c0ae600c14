"""The cause own-code: this package itself delays a rank."""

from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import Frame
from lightning_ncclsafe.rules.kit import (
    AGREEMENT,
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Kind,
    Timeline,
    at_words,
    clause,
    delayed_by_machine,
    finding,
    hang_rule,
    location_of,
    phase_evidence,
    presented_stage,
    recorder_evidence,
    straggler_confidence,
    where_words,
    while_others_wait,
)

_INSTALLED = ("site-packages/", "dist-packages/")


@hang_rule(
    after="unpresented-loader",
    remedy=(
        "This is a bug in lightning_ncclsafe, or in what it waits for on this host, not in your code. Continue without "
        "the callback named there (the strategy works without any), and report it with report.json."
    ),
)
def own_code(view: Timeline) -> Iterator[Finding]:
    """A rank is in code of lightning_ncclsafe that does not wait for other ranks, and the others wait for it.

    Symptom:
        Nothing makes progress; the stack of one rank ends in a callback or in the guard of this package.

    Cause:
        A bug in this package, or a storage or store that does not answer it.

    Remedy:
        Continue without the callback that is named; report it.

    Cannot see:
        Code of this package that waits in code of others: a logger, a dataset, a file system.
    """
    working = tuple(rank for rank in view.working(view.stragglers) if _is_in_own_code(view, rank))
    if ranks := working or _left_alone(view):
        yield _finding(view, ranks)


def _is_in_own_code(view: Timeline, rank: int) -> bool:
    return view.activities[rank].kind is Kind.LIGHTNING and _own_frame(view.facts[rank].stack) is not None


def _own_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The deepest frame of this package, if there is only Python's own library below it."""
    for frame in reversed(stack):
        if frame.mark and not frame.user:
            return frame
        if frame.user or any(part in frame.file.replace("\\", "/") for part in _INSTALLED):
            return None
    return None


def _left_alone(view: Timeline) -> tuple[int, ...]:
    """Ranks that are still in a comparison of loaders which all others have left."""
    inside = {rank: f"{AGREEMENT}{stage}" for rank, facts in view.facts.items() if (stage := presented_stage(facts))}
    left = {facts.progress.last_action for rank, facts in view.facts.items() if rank not in inside}
    return tuple(sorted(inside)) if inside and {*inside.values()} == left else ()


def _places(view: Timeline, ranks: tuple[int, ...]) -> Iterable[tuple[int, str]]:
    frames = ((rank, _own_frame(view.facts[rank].stack)) for rank in ranks[:LISTED])
    return ((rank, location_of(frame)) for rank, frame in frames if frame is not None)


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    rank = ranks[0]
    # If its machine delays a rank, the line of this package is merely where it happens to be.
    is_machine = not set(ranks).isdisjoint(delayed_by_machine(view))
    frame = _own_frame(view.facts[rank].stack)
    who = clause(ranks, "is|are held up by lightning_ncclsafe itself")
    text = f"{who}{at_words(frame)}, {where_words(view, rank)}{while_others_wait(view, ranks)}."
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.LIKELY if is_machine else straggler_confidence(view),
        location=location_of(frame),
        evidence=(
            *(Evidence(source="stack", rank=one, text=f"Is at {place}.") for one, place in _places(view, ranks)),
            *phase_evidence(view, ranks),
            *recorder_evidence(view),
        ),
    )
