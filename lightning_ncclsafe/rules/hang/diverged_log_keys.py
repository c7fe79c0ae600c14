"""The cause diverged-log-keys: ranks log different keys with self.log that are reduced between ranks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_ncclsafe.code.libraries import EVALUATION_LOOPS, LOGGED_VALUES, LOGGED_VALUES_READ, METRIC_GATHER
from lightning_ncclsafe.facts import CaughtException, LoggedKey, MetricFacts, RankFacts, UnitKind
from lightning_ncclsafe.rules.kit import (
    LISTED,
    Confidence,
    Evidence,
    Finding,
    Plan,
    Severity,
    Shift,
    Timeline,
    aborted_by_gloo,
    aborted_elsewhere,
    aborted_words,
    at_words,
    below_user,
    call_evidence,
    call_location,
    capitalised,
    clause,
    condition_of,
    condition_words,
    ended_process_evidence,
    error_words,
    evidence_about,
    finding,
    gloo_abort_words,
    hang_rule,
    inside_trainer,
    is_before,
    is_before_line,
    is_in,
    is_in_action,
    joined,
    just_caught,
    last_user,
    location_of,
    others_wait,
    out_of_data_first,
    positions,
    raised_at,
    ranks_by,
    ranks_words,
    shift,
    short_place,
    stack_of,
    under_words,
    verb,
    where_evidence,
    with_decision,
)

_REMEDY = (
    "Log the same keys with sync_dist=True on all ranks, in the same order. If a rank has nothing to log for a key, "
    "log a torchmetrics metric instead, also where it has had no update: 0 or nan would change the mean over ranks. "
    "Log what only one rank has with sync_dist=False and rank_zero_only=True."
)
_REMEDY_METRIC = (
    "Log this metric on all ranks, also where it has had no update, so without a condition on the data: its compute() "
    "exchanges its states between ranks, whatever sync_dist is."
)
_REMEDY_ENTRIES = (
    "Update this metric equally often on all ranks, even if a batch has nothing for it (with an empty tensor), or give "
    "its state dist_reduce_fx='cat', which gathers all entries as one tensor. Check, too, that no rank skips compute()."
)
_DECIDES = (
    " All these ranks have logged the same keys at some time. If the other ranks do not log it in this step, that is "
    "the cause; if they log it in every batch, a rank has skipped another collective before."
)


@hang_rule(after="unmatched-p2p", follows=("different-trainer-settings", "stopped-early"), plan=Plan.STOP)
def diverged_log_keys(view: Timeline) -> Iterator[Finding]:
    """One rank logged a value that is reduced across all ranks, and the others did not log it.

    Symptom:
        A hang in self.log, or at the end of an epoch, when the values of the epoch are reduced.

    Cause:
        self.log(..., sync_dist=True), or a logged metric, under a condition on the rank or on the data; a metric with
        a list state that is gathered entry by entry (dist_reduce_fx=None), and has not been updated equally often.

    Remedy:
        Log the same keys on all ranks, in the same order.

    Cannot see:
        Keys in different orders that still pair up: each value is then reduced with another key's, and nothing waits.
        What a rank logged before its process ended: a key is named only if it is the only one that the other ranks'
        source logs and they have never logged.
    """
    if aborted := _aborted(view):
        yield aborted
        return
    # Also those whose connection was lost as gloo aborted another.
    reducing = tuple(rank for rank in view.waiting if is_in(LOGGED_VALUES, stack_of(view, rank)))
    # The line that reads them differs then, not what is logged.
    if 0 < sum(_reads(view.facts[rank]) for rank in reducing) < len(view.facts):
        return
    # A rank that works may still log it.
    syncing = reducing or tuple(rank for rank in view.waiting if is_in(METRIC_GATHER, view.facts[rank].stack))
    if not syncing or view.raised or view.working(view.facts):
        return
    if states := _different_states(view):
        yield _states_finding(view, states)
        return
    if metric := _gathered_by_entry(view, syncing):
        yield _entries_finding(view, syncing, metric)
        return
    if not reducing or out_of_data_first(view):
        return
    yield from _by_keys(view, reducing)


def _reads(facts: RankFacts) -> bool:
    """Whether the user's code reads logged values, as in ``trainer.callback_metrics``, which reduces them."""
    # The progress bar and checkpoints of Lightning read them, too, on all ranks.
    hooks = inside_trainer(facts.stack)
    return last_user(hooks) >= 0 and is_in(LOGGED_VALUES_READ, below_user(hooks))


def _by_keys(view: Timeline, reducing: tuple[int, ...]) -> Iterator[Finding]:
    odd = _odd_key(view, reducing)
    if odd is not None:
        yield _finding(view, odd)
    elif _comes_to_log(view, reducing):
        return
    elif not _may_log_it_yet(view, reducing) and (skipped := _skipped_reduction(view, reducing)):
        yield _skipped_finding(view, skipped)
    elif len(reducing) < len(view.waiting) and not view.silent:
        yield _undecided(view, reducing)


def _aborted(view: Timeline) -> Finding | None:
    """Gloo aborted a process while it reduced a logged value; the others were elsewhere and lack one key."""
    ended, left = aborted_elsewhere(view), tuple(sorted(view.facts))
    if not ended or not all(is_in(LOGGED_VALUES, stack_of(view, rank)) for rank in ended):
        return None
    if any(is_in(LOGGED_VALUES, stack_of(view, rank)) for rank in left):
        return None
    place, lacks = _lacking(view, ended, left)
    if not place:
        return None
    was = f"{clause(ended, 'was|were')} reducing a logged value between ranks, which {clause(left, 'was|were not')}"
    ranks = ended if len(ended) <= len(left) else left
    gone = f"{capitalised(aborted_words(view, ended))}, {gloo_abort_words(view, ended)}."
    return finding(
        view,
        ranks,
        joined((f"{was}: {lacks}.", gone)),
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        location=place,
        evidence=(*ended_process_evidence(view, ended), *_key_evidence(view), *where_evidence(view, left)),
        remedy=_REMEDY,
    )


def _lacking(view: Timeline, ended: tuple[int, ...], left: tuple[int, ...]) -> tuple[str, str]:
    """The line that logs what ranks lack, and in words what that is: one key, or some of those of one line.

    Both are empty if that is unknown.
    """
    unlogged = [{_named(key): key for key in view.facts[rank].steps.unlogged} for rank in left]
    evaluates = _any_evaluates(view, ended)
    # What was just reduced is not from a hook of the other loop.
    others = "train" if evaluates else "validation"
    common = [key for named, key in unlogged[0].items() if all(named in keys for keys in unlogged)]
    common = [key for key in common if others not in key.hook]
    if len(common) == 1:
        (key,) = common
        never = f"{clause(left, 'has|have never logged')} {key.name!r}"
        return key.place, f"of the keys that {key.hook} logs with sync_dist=True, {never}"
    many = "" if evaluates and _any_evaluates(view, left) else _line_of_many_keys(view, left, others)
    return many, f"the keys that {short_place(many)} logs probably differ between ranks" if many else ""


def _any_evaluates(view: Timeline, ranks: tuple[int, ...]) -> bool:
    """Whether one of these ranks is still in an evaluation: then it may have had another number of batches."""
    return any(is_in(EVALUATION_LOOPS, stack_of(view, rank)) for rank in ranks)


def _line_of_many_keys(view: Timeline, ranks: tuple[int, ...], others: str) -> str:
    """The only line that has logged keys of several names on these ranks, as in a loop; empty if it is not one alone.

    Args:
        others: What is in the name of a hook whose keys do not count.
    """
    logged = {key for rank in ranks for key in view.facts[rank].steps.logged if others not in key.hook}
    names = Counter(place for place, _ in {(key.place, key.name) for key in logged if key.place})
    lines = [place for place, count in names.items() if count > 1]
    return lines[0] if len(lines) == 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UncommonKey:
    """A key that some ranks have logged and others have not.

    Attributes:
        key: The key.
        having: Ranks that have logged it.
        lacking: Ranks that have not.
        ended: Ranks that were reducing a logged value when gloo aborted them: this one, as far as known.
        is_mutual: Whether those that lack it have logged keys that the others lack.
    """

    key: LoggedKey
    having: tuple[int, ...]
    lacking: tuple[int, ...]
    ended: tuple[int, ...] = ()
    is_mutual: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The minority; if both are equally large, those that log it, or all if each side has its own keys."""
        count = len(self.having) + len(self.ended)
        if self.is_mutual and count == len(self.lacking):
            return tuple(sorted((*self.having, *self.lacking)))
        return self.having if count <= len(self.lacking) else self.lacking


def _odd_key(view: Timeline, reducing: tuple[int, ...]) -> _UncommonKey | None:
    """The first key that not all ranks have logged, preferably one that is being reduced now."""
    now = {view.facts[rank].steps.reducing for rank in reducing}
    keys = {_named(key): key for facts in view.facts.values() for key in facts.steps.logged}
    logged = {rank: {_named(key) for key in facts.steps.logged} for rank, facts in sorted(view.facts.items())}
    ended = tuple(rank for rank in aborted_by_gloo(view) if is_in(LOGGED_VALUES, stack_of(view, rank)))
    for key in sorted(keys.values(), key=lambda key: key.name not in now):
        lacking = tuple(rank for rank, names in logged.items() if _named(key) not in names)
        having = tuple(rank for rank, names in logged.items() if _named(key) in names)
        if lacking and not (
            _is_yet_to_log(view, key.hook, having, lacking) or _are_before(view, lacking, having, key.place)
        ):
            others = logged[lacking[0]] - logged[having[0]]
            is_mutual = any(hook == key.hook for hook, _ in others)
            return _UncommonKey(key=key, having=having, lacking=lacking, ended=ended, is_mutual=is_mutual)
    return None


def _may_log_it_yet(view: Timeline, reducing: tuple[int, ...]) -> bool:
    """Whether a rank has not logged the key that these ranks reduce because it has not got there."""
    facts = view.facts[reducing[0]].steps
    hook = next((key.hook for key in facts.logged if key.name == facts.reducing), None)
    each = {rank: {key.name for key in one.steps.logged} for rank, one in view.facts.items()}
    lacking = tuple(rank for rank, names in each.items() if facts.reducing not in names)
    return hook is not None and bool(lacking) and _is_yet_to_log(view, hook, reducing, lacking)


def _comes_to_log(view: Timeline, reducing: tuple[int, ...]) -> bool:
    """Whether all other ranks are before the line that logs what these ranks reduce: they wait for something else."""
    facts = view.facts[reducing[0]].steps
    place = next((key.place for key in facts.logged if key.name == facts.reducing), "")
    return _are_before(view, view.besides(reducing), reducing, place)


def _are_before(view: Timeline, ranks: tuple[int, ...], others: tuple[int, ...], place: str) -> bool:
    """Whether ranks are in the function that has a line, before that line, in the very call that others have left."""
    places = positions(view)
    here, there = ({inside_trainer(view.facts[rank].stack) for rank in some} for some in (ranks, others))
    have_left = not any(last_user(stack) >= 0 for stack in there)
    if not (place and ranks and have_left):
        return False
    are_ahead = max(places[rank] for rank in ranks) > min(places[rank] for rank in others)
    return not are_ahead and all(any(is_before_line(frame, place) for frame in stack) for stack in here)


def _is_yet_to_log(view: Timeline, hook: str, having: tuple[int, ...], lacking: tuple[int, ...]) -> bool:
    """Whether a rank that lacks a key has not got as far as those that have logged it, in this hook."""
    places = positions(view)
    # A callback's hook runs before the module's.
    actions = {rank: view.facts[rank].progress.actions for rank in (*having, *lacking)}
    in_callback = {rank for rank, own in actions.items() if any(_is_callbacks(action.name, hook) for action in own)}
    if in_callback == {*lacking}:
        return True
    if min(places[rank] for rank in lacking) < min(places[rank] for rank in having):
        return True
    if {places[rank] for rank in lacking} != {places[rank] for rank in having}:
        return False
    there, here = ({inside_trainer(view.facts[rank].stack) for rank in ranks} for ranks in (having, lacking))
    return all(is_before(stack, other) for stack in here for other in there)


def _is_callbacks(action_name: str, hook: str) -> bool:
    return bool(hook) and action_name.startswith("[Callback]") and action_name.endswith(f".{hook}")


class _States(NamedTuple):
    """A metric that has different states on different ranks, each of which is reduced.

    Attributes:
        named: ``"that is logged as 'val_loss'"``, or its name and class in the model.
        place: Where it is logged; empty if unknown.
        by_states: The ranks by names of states.
    """

    named: str
    place: str
    by_states: dict[tuple[str, ...], list[int]]


def _different_states(view: Timeline) -> _States | None:
    """The first such metric."""
    metrics: dict[tuple[str, str], _States] = {}
    for rank, facts in sorted(view.facts.items()):
        logged = ((key.hook, f"that is logged as {key.name!r}", key.place, key.states) for key in facts.steps.logged)
        held = (("", f"{one.name} ({one.type})", "", one.states) for one in facts.steps.metrics)
        for hook, named, place, states in (*logged, *held):
            metric = metrics.setdefault((hook, named), _States(named, place, {}))
            metric.by_states.setdefault(states, []).append(rank)
    return next((metric for metric in metrics.values() if len(metric.by_states) > 1), None)


def _states_finding(view: Timeline, metric: _States) -> Finding:
    has = ", ".join(
        f"{len(states)} on {ranks_words(ranks)} ({', '.join(states[:LISTED]) or 'a plain value'})"
        for states, ranks in metric.by_states.items()
    )
    few = min(metric.by_states.values(), key=len)
    is_tied = all(len(ranks) == len(few) for ranks in metric.by_states.values())
    ranks = tuple(sorted(view.facts)) if is_tied else tuple(few)
    text = f"the metric {metric.named} has different states to be reduced: {has}"
    return _logging_finding(view, ranks, text, metric.place, Confidence.CERTAIN)


def _gathered_by_entry(view: Timeline, syncing: tuple[int, ...]) -> MetricFacts | None:
    """The metric that only these ranks synchronise, if it has a state whose entries are gathered one by one.

    If they are under a condition on the rank, that is the reason instead.
    """
    if len(syncing) == len(view.facts) or any(condition_of(view, rank) for rank in syncing):
        return None
    facts = view.facts[syncing[0]]
    names = [unit.name for unit in facts.units if unit.kind is UnitKind.METRIC and unit.alike <= 1]
    found = (one for one in facts.steps.metrics if one.by_entry and any(_is_named(one, name) for name in names))
    return next(found, None) if len(names) == 1 else None


def _is_named(metric: MetricFacts, name: str) -> bool:
    """Whether this is the name of a metric, possibly with the prefix of a wrapper around the model."""
    return name == metric.name or name.endswith(f".{metric.name}")


def _entries_finding(view: Timeline, syncing: tuple[int, ...], metric: MetricFacts) -> Finding:
    others = view.besides(syncing)
    few = min(syncing, others, key=len)
    ranks = tuple(few) if len(syncing) != len(others) else tuple(sorted(view.facts))
    states = " and ".join(map(repr, metric.by_entry[:LISTED]))
    text = (
        f"{clause(syncing, 'synchronizes|synchronize')} the metric {metric.name} ({metric.type}) and "
        f"{clause(others, 'does|do')} not, or no longer; {states} is gathered entry by entry (dist_reduce_fx=None), "
        "which needs equally many updates on all ranks"
    )
    found = _logging_finding(view, ranks, text, call_location(view, syncing), Confidence.LIKELY)
    return replace(found, remedy=_REMEDY_ENTRIES)


def _named(key: LoggedKey) -> tuple[str, str]:
    return key.hook, key.name


def _is_past(view: Timeline, odd: _UncommonKey) -> bool:
    """Whether the ranks that lack the key have left the hook that logs it, in that batch or in a later one."""
    places = positions(view)
    first = min(places[rank] for rank in odd.having)
    left = (
        places[rank] >= first and not is_in_action(view.facts[rank].progress, f".{odd.key.hook}")
        for rank in odd.lacking
    )
    return all(left)


def _finding(view: Timeline, odd: _UncommonKey) -> Finding:
    key, ranks = odd.key, odd.ranks
    under = f", {under_words(key.rank_condition)}" if key.rank_condition else ""
    alone = set(ranks) >= set(odd.having) and not odd.ended
    lacking = "" if alone else f", and {clause(ranks, 'does|do not')}"
    if odd.is_mutual:
        lacking += f", and {clause(odd.lacking, 'logs|log other keys')}"
    what = f"the metric {key.name!r}" if key.states else f"{key.name!r} with sync_dist=True"
    text = joined((ranks_words(odd.having), "alone" if alone else "", verb(odd.having, "logs", "log"), what))
    found = _logging_finding(
        view,
        ranks,
        f"{text} in {key.hook}{under}{lacking}",
        key.place,
        Confidence.CERTAIN if _is_past(view, odd) else Confidence.LIKELY,
    )
    found = replace(found, remedy=_REMEDY_METRIC) if key.states else found
    if not odd.ended:
        return found
    was = capitalised(clause(odd.ended, "was|were"))
    gone = f"{was} reducing a logged value when aborted, {gloo_abort_words(view, odd.ended)}."
    evidence = (*found.evidence, *ended_process_evidence(view, odd.ended))
    return replace(found, summary=joined((found.summary, gone)), evidence=evidence)


def _skipped_reduction(view: Timeline, reducing: tuple[int, ...]) -> Shift | None:
    """The reduction of a logged value in which these ranks wait, if it is the first call that others have skipped.

    The recorder has the line of each call, so an earlier skipped call would be seen.
    """
    split = view.divergence
    first = shift(view, split.group) if split is not None and not view.silent else None
    if first is None or first.count or not first.is_decided or first.callers != reducing:
        return None
    waiting_in = {call.seq for rank in reducing if (call := view.activities[rank].collective) is not None}
    return first if waiting_in == {first.call.seq} else None


def _skipped_finding(view: Timeline, skipped: Shift) -> Finding:
    """All have logged the key before, and only some do in this step."""
    callers = skipped.callers
    name = view.facts[callers[0]].steps.reducing
    what = repr(name) if name else "a value"
    text = (
        f"{clause(callers, 'logs|log')} {what} with sync_dist=True in this step, as all ranks did before, and "
        f"{clause(skipped.others, 'has|have not')}"
    )
    return with_decision(
        view, _logging_finding(view, skipped.ranks, text, location_of(skipped.frame), Confidence.LIKELY)
    )


def _undecided(view: Timeline, reducing: tuple[int, ...]) -> Finding:
    """All have logged the same keys before, but only some are reducing one now."""
    others = tuple(rank for rank in view.waiting if rank not in set(reducing))
    name = view.facts[reducing[0]].steps.reducing
    place = next((key.place for key in view.facts[reducing[0]].steps.logged if key.name == name), "")
    if raised := _raised_instead(view, others, place):
        return _raised_finding(view, name, place, raised)
    ranks = reducing if len(reducing) <= len(others) else others
    what = f"{name!r}, which it has" if name else "a value that it has"
    many = f"{name!r}, which they have" if name else "a value that they have"
    text = f"{ranks_words(reducing)} {verb(reducing, f'reduces {what}', f'reduce {many}')} logged, and others do not"
    return _logging_finding(view, ranks, text, place, Confidence.POSSIBLE)


def _raised_instead(view: Timeline, ranks: tuple[int, ...], place: str) -> dict[int, CaughtException]:
    """By rank, the exception that has just been caught after the line that logs a key raised it."""
    caught = ((rank, error) for rank in ranks for error in just_caught(view, rank))
    return {rank: error for rank, error in caught if place in map(location_of, error.stack)}


def _raised_finding(view: Timeline, name: str, place: str, raised: dict[int, CaughtException]) -> Finding:
    """The line that logs the key has raised on some ranks before it did."""
    ranks, error = tuple(sorted(raised)), raised[min(raised)]
    clauses = f" by {condition_words(handler)}" if (handler := _handler_at(error, place)) else ""
    text = (
        f"{clause(ranks, 'has|have not logged')} {name!r} in this step: the line that logs it raised "
        f"{error_words(error)}{at_words(raised_at(error))}, which was caught{clauses}"
    )
    return _logging_finding(view, ranks, text, place, Confidence.LIKELY)


def _handler_at(error: CaughtException, place: str) -> str:
    """The ``except`` clause around a line through which an exception came; empty if unknown."""
    return next((frame.handler for frame in error.stack if location_of(frame) == place), "")


def _logging_finding(view: Timeline, ranks: tuple[int, ...], text: str, place: str, confidence: Confidence) -> Finding:
    return finding(
        view,
        ranks,
        f"{text}: {others_wait(view)}.",
        confidence=confidence,
        location=place or call_location(view, ranks),
        evidence=(
            *_key_evidence(view),
            *call_evidence(view.divergence),
            *where_evidence(view, view.waiting),
        ),
        remedy=_REMEDY if confidence is not Confidence.POSSIBLE else _REMEDY + _DECIDES,
    )


def _key_evidence(view: Timeline) -> Iterator[Evidence]:
    """The keys that ranks have logged, one line for all ranks with the same keys."""
    logged = {rank: tuple(key.name for key in facts.steps.logged) for rank, facts in sorted(view.facts.items())}
    # A metric that is computed by itself needs no key.
    alike = ranks_by(logged) if any(logged.values()) else {}
    for names, ranks in list(alike.items())[:LISTED]:
        listed = ", ".join(map(repr, names[:LISTED])) + (", …" if len(names) > LISTED else "")
        text = f"{capitalised(clause(ranks, 'has|have'))} logged {listed or 'nothing'}."
        yield evidence_about(ranks, "logger", text)
