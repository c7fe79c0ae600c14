"""The cause failed-rank: a rank raised an exception, which ended it."""

import re
from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import AFTER_EXCEPTION, ALL_OF_LIGHTNING
from lightning_ncclsafe.facts import ExceptionFacts, Frame, LoggedKey, RankFacts
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Divergence,
    Evidence,
    Finding,
    Findings,
    Plan,
    Severity,
    Timeline,
    all_garbled,
    at_words,
    batch_words,
    call_evidence,
    calls_words,
    capitalised,
    clause,
    deepest_user_frame,
    exception_evidence,
    exception_place,
    exception_words,
    exit_status,
    finding,
    hang_rule,
    has_misread_sizes,
    inside_trainer,
    is_in,
    joined,
    location_of,
    ranks_by,
    ranks_words,
    short_location,
    short_place,
    type_and_place,
    under_words,
    while_others_wait,
)

_MESSAGE = 200
_INTERRUPT = "KeyboardInterrupt"
_REMEDIES = {
    "SystemExit": (
        "A rank that exits alone makes the run fail, whatever its status. If it exits because of an error, raise that "
        "error instead, so that it is reported. To stop on purpose, stop all ranks after the same batch: set "
        "trainer.should_stop on all of them, or broadcast the decision."
    ),
    _INTERRUPT: "Send SIGINT to all ranks, as Ctrl-C on the terminal does, or SIGTERM to one: then all stop together.",
}
_REMEDY_KEY = (
    "Log {key!r} on all ranks, with sync_dist=True: look for data of this rank for which it is left out, and log 0 or "
    "nan there. The other ranks are ended because of this exception."
)
_LINE = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]|[\\/]lib[\\/]python3[^\\/]*[\\/]|^<")
# No file, network or lack of memory causes these; an unreadable image may well cause a TypeError.
_OF_CODE = {"NameError", "UnboundLocalError", "NotImplementedError", "SyntaxError", "IndentationError", "TabError"}
_LISTED = 4
# If every rank of a large job raises something different, one of the first explains the others.
_MOST = 16


def is_reported_as_exception(finding: Finding, others: Findings) -> bool:
    """Whether rules that read exceptions have explained the exceptions of these ranks."""
    explained = {rank for other in others.of_exceptions for rank in other.ranks}
    return bool(finding.ranks) and explained.issuperset(finding.ranks)


def _plan(view: Timeline, finding: Finding) -> Plan:
    """``stop`` for an error that only code can cause, such as NameError; ``unknown`` for all others."""
    inside = {rank: facts.exception for rank, facts in view.facts.items() if facts.exception is not None}
    every = inside | view.raised_outside
    raised = {every[rank].type for rank in finding.ranks if rank in every}
    return Plan.STOP if raised and raised <= _OF_CODE else Plan.UNKNOWN


@hang_rule(after="timeout-misuse", superseded=is_reported_as_exception, plan=_plan)
def failed_rank(view: Timeline) -> Iterator[Finding]:
    """A rank raised an exception, and the others wait for a rank that will not come.

    Symptom:
        One rank prints a traceback, or nothing at all; the others wait in a collective until the timeout, or report
        "Connection closed by peer".

    Cause:
        An error on one rank only: a bad sample, no memory left on its device, a path that exists on one host only; or
        one rank leaves by sys.exit, with any status, or is interrupted.

    Remedy:
        Fix the error at the line given. The messages of the other ranks are a consequence.

    Cannot see:
        An exception that the user's own code catches and swallows: it is mentioned beside other causes if it was seen.
        If more than 16 different exceptions were raised, the remaining ones.
    """
    # What different collectives have made of each other's data is a consequence.
    is_consequence = has_misread_sizes(view) or (view.divergence is not None and all_garbled(view))
    raised = {rank: type_and_place(view.facts[rank]) for rank in view.raised}
    for ranks in [*ranks_by(raised).values()][:_MOST] if not is_consequence else ():
        yield _finding(view, ranks)
    for rank, exception in [*view.raised_outside.items()][:_MOST]:
        yield _outside(view, rank, exception)


def _outside(view: Timeline, rank: int, raised: ExceptionFacts) -> Finding:
    """An exception outside of the Trainer, where no guard reports it: the program recorded it before it ended."""
    frame = deepest_user_frame(raised.stack)
    at = at_words(frame)
    # An error that ends the process at once leaves the guard no time to report it.
    is_inside = len(inside_trainer(raised.stack)) < len(raised.stack)
    where = "in its call of the Trainer" if is_inside else "outside of the Trainer"
    raised_words = f"{_raised_words(raised)}{at}, {where}, and its program ended"
    return finding(
        view,
        (rank,),
        f"Rank {rank} {raised_words}{while_others_wait(view, (rank,))}.",
        severity=Severity.ERROR,
        confidence=Confidence.CERTAIN,
        location=location_of(frame),
        evidence=(Evidence(source="exception", rank=rank, text=exception_words(raised)),),
        remedy=f"Correct the {raised.type}{at}; the other ranks are ended because of it.",
    )


def _finding(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    facts = view.facts[ranks[0]]
    exception = facts.exception
    assert exception is not None
    name, frame = exception.type, _line_in_worker(exception.message) or exception_place(facts)
    at = f" at {short_location(frame)}{_called_from(facts, frame)}" if frame else ""
    where = f"{at}, {batch_words(facts.progress)}{while_others_wait(view, ranks)}"
    text = f"{ranks_words(ranks)} {_raised_words(exception)}{where}."
    split = _other_data(view, ranks)
    mixed = _mixed_words(view, split, ranks[0]) if split is not None else ""
    line = frame or (deepest_user_frame(split.calls[ranks[0]].stack) if split is not None else None)
    # It was raised in a library, but the message names something of the user's.
    named, named_at = _named(ranks, facts, exception) if line is None else ("", "")
    # A key that no rank has logged is not missing because of one rank's data.
    key = _missed_key(facts, exception) if line is None and len(ranks) < view.job.world_size else None
    missing = _REMEDY_KEY.format(key=key.name) if key is not None else ""
    return finding(
        view,
        ranks,
        joined((text, mixed, named, _handled_words(exception))),
        severity=Severity.ERROR,
        confidence=Confidence.CERTAIN if split is None else Confidence.LIKELY,
        location=named_at or location_of(line),
        evidence=(
            *(item for rank in ranks[:LISTED] for item in exception_evidence(view.facts[rank])),
            *call_evidence(split),
        ),
        remedy=missing or _REMEDIES.get(name, f"Correct the {name}{at}; the other ranks are ended because of it."),
    )


def _other_data(view: Timeline, ranks: tuple[int, ...]) -> Divergence | None:
    """Different collectives that these ranks have completed with the others before they raised."""
    split = view.any_divergence
    calls = [split.calls.get(rank) for rank in ranks] if split is not None else []
    is_before = all(call is not None and call.completed and not is_in(AFTER_EXCEPTION, call.stack) for call in calls)
    return split if is_before else None


def _mixed_words(view: Timeline, split: Divergence, rank: int) -> str:
    line = deepest_user_frame(split.calls[rank].stack)
    at = f", rank {rank} at {short_location(line)}" if line else ""
    return f"Before that, {calls_words(view, split)} as number {split.seq}{at}, so they received the wrong data."


def _named(ranks: tuple[int, ...], facts: RankFacts, exception: ExceptionFacts) -> tuple[str, str]:
    """A sentence about what an exception of a library names, and the user's line of it; empty if that is unknown.

    It is a key that a callback misses, as some ranks have never logged it, the parameter that has another size, or what
    training_step has returned.
    """
    if places := facts.steps.returns_no_loss:
        at = " or ".join(map(short_place, places[:_LISTED]))
        return f"This training_step returns at {at}.", places[0] if len(places) == 1 else ""
    if (key := _missed_key(facts, exception)) is not None:
        logged = f"{capitalised(clause(ranks, 'has|have never logged'))} {key.name!r}"
        under = f", {under_words(key.rank_condition)}" if key.rank_condition else ""
        return f"{logged}, which is logged at {short_place(key.place)}{under}.", key.place
    if facts.steps.other_size:
        place = facts.steps.other_size_at
        made = f", made at {short_place(place)}" if place else ""
        return f"This is the parameter {facts.steps.other_size!r}{made}.", place
    return "", ""


def _missed_key(facts: RankFacts, exception: ExceptionFacts) -> LoggedKey | None:
    """The key that a callback or a scheduler misses, by an exception of Lightning's."""
    # Any other error may have a word that is the name of a key.
    monitored = facts.steps.unmonitored if is_in(ALL_OF_LIGHTNING, exception.stack[-1:]) else ()
    return next((key for key in monitored if key.place and _has_word(exception.message, key.name)), None)


def _has_word(message: str, name: str) -> bool:
    """Whether a message has this name, and not only as a part of another one: ``"loss"`` is not in ``"val_loss"``."""
    return re.search(rf"(?<![\w/.-]){re.escape(name)}(?![\w/.-])", message) is not None


def _raised_words(exception: ExceptionFacts) -> str:
    """``"raised KeyError: 'lr'"``; for an exit, its status."""
    status = exit_status(exception)
    if status is not None:
        text = f" ({_gist(exception.message)})" if exception.message not in ("", "None", "False", str(status)) else ""
        return f"left the others by SystemExit with status {status}{text}"
    if exception.type == _INTERRUPT:
        return f"was interrupted ({_INTERRUPT}: SIGINT, as by Ctrl-C)"
    return f"raised {exception.type}: {_gist(exception.message)}" if exception.message else f"raised {exception.type}"


def _handled_words(exception: ExceptionFacts) -> str:
    """The error because of which a rank may have exited, as a sentence; empty if it handled none."""
    return f"It exited while it handled {_gist(exception.handled)}." if exception.handled else ""


def _line_in_worker(message: str) -> Frame | None:
    """The deepest user line in the traceback that a loader's worker sent; None if no worker raised it."""
    if not message.startswith("Caught "):
        return None
    places = (found.groups() for found in _LINE.finditer(message) if not _INSTALLED.search(found[1]))
    last = next(reversed([*places]), None)
    return Frame(file=last[0], line=int(last[1]), function=last[2], user=True) if last is not None else None


def _called_from(facts: RankFacts, frame: Frame) -> str:
    """The hook that Lightning called, if the error is in a function below it; else empty."""
    hook = next((item for item in inside_trainer(facts.raised_stack) if item.user), frame)
    return f", called from {hook.function}" if hook.function != frame.function else ""


def _gist(message: str) -> str:
    """The first line; for an error that a loader's worker sent, also the last line, which has the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    line = f"{lines[0]} {lines[-1]}" if len(lines) > 1 and lines[0].startswith("Caught ") else lines[0]
    return line.rstrip(".") if len(line) <= _MESSAGE else f"{line[:_MESSAGE]}…"
