"""The parts of findings: where a rank is, what the others wait in, and how we know."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import (
    ChildProcess,
    ExceptionFacts,
    Frame,
    IncidentKind,
    Phase,
    Progress,
    RankFacts,
    SilentHost,
    TriedAddress,
)
from lightning_ncclsafe.facts.findings import Confidence, Evidence, Finding, Severity
from lightning_ncclsafe.facts.wording import (
    LISTED,
    at_words,
    capitalised,
    clause,
    collective_words,
    condition_place,
    counted,
    duration_words,
    group_words,
    line_words,
    location_of,
    place_words,
    ranks_words,
    verb,
)
from lightning_ncclsafe.rules.kit.activity import ASLEEP_S, asleep_s, has_no_trainer
from lightning_ncclsafe.rules.kit.exception_messages import has_given_up
from lightning_ncclsafe.rules.kit.frames import deepest_user_frame, first_user_frame, inside_trainer, outside_compiler
from lightning_ncclsafe.rules.kit.landmarks import Kind, condition_around
from lightning_ncclsafe.rules.kit.polling import polled_at
from lightning_ncclsafe.rules.kit.purpose import begins_another_forward, purpose_words
from lightning_ncclsafe.rules.kit.rule import at_most_likely, once
from lightning_ncclsafe.rules.kit.timeline import Timeline, stack_of

_STAGES = {
    Phase.INIT: "before the first batch",
    Phase.SANITY_CHECK: "in the sanity check",
    Phase.VALIDATE: "in validation",
    Phase.TEST: "in test",
    Phase.PREDICT: "in prediction",
}
_OF_TRAINING = (Phase.TRAIN, Phase.CHECKPOINT, Phase.FINISHED)
_VARIANTS = 3
_EXITS = ("SystemExit",)
_WHOLE = re.compile(r"-?\d{1,9}")


def finding(
    view: Timeline,
    ranks: tuple[int, ...],
    summary: str,
    *,
    confidence: Confidence = Confidence.LIKELY,
    severity: Severity | None = None,
    location: str | None = None,
    decided_at: str | None = None,
    evidence: Iterable[Evidence] | None = None,
    remedy: str = "",
) -> Finding:
    """Builds a rule's finding; the rule's name, and its remedy if none is given, come from the declaration.

    Args:
        ranks: The ranks that cause it.
        summary: The answer in a sentence; its first letter becomes a capital one.
        confidence: How sure this is.
        severity: How bad it is; by default a warning as long as the run may go on, an error once its time is up.
        location: Where to look; by default the user's line that the first of these ranks is at.
        decided_at: The branch that may have led ranks to that line or around it; by default the condition on the rank
            around it, or else the condition that ends the loop in which the line pauses.
        evidence: How we know; by default stack, phase and recorder.
        remedy: What to do, if that depends on the facts.
    """
    is_over = view.job.incident.kind in (IncidentKind.TIMEOUT, IncidentKind.RECORDED)
    location = user_location(view, ranks) if location is None else location
    return Finding(
        rule="",
        severity=severity or (Severity.ERROR if is_over else Severity.WARNING),
        confidence=confidence,
        summary=capitalised(summary),
        ranks=ranks,
        location=location,
        decided_at=_conditioned_at(view, ranks, location) if decided_at is None else decided_at,
        evidence=how_we_know(view, ranks) if evidence is None else tuple(evidence),
        remedy=remedy,
    )


def unless_caught(view: Timeline, confidence: Confidence) -> Confidence:
    """The confidence in an exception: one that was read from a log may have been caught, so it is at most likely."""
    return at_most_likely(confidence) if view.job.is_recorded else confidence


def straggler_confidence(view: Timeline) -> Confidence:
    """Certain if the recorder shows that the others wait for ranks that are behind; else likely."""
    return Confidence.CERTAIN if view.behind and view.waiting else Confidence.LIKELY


def straggler_finding(
    view: Timeline,
    ranks: tuple[int, ...],
    words: str,
    then: str = "",
    *,
    confidence: Confidence = Confidence.LIKELY,
    location: str | None = None,
    evidence: Iterable[Evidence] | None = None,
    remedy: str = "",
) -> Finding:
    """The finding that most rules make, about ranks that others wait for.

    ``"Rank 3 is …, in Net.training_step at train.py:12 in step, batch 7 of epoch 0, for 41 s, while ranks 0-2 wait in
    …."``

    Args:
        ranks: The ranks that the others wait for.
        words: What they do, for one and for many: ``"is|are paused in a debugger"``; see :func:`clause`.
        then: What follows these words.
        confidence: How sure this is.
        location: See :func:`finding`, as for the rest.
        evidence: How we know.
        remedy: What to do.
    """
    summary = f"{clause(ranks, words)}{then}, {where_words(view, ranks[0])}{while_others_wait(view, ranks)}."
    return finding(view, ranks, summary, confidence=confidence, location=location, evidence=evidence, remedy=remedy)


def batch_words(progress: Progress) -> str:
    """``"batch 118 of epoch 2"``, with the stage unless it is training; numbered from 0, as Lightning does.

    ``"after epoch 2"`` once that is over and before another begins.
    """
    stage = _STAGES.get(progress.phase, "")
    if progress.phase is Phase.UNKNOWN:
        return "at an unknown batch"
    of_epoch = f" of epoch {progress.epoch}" if progress.epoch >= 0 else ""
    if progress.is_between_epochs and progress.phase in _OF_TRAINING:
        return f"after epoch {progress.epoch - 1}"
    if progress.phase in (Phase.INIT, Phase.SANITY_CHECK) or progress.batch_idx < 0:
        return stage or (f"before the first batch{of_epoch}" if of_epoch else "in training")
    batch = f"batch {progress.batch_idx}{of_epoch}"
    return f"{batch}, {stage}" if stage else batch


def where_words(view: Timeline, rank: int) -> str:
    """Where a rank is: ``"in Net.on_fit_end at train.py:73 in evaluate, batch 11 of epoch 0, for 41 s"``."""
    doing, progress = view.activities[rank], view.facts[rank].progress
    span = _span_words(view, rank)
    if doing.kind is Kind.FINISHED:
        batch = batch_words(progress)
        after = f", {batch}" if progress.is_between_epochs else f", after {batch}" if progress.batch_idx >= 0 else ""
        return f"past the end of the Trainer{after}, {span}"
    hook = f"in {doing.hook}" if doing.hook else ""
    where = " ".join(part for part in (hook, place_words(doing.place)) if part)
    # The batches of a program without a Trainer are unknown.
    batch = batch_words(progress) if not has_no_trainer(view.facts[rank]) else ""
    return ", ".join(filter(None, (where or f"in {doing.kind.value}", batch, span)))


def _span_words(view: Timeline, rank: int) -> str:
    """For how long a rank has been there; an inspection knows only for how long it has looked."""
    facts = view.facts[rank]
    if facts.inspection is None:
        return f"for {duration_words(view.activities[rank].hook_for_s)}"
    return "and moves" if facts.inspection.moved else f"for at least {duration_words(facts.inspection.idle_s)}"


def wait_words(view: Timeline, rank: int) -> str:
    """What a rank waits in: ``"Lightning's per-batch SIGTERM broadcast (broadcast, sequence number 7, 1 element)"``."""
    doing = view.activities[rank]
    if doing.kind is Kind.LOCK:
        return doing.call
    means = purpose_words(doing.collective, view.facts[rank])
    if doing.collective is None:
        return means or ("work.wait()" if doing.call == "wait" else doing.call) or doing.kind.value
    return collective_words(doing.collective, means)


def others_wait(view: Timeline, ranks: Iterable[int] = ()) -> str:
    """``"ranks 1-3 wait in …"``, equal waits together; empty if no other ranks than these wait."""
    # Each of many silent ranks may be a finding of its own, and the same ranks wait for all of them.
    return _others_wait(view, frozenset(rank for rank in ranks if rank in view.facts))


@once
def _others_wait(view: Timeline, ranks: frozenset[int]) -> str:
    variants: dict[str, list[int]] = defaultdict(list)
    lost: list[int] = []
    gave_up: list[int] = []
    for rank in view.waiting_besides(ranks):
        facts = view.facts[rank]
        ended = gave_up if has_given_up(facts) else lost
        same = ended if facts.exception else variants[wait_words(view, rank)]
        same.append(rank)
    ordered = sorted(variants.items(), key=lambda item: (-len(item[1]), item[1]))
    parts = [f"{clause(who, 'waits|wait in')} {what}{_ahead_words(view, who)}" for what, who in ordered[:_VARIANTS]]
    if len(ordered) > _VARIANTS:
        parts.append(f"{sum(len(who) for _, who in ordered[_VARIANTS:])} more wait elsewhere")
    if gave_up:
        parts.append(f"{ranks_words(gave_up)} waited until the time was up")
    if lost:
        parts.append(f"{ranks_words(lost)} waited until the connection broke")
    return "; ".join(parts)


def _ahead_words(view: Timeline, ranks: list[int]) -> str:
    """That these ranks are not saving, which is easily missed where a run seems to fail "when saving"."""
    rank = ranks[0]
    begins = begins_another_forward(view.activities[rank].collective, view.facts[rank])
    # If all are in the same batch, the others are merely late for the same pass.
    all_progress = [facts.progress for facts in view.facts.values()]
    places = {(progress.phase, progress.epoch, progress.batch_idx) for progress in all_progress}
    if not begins or len(places) == 1:
        return ""
    return f": {verb(ranks, 'this rank has', 'these ranks have')} started another forward pass"


def while_others_wait(view: Timeline, ranks: Iterable[int]) -> str:
    """The same as the end of a sentence: ``", while ranks 1-3 wait in …"``; empty if no rank waits."""
    waiting = others_wait(view, ranks)
    return f", while {waiting}" if waiting else ""


def waiting_sentence(view: Timeline) -> str:
    """What all ranks that wait are in; empty if none waits."""
    waiting = others_wait(view)
    return f"{capitalised(waiting)}." if waiting else ""


def user_location(view: Timeline, ranks: Iterable[int]) -> str:
    """The location of the deepest user line, below the Trainer, of the first of these ranks that has one.

    All ranks have made the call of the Trainer.
    """
    stacks = (outside_compiler(inside_trainer(view.facts[rank].stack)) for rank in ranks if rank in view.facts)
    return location_of(first_user_frame(stacks))


def _conditioned_at(view: Timeline, ranks: Iterable[int], location: str) -> str:
    """Where the condition on this line is, if the first of these ranks with a stack is there."""
    stack = next(filter(None, (stack_of(view, rank) for rank in ranks)), ())
    to_line = next((stack[: depth + 1] for depth, frame in enumerate(stack) if location_of(frame) == location), ())
    return condition_place(*condition_around(to_line)) or polled_at(to_line)


def stack_evidence(view: Timeline, ranks: Iterable[int]) -> list[Evidence]:
    """One line per rank: what its main thread is in, and at which line; none for a rank that has raised."""
    evidence = []
    # Where a rank has raised, only the guard's frames are left on its stack.
    for rank in [rank for rank in ranks if view.facts[rank].exception is None][:LISTED]:
        doing = view.activities[rank]
        stack = view.facts[rank].stack
        line = doing.place or doing.frame or (stack[-1] if stack else None)
        if line is not None:
            does = (
                "Has finished its call of the Trainer" if doing.kind is Kind.FINISHED else f"Is in {doing.kind.value}"
            )
            text = f"{does}, {line_words(line)}"
            evidence.append(Evidence(source="stack", rank=rank, text=text))
        evidence += _thread_evidence(view, rank) if doing.waits_alone else []
    return evidence


def _thread_evidence(view: Timeline, rank: int) -> list[Evidence]:
    """The other threads of a rank whose main thread may wait for one of them."""
    inspection = view.facts[rank].inspection
    return [
        Evidence(
            source="stack",
            rank=rank,
            text=f"Its thread {one.name or '?'} is at {line_words(one.frame)}",
        )
        for one in (inspection.threads if inspection is not None else ())
    ]


def phase_evidence(view: Timeline, ranks: Iterable[int]) -> list[Evidence]:
    """One line per rank: phase, hook and batch."""
    known = (rank for rank in ranks if view.facts[rank].progress.phase is not Phase.UNKNOWN)
    listed = list(known)[:LISTED]
    return [Evidence(source="phase", rank=rank, text=_phase_sentence(view, rank)) for rank in listed]


def _phase_sentence(view: Timeline, rank: int) -> str:
    facts = view.facts[rank]
    if facts.exception is None:
        return f"Is {where_words(view, rank)}."
    raised = f"Raised {facts.exception.type}{at_words(exception_place(facts))}"
    return f"{raised}, {batch_words(facts.progress)}." if not has_no_trainer(facts) else f"{raised}."


def recorder_evidence(view: Timeline) -> list[Evidence]:
    """One line per group with ranks that are behind: how many collectives they have called."""
    evidence = []
    for group in view.groups:
        if group.seq is not None and group.behind:
            last = max(group.enqueued[rank] for rank in group.behind)
            calls = f"{counted(last, 'collective')} of {group_words(group.name)}"
            waiting = {rank for rank in group.oldest if _waits_in(view, rank, group.name, group.seq)}
            does = {"waits|wait in": waiting, "has|have called": group.oldest.keys() - waiting}
            parts = [clause(sorted(ranks), words) for words, ranks in does.items() if ranks]
            text = f"{clause(group.behind, 'has|have called')} {calls}; {', '.join(parts)} sequence number {group.seq}."
            evidence.append(Evidence(source="flight recorder", text=capitalised(text)))
    return evidence


def _waits_in(view: Timeline, rank: int, group: str, seq: int) -> bool:
    """Whether a rank waits in this very call, as far as is known; it may also have called it, and wait elsewhere."""
    call = view.activities[rank].collective if rank in view.facts else None
    return rank in view.waiting and (call is None or (call.group, call.seq) == (group, seq))


def _lock_evidence(view: Timeline) -> list[Evidence]:
    """One line per rank that waits for a file lock: at which line, and who holds it."""
    listed = list(view.lock_waits.values())[:LISTED]
    return [
        Evidence(
            source="file lock",
            rank=wait.rank,
            text=f"Waits for the lock on {wait.lock.path}, {place_words(view.activities[wait.rank].place)}: "
            f"{wait.holder_words}.",
        )
        for wait in listed
    ]


def _child_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """The child process that a rank waits for, and what this one has started."""
    for facts in (view.facts[rank] for rank in [*ranks][:LISTED] if rank in view.facts):
        for child in facts.awaited_processes:
            is_awaited = child == facts.awaited_processes[0]
            who = "Waits for its child process" if is_awaited else f"Process {child.parent} has started process"
            command = f" ({child.command})" if child.command else ""
            words = ", ".join(_child_words(child))
            text = f"{who} {child.pid}{command}{f': {words}' if words else ''}."
            yield Evidence(source="process", rank=facts.rank, text=text)


def _sleep_evidence(view: Timeline, ranks: Iterable[int]) -> Iterator[Evidence]:
    """That nothing in a rank's process, or in its loader's workers, can go on by itself."""
    for rank in [rank for rank in ranks if rank in view.facts][:LISTED]:
        slept_s = asleep_s(view.facts[rank], view.activities[rank])
        if slept_s is not None and slept_s >= ASLEEP_S:
            who = "workers" if view.activities[rank].waits_for_data and view.facts[rank].workers else "process"
            text = f"All threads of its {who} have slept for {duration_words(slept_s)}, each waiting for another."
            yield Evidence(source="process", rank=rank, text=text)


def _child_words(child: ChildProcess) -> Iterator[str]:
    if child.state == "zombie":
        yield "it has ended, and a process that it has started may keep its output open"
    elif child.state:
        yield f"{child.state} in {child.wait_channel}" if child.wait_channel else child.state
    if child.age_s is not None:
        yield f"started {duration_words(child.age_s)} ago"


def how_we_know(view: Timeline, ranks: Iterable[int]) -> tuple[Evidence, ...]:
    """The evidence of nearly every finding: stack, phase, recorder, locks, processes and threads of these ranks."""
    listed = list(ranks)
    return (
        *stack_evidence(view, listed),
        *phase_evidence(view, listed),
        *recorder_evidence(view),
        *_lock_evidence(view),
        *_child_evidence(view, listed),
        *_sleep_evidence(view, listed),
    )


def exception_evidence(facts: RankFacts) -> Iterator[Evidence]:
    """A rank's exception, if it raised one."""
    if facts.exception is not None:
        yield Evidence(source="exception", rank=facts.rank, text=exception_words(facts.exception))


def exception_words(exception: ExceptionFacts) -> str:
    """``"ValueError: bad label"``, as Python prints it; without the traceback that a loader's worker has sent."""
    message = exception.message
    if message.startswith("Caught ") and len(lines := [line for line in message.splitlines() if line.strip()]) > 1:
        message = f"{lines[0]} {lines[-1].strip()}"
    return f"{exception.type}: {message}" if message else exception.type


def tried_words(host: SilentHost | TriedAddress) -> str:
    """What became of the attempt to reach a host, as a sentence."""
    return f"From {host.seen_from}, {host.host} was tried at {host.address}: {host.tried}."


def exit_status(exception: ExceptionFacts) -> int | None:
    """The status with which ``sys.exit`` ends the process; None if the exception is not from ``sys.exit``."""
    if exception.type not in _EXITS:
        return None
    message = exception.message
    # Python prints any other text and exits with 1.
    return 0 if message in ("", "None", "False") else int(message) if _WHOLE.fullmatch(message) else 1


def type_and_place(facts: RankFacts) -> tuple[str, str]:
    """Type and place of a rank's exception; ranks for which they are the same have raised alike."""
    return facts.exception.type if facts.exception else "", location_of(exception_place(facts))


def exception_place(facts: RankFacts) -> Frame | None:
    """The deepest user line at which this rank's exception was raised."""
    return deepest_user_frame(facts.exception.stack) if facts.exception else None
