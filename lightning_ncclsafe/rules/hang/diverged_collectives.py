"""The cause diverged-collectives: ranks called different collectives under the same number."""

from collections.abc import Iterator

from lightning_ncclsafe.code.libraries import EARLY_STOPPING, MODEL_CHECKPOINT
from lightning_ncclsafe.facts import Frame, LoggedKey
from lightning_ncclsafe.rules.kit import (
    CallBySize,
    Confidence,
    Divergence,
    Evidence,
    Finding,
    Plan,
    Severity,
    Shift,
    Timeline,
    aborted,
    after_the_others,
    alone_in_trainer,
    as_gloo_does,
    broken_off,
    broken_off_alone,
    call_by_size,
    call_evidence,
    call_words,
    called_at,
    called_by_threads,
    called_or_ended,
    calls_location,
    calls_words,
    capitalised,
    caught_by,
    clause,
    condition_around,
    condition_evidence,
    condition_words,
    conditioned,
    crossed,
    culprits,
    deepest_user_frame,
    ended_first,
    finding,
    finished_before,
    gathering_alone,
    gone_evidence,
    group_words,
    hang_rule,
    how_we_know,
    in_own_call,
    is_at_words,
    is_garbled,
    is_gone,
    is_in,
    joined,
    left_loop,
    line_of_split,
    location_of,
    monitored_apart,
    other_call_sites,
    other_counts,
    others_wait,
    out_of_step,
    passed_over,
    past_aborted,
    place_words,
    positions,
    raised_at,
    ranks_words,
    same_purpose,
    shift,
    short_location,
    silent_words,
    stack_of,
    standing,
    trainer_start,
    verb,
    wait_words,
    waiting_outside,
    waits_apart,
    was_at_words,
    where_evidence,
    while_others_wait,
    why_it_went_on,
    with_decision,
)

_REMEDY = (
    "Make every rank call the same collectives in the same order: no self.log(sync_dist=True), metric.compute(), "
    "all_gather, barrier, trainer.log_dir or save_checkpoint under a condition on the rank or on the data, the same "
    "keys in log_dict on all ranks, and the same branches of the model in forward."
)
_REMEDY_MONITOR = (
    " ModelCheckpoint needs the value that it monitors on all ranks, and the same one: log it with sync_dist=True, and "
    "not under a condition."
)
_REMEDY_PASSES = (
    "Make the same number of backward passes on all ranks in every batch: agree before one rank repeats or divides a "
    "batch, and use no optimizer that evaluates the loss as often as each rank's own values require (LBFGS). Training "
    "since that batch has mixed gradients."
)
_REMEDY_THREADS = (
    "Call collectives only in the thread that trains: let the other thread pass its numbers to a hook, which reduces "
    "them on all ranks after the same batch. If it must be another thread, give it its own process group "
    "(torch.distributed.new_group, on all ranks), and call the same collectives there on all ranks."
)
_REMEDY_CAUGHT = (
    "Call nothing that takes all ranks while an exception of one rank is handled. Let it end the rank, which ends the "
    "others, too; or let all ranks agree on it first: reduce a flag that says who has failed, in the same place on all."
)
# Callbacks that look at a value which is to be logged.
_MONITORS = EARLY_STOPPING | MODEL_CHECKPOINT
_CALLS = 4
_FEWER_BATCHES = "Fewer batches on some ranks than on others would look the same: compare the loaders' lengths."
_REMEDY_ALONE = (
    "Call trainer.fit, validate, test and predict on all ranks: each begins with collectives. For work of one rank "
    "alone, make a Trainer of its own with devices=1 and no distributed strategy, once the other ranks have left."
)


@hang_rule(
    after="diverged-log-keys",
    remedy=_REMEDY,
    follows=(
        "different-trainer-settings",
        "stopped-early",
        "checkpoint-skipped-barrier",
        "crossed-groups",
        "diverged-log-keys",
        "mismatched-collective",
        "skipped-step",
        "unfinished-rank",
        "unused-parameters",
    ),
    reads_exceptions=True,
    plan=Plan.STOP,
    is_mutual=True,
)
def diverged_collectives(view: Timeline) -> Iterator[Finding]:
    """Ranks of a process group called different collectives, so none of them can complete.

    Symptom:
        A timeout in which ranks report different OpType or NumelIn for the same SeqNum, "Detected mismatch between
        collectives on ranks", or a hang without any message.

    Cause:
        A collective under a condition that holds on some ranks only: on the rank, on the data, in an except block; or
        in a thread of its own, whose calls interleave with those of the training.

    Remedy:
        Make every rank call the same collectives in the same order.

    Cannot see:
        Calls that the recorder has overwritten, or whose stack it did not keep, and all but the present ones where a
        job is only inspected: then the current line of each rank is known, and no more. Which of several conditions or
        jumps led a rank around a call, or that a value which a function returned did. Before Python 3.12, an exception
        that the user's code caught without logging it and that did not come out of a collective or a hook.
    """
    return (with_decision(view, found) for found in _found(view))


def _found(view: Timeline) -> Iterator[Finding]:
    if alone := alone_in_trainer(view):
        yield _alone(view, tuple(sorted(alone)), next(iter(alone.values())))
        return
    if apart := waiting_outside(view):
        yield _outside(view, apart)
        return
    if told := _in_threads(view) or _more_passes(view) or _monitored_by_some(view):
        yield told
        return
    # A rank that runs a spread model alone has diverged as well: that is told as rank-zero-only-work.
    if (
        ended_first(view)
        or left_loop(view)
        or gathering_alone(view)
        or not all(_is_garbled(view, rank) for rank in view.raised)
    ):
        return
    if view.divergence is not None:
        yield _mismatch(view, view.divergence)
    elif circle := crossed(view):
        yield _crossing(view, tuple(out_of_step(view, view.waiting)) or circle)
    elif found := _broken(view) or _elsewhere(view) or _seen_apart(view):
        yield found


def _outside(view: Timeline, apart: dict[int, tuple[Frame, ...]]) -> Finding:
    """Between two calls of the Trainer these have called something that takes all ranks, which are in the next one."""
    ranks = tuple(sorted(apart))
    frame = deepest_user_frame(apart[ranks[0]])
    conditions = {rank: told for rank, stack in apart.items() if (told := condition_around(stack))[0]}
    condition = next((f", under {condition_words(told)}" for told, _ in conditions.values()), "")
    text = (
        f"{clause(ranks, 'waits|wait for all ranks')} {place_words(frame)}{condition}, outside of the Trainer, which "
        f"the others have called{while_others_wait(view, ranks)}."
    )
    return finding(
        view,
        ranks,
        text,
        confidence=Confidence.CERTAIN if conditions.keys() == apart.keys() else Confidence.LIKELY,
        location=location_of(frame),
        evidence=(
            *(
                Evidence(
                    source="source code", rank=rank, text=f"{condition_words(told)} encloses {location_of(where)}."
                )
                for rank, (told, where) in conditions.items()
            ),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY,
    )


def _in_threads(view: Timeline) -> Finding | None:
    """The collectives of two threads come in an order of chance."""
    lines = called_by_threads(view)
    if not lines:
        return None
    ranks, line = tuple(lines), next(iter(lines.values()))
    ended, split = aborted(view), view.divergence or view.lost_divergence
    called = f" {capitalised(calls_words(view, split))} as one." if split is not None else ""
    gone = f" The process of {ranks_words(ended)} has ended, {as_gloo_does(view, ended)}." if ended else ""
    text = (
        f"{clause(ranks, 'has|have called')} a collective {place_words(line)}, in a different thread from the one "
        f"that trains: the two threads' collectives interleave differently on each rank and do not match."
    )
    return finding(
        view,
        ranks,
        f"{text}{called}{gone}",
        severity=Severity.ERROR if ended else None,
        location=location_of(line),
        evidence=(
            *(call_evidence(split) if split is not None else ()),
            *gone_evidence(view, ended),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY_THREADS,
    )


def _more_passes(view: Timeline) -> Finding | None:
    """The gradients of each pass are reduced: those of one more than the others make meet something else."""
    found = other_counts(view) if view.waiting and not view.raised else None
    if found is None or not found.is_more:
        return None
    ranks = found.ranks
    are_all = len(ranks) == len(found.made)
    who = f"{clause(ranks, 'has|have made')} "
    more = "different numbers of backward passes" if are_all else "more backward passes than before or than the others"
    text = f"{who}{more} in {found.at} ({found.words}), and gradients are reduced in each: {others_wait(view, ())}."
    return finding(
        view,
        ranks,
        text,
        location=found.location,
        evidence=(
            Evidence(source="steps", text=f"Backward passes in {found.at}: {found.words}."),
            *where_evidence(view, view.facts),
        ),
        remedy=_REMEDY_PASSES,
    )


def _monitored_by_some(view: Timeline) -> Finding | None:
    """Some ranks wait in a callback, which the others leave out, as they have not logged what it looks at."""
    apart = monitored_apart(view)
    if apart is None:
        return None
    key, having, lacking = apart
    ranks = having if len(having) <= len(lacking) else lacking
    text = (
        f"{clause(having, 'has|have logged')} {key.name!r} in {key.hook}, which a callback "
        f"monitors, and {clause(lacking, 'has|have not')}"
    )
    return finding(
        view,
        ranks,
        f"{capitalised(text)}: {others_wait(view, ())}.",
        location=key.place,
        evidence=where_evidence(view, view.facts),
        remedy=f"{_REMEDY_MONITOR.strip()} So does EarlyStopping.",
    )


def _elsewhere(view: Timeline) -> Finding | None:
    """Where ranks wait says that it is not for one another."""
    if alone := after_the_others(view):
        return _crossing(view, alone)
    if left := finished_before(view):
        return _left_out(view, left)
    sites = other_call_sites(view)
    return _call_sites(view, sites) if sites else None


def _seen_apart(view: Timeline) -> Finding | None:
    """Nobody is at work, and from outside each rank is seen to wait, but not in one call."""
    apart = waits_apart(view)
    if apart is None:
        return None
    shown = [(clause(who, "waits|wait in"), who[0]) for who in apart.calls[:_CALLS]]
    waits = "; ".join(
        f"{who} {wait_words(view, rank)} {place_words(view.activities[rank].place)}".rstrip() for who, rank in shown
    )
    more = sum(map(len, apart.calls[_CALLS:]))
    why = f"{capitalised(clause(apart.ranks, 'is|are'))} {apart.why}." if apart.why else ""
    is_in_loop = any(place.stage >= 0 for place in positions(view).values())
    lengths = [facts.trainer.batches if facts.trainer is not None else None for facts in view.facts.values()]
    are_even = None not in lengths and len({*lengths}) == 1
    frame = apart.frame or passed_over(view, apart)
    in_own = [rank for rank in (*apart.ranks, *view.waiting) if in_own_call(view, rank)]
    return finding(
        view,
        apart.ranks,
        joined(
            (
                f"no rank that was seen is at work, and they wait in different calls: {waits}"
                f"{f'; {more} more wait elsewhere' if more else ''}.",
                why,
                _FEWER_BATCHES if is_in_loop and not apart.why and not are_even else "",
            )
        ),
        # Where a connection is lost, some have come out of a call in which others still are.
        confidence=Confidence.LIKELY if apart.why and not view.job.elsewhere else Confidence.POSSIBLE,
        location=location_of(frame) or calls_location(view, in_own or apart.ranks),
        evidence=(*condition_evidence(view, apart.ranks), *where_evidence(view, view.facts)),
        remedy=_REMEDY_CAUGHT if apart.frame is not None else _remedy(view),
    )


def _broken(view: Timeline) -> Finding | None:
    """Where the connections broke, as gloo had ended a process for what was called."""
    if gone_on := past_aborted(view):
        return _gone_on(view, gone_on)
    if broken_off_alone(view) is None and (ended := broken_off(view)):
        return _broken_off(view, ended)
    if (sized := call_by_size(view)) is not None and broken_off_alone(view) is None:
        return _ended_in(view, sized)
    lost = view.lost_divergence
    return _mismatch(view, lost) if lost is not None and same_purpose(view, lost) is False else None


def _is_garbled(view: Timeline, rank: int) -> bool:
    """Whether a rank has raised because it took another collective's numbers for the length of its objects."""
    error = view.facts[rank].exception
    return error is not None and is_garbled(error)


def _mismatch(view: Timeline, split: Divergence) -> Finding:
    every, ended = called_or_ended(view, split), tuple(rank for rank in view.silent if is_gone(view, rank))
    if not ended and (apart := shift(view, split.group)) is not None:
        return _shifted(view, split, apart)
    ranks, why = culprits(view, split), out_of_step(view, every)
    text = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    gone = f"The process of {ranks_words(ended)} has ended, {as_gloo_does(view, ended)}." if ended else ""
    where = f"{capitalised(ranks_words(ranks[:1]))} {is_at_words(view, ranks[0])}"
    # That they differ is seen; which of two is out of step is concluded, unless the source says it, and so is the line
    # where what these ranks have called is not the user's.
    called = [call for rank, call in split.calls.items() if rank in ranks]
    is_line_concluded = any(call.site and deepest_user_frame(call.stack) is None for call in called)
    is_concluded = bool(ended) or (bool(why or is_line_concluded) and not conditioned(view, every))
    went_on, skipped = why_it_went_on(view, split, ranks)
    is_guess = went_on is not None and 2 * len(ranks) >= len(split.calls)
    return finding(
        view,
        ranks,
        joined(
            (
                f"{capitalised(text)}: these can never complete together.",
                gone,
                f"{where}{f', {why[ranks[0]]}' if ranks[0] in why else ''}.",
                skipped,
            )
        ),
        severity=Severity.ERROR if ended else None,
        confidence=Confidence.LIKELY if is_concluded or is_guess else Confidence.CERTAIN,
        location=location_of(went_on) or line_of_split(view, split, ranks) or calls_location(view, ranks),
        evidence=(
            *call_evidence(split),
            *gone_evidence(view, ended),
            *condition_evidence(view, ranks),
            *where_evidence(view, split.calls),
        ),
        remedy=_remedy(view),
    )


def _shifted(view: Timeline, split: Divergence, apart: Shift) -> Finding:
    """The recorder still knows the call that only some ranks have made."""
    later = f"{calls_words(view, split)} as number {split.seq} of {group_words(split.group)}"
    return finding(
        view,
        apart.ranks,
        joined((f"{capitalised(apart.words())}.", f"{capitalised(later)}: these can never complete together.")),
        # What follows is the same again, and shows how far they are apart.
        confidence=Confidence.CERTAIN if apart.count and apart.is_decided and apart.frame else Confidence.LIKELY,
        location=location_of(apart.frame) or calls_location(view, apart.ranks),
        evidence=(*call_evidence(split), *where_evidence(view, split.calls)),
        remedy=_remedy(view),
    )


def _remedy(view: Timeline) -> str:
    in_checkpoint = any(is_in(MODEL_CHECKPOINT, stack_of(view, rank)) for rank in view.facts)
    return f"{_REMEDY}{_REMEDY_MONITOR if in_checkpoint else ''}"


def _broken_off(view: Timeline, ended: tuple[int, ...]) -> Finding:
    """Gloo has ended a process, and the user's lines show that it was not in the call that the others were in."""
    others = tuple(sorted(view.facts))
    every = (*ended, *others)
    key = _never_logged(view, ended, others)
    decided = out_of_step(view, every)
    ranks = tuple(decided) or (min(ended, others, key=len) if len(ended) != len(others) else tuple(sorted(every)))
    why = f"{capitalised(clause(ranks, 'was|were there'))} {decided[ranks[0]]}." if decided else ""
    if key is not None:
        ranks = ended if len(ended) <= len(others) else others
        why = f"A callback monitors {key.name!r}, which {clause(others, 'has|have never logged')}."
    text = (
        f"the process of {ranks_words(ended)} aborted itself (SIGABRT) {was_at_words(view, ended[0])}, "
        f"{as_gloo_does(view, ended)}, while {clause(others, 'was|were')} "
        f"{was_at_words(view, others[0])}: these are different collectives."
    )
    return finding(
        view,
        ranks,
        joined((capitalised(text), why)),
        severity=Severity.ERROR,
        location=key.place if key is not None else calls_location(view, ranks) or calls_location(view, every),
        evidence=(*gone_evidence(view, ended), *condition_evidence(view, ranks), *where_evidence(view, others)),
        remedy=_remedy(view) if key is None else f"{_REMEDY_MONITOR.strip()} So does EarlyStopping.",
    )


def _ended_in(view: Timeline, sized: CallBySize) -> Finding:
    """The others have made that call before: few that have sent something else have left it out this time."""
    ended = aborted(view)
    have_left_out = 2 * len(sized.senders) <= len(view.facts) + len(ended)
    ranks = sized.senders if have_left_out else ended
    text = (
        f"the process of {ranks_words(ended)} aborted itself (SIGABRT), {as_gloo_does(view, ended)}. "
        f"{capitalised(clause(sized.senders, 'sends|send'))} as much in {call_words(sized.sent)}, and "
        f"{call_words(sized.call)} {place_words(sized.frame)} has such room: these are different collectives. "
        f"{capitalised(clause(ranks, 'has|have'))} probably {'skipped' if have_left_out else 'added'} the latter."
    )
    return finding(
        view,
        ranks,
        capitalised(text),
        severity=Severity.ERROR,
        location=location_of(sized.frame),
        evidence=(*gone_evidence(view, ended), *where_evidence(view, sized.senders)),
        remedy=_remedy(view),
    )


def _never_logged(view: Timeline, ended: tuple[int, ...], others: tuple[int, ...]) -> LoggedKey | None:
    """The only key that a callback monitors and the others lack, where those that are gone were in such a callback."""
    if not all(is_in(_MONITORS, stack_of(view, rank)) for rank in ended):
        return None
    keys = {key.name: key for rank in others for key in view.facts[rank].steps.unmonitored}
    lacked = [key for key in keys.values() if all(key in view.facts[rank].steps.unmonitored for rank in others)]
    return lacked[0] if len(lacked) == 1 else None


def _gone_on(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    """Gloo has ended a rank in a call that these have left out: it was sent what they called next."""
    ended = aborted(view)
    own = deepest_user_frame(view.witnesses[ended[0]].stack)
    text = (
        f"{clause(ranks, 'continued after an exception and skipped a collective that')} "
        f"{clause(ended, 'was|were in')}{f' {place_words(own)}' if own else ''}: gloo ended "
        f"{verb(ended, 'its process', 'their processes')}, as it does when more is sent than there is room for."
    )
    caught = next((one for one in caught_by(view, ranks[0]) if not one.thread), None)
    return finding(
        view,
        ranks,
        text,
        severity=Severity.ERROR,
        location=location_of(raised_at(caught)) if caught is not None else "",
        evidence=where_evidence(view, ranks),
    )


def _left_out(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    line = calls_location(view, view.waiting)
    text = (
        f"{clause(ranks, 'has|have finished without')} what is called {place_words(called_at(view, view.waiting[0]))}"
    )
    return finding(
        view,
        ranks,
        f"{text}: {others_wait(view, ranks)}.",
        location=line,
        evidence=(*condition_evidence(view, view.waiting), *how_we_know(view, view.facts)),
    )


def _crossing(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    why = out_of_step(view, view.waiting).get(ranks[0], "")
    text = f"{clause(ranks, 'waits|wait in a different place from the others')}{f', {why}' if why else ''}"
    return finding(
        view,
        ranks,
        f"{capitalised(text)}: {others_wait(view, ())}.",
        location=calls_location(view, ranks),
        evidence=where_evidence(view, view.facts),
    )


def _alone(view: Timeline, ranks: tuple[int, ...], condition: str) -> Finding:
    """The others are in another call of the Trainer, or in none, so that there is no guard that would answer."""
    stack = view.facts[ranks[0]].stack
    called = deepest_user_frame(stack[: trainer_start(stack) or None])
    others = tuple(rank for rank in sorted(view.facts) if rank not in ranks)
    away = f" {capitalised(ranks_words(others))} {verb(others, 'is', 'are')} in another call." if others else ""
    text = (
        f"{clause(ranks, 'has|have called the Trainer alone')}"
        f"{f' at {short_location(called)}' if called else ''}, under {condition_words(condition)}: "
        f"{others_wait(view, ()) or standing(view, ranks[0])}.{away}{silent_words(view)}"
    )
    return finding(
        view, ranks, text, location=location_of(called), evidence=where_evidence(view, view.facts), remedy=_REMEDY_ALONE
    )


def _call_sites(view: Timeline, ranks: tuple[int, ...]) -> Finding:
    text = f"{ranks_words(ranks)} joined the same collective from a different place than the other ranks"
    return finding(
        view,
        ranks,
        f"{capitalised(text)}, {standing(view, ranks[0])}: {others_wait(view, ())}.",
        evidence=where_evidence(view, view.facts),
    )
