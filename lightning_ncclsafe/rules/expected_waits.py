"""Whether ranks wait for something that usually takes long, so that it is too early to report."""

import math
from collections.abc import Callable, Iterable

from lightning_ncclsafe.facts import ENDED, STOPPED, IncidentKind, JobFacts, Phase, RankFacts
from lightning_ncclsafe.facts.phase_kinds import BATCHES_TO_KNOW, LONG_S, PASSING_S, UNKNOWN_S, PhaseKind, phase_kind_of
from lightning_ncclsafe.rules.kit import (
    ASLEEP_S,
    PAUSE,
    Kind,
    Timeline,
    asleep_s,
    forget,
    is_compiling,
    saves_outside,
    timeline,
)

_ASKED_AGAIN_S = 60.0


def expected_for_s(job: JobFacts, limit_s: Callable[[str], float]) -> float:
    """For how many more seconds it is normal that ranks make no progress; 0 if it is not.

    It is normal for five minutes, or half of the hard limit if that is less, while every rank that others wait for
    compiles, writes a checkpoint, or is in the first batch of a loop, or in one of the first five that it evaluates.
    An exception, the hard limit, or a rank that does not answer is never normal, nor are ranks that wait for one
    another in different collectives, for a process that was killed, or for what can never end. Where ranks ask early,
    only the last two are reported early. Otherwise, a wait for a rank that may yet go on is normal for 20 s, or for
    half of the hard limit if that is less.

    Args:
        limit_s: The hard limit, in seconds, by its name in ``PhaseTimeouts``.
    """
    if _is_alarming(job):
        return _until_s(job, _asked_after_s(job)) if _may_be_busy(job) else 0.0
    view = timeline(job)
    try:
        awaited = tuple(_awaited(view))
        left_s = _left_of_all_s(view, awaited, limit_s)
        # Of several ranks, one that goes on may be what another one sleeps for.
        is_stuck = _is_deadlock(view) or (bool(awaited) and not any(_until_stuck_s(view, rank) for rank in awaited))
    finally:
        forget()
    if left_s or is_stuck:
        return left_s
    passing_s = min(PASSING_S, job.incident.timeout_s / 2) if awaited else 0.0
    return _until_s(job, max(_asked_after_s(job), passing_s))


def _left_of_all_s(view: Timeline, awaited: tuple[int, ...], limit_s: Callable[[str], float]) -> float:
    job, incident = view.job, view.job.incident
    if _is_deadlock(view):
        # Ranks that have come there just now may be on their way.
        return max(_asked_after_s(job) - min(facts.progress.idle_s for facts in job.ranks), 0.0)
    # If all wait and none is behind, the collective itself takes long: the first one connects.
    slow = awaited or view.waiting
    left = [_left_s(view, view.facts[rank], limit_s, is_awaited=bool(awaited)) for rank in slow]
    # No wait goes unreported for longer than this, whatever progress the awaited ranks make.
    waited_left_s = min(LONG_S, incident.timeout_s / 2) - incident.idle_s
    return max(min([*left, waited_left_s]), 0.0) if left else 0.0


def announced_for_s(job: JobFacts) -> float:
    """For how many more seconds no report is needed because ranks wait only for announced pauses; 0 if it is needed.

    It is a minute, as the pause may be over by then, or the time until the hard limit.
    """
    if _is_alarming(job):
        return 0.0
    view = timeline(job)
    # If no rank waits for others, all of them may have paused.
    actions = [view.facts[rank].progress.actions for rank in (view.stragglers if view.waiting else view.facts)]
    forget()
    if not actions or not all(any(action.name.startswith(PAUSE) for action in own) for own in actions):
        return 0.0
    return max(min(_ASKED_AGAIN_S, job.incident.timeout_s - job.incident.idle_s), 0.0)


def saved_together_for_s(job: JobFacts) -> float:
    """For how many more seconds no report is needed because all ranks save together outside of the Trainer's loops.

    Nothing is known about how long such a save takes, so it is as long as the hard limit allows; 0 if it is needed.

    Args:
        job: The facts of all ranks that answered.
    """
    if _is_alarming(job) or not all(map(saves_outside, job.ranks)):
        return 0.0
    return max(job.incident.timeout_s - job.incident.idle_s, 0.0)


def busy_for_s(job: JobFacts) -> float:
    """For how many more seconds no report is needed although the rank that opened the incident waits, or 0.

    That rank waits for something other than ranks. A report is needed once no rank has made progress for the suspicion
    threshold, and others wait for that rank, or no rank waits for another.
    """
    if _is_alarming(job):
        return 0.0
    view = timeline(job)
    opener = view.activities.get(job.incident.opened_by)
    if opener is None or not opener.waits_alone:
        return 0.0
    after_s = job.incident.suspect_after_s
    left_s = after_s - min(facts.progress.idle_s for facts in job.ranks)
    is_awaited = any(doing.waits_for_peers for doing in view.activities.values())
    is_concern = is_awaited or view.each_waits_alone
    forget()
    if left_s > 0:
        return left_s
    return 0.0 if is_concern else after_s


def _is_deadlock(view: Timeline) -> bool:
    """Whether all ranks wait, and not for the same collective: no rank is left that could end the wait."""
    return view.all_wait and (view.any_divergence is not None or bool(view.behind))


def _is_alarming(job: JobFacts) -> bool:
    is_asked = job.incident.kind is IncidentKind.SUSPECT
    return not is_asked or bool(job.silent) or any(facts.exception for facts in job.ranks)


def _awaited(view: Timeline) -> Iterable[int]:
    if view.waiting:
        return view.stragglers
    return (rank for rank, doing in view.activities.items() if doing.waits_for_data or doing.waits_alone)


def _left_s(view: Timeline, facts: RankFacts, limit_s: Callable[[str], float], *, is_awaited: bool) -> float:
    phase_kind, doing = phase_kind_of(facts.progress), view.activities[facts.rank]
    is_long = phase_kind.is_long or _evaluates_first_batches(facts, phase_kind)
    is_busy = is_compiling(facts.stack) or doing.kind is Kind.CHECKPOINT
    if not is_long and not (is_awaited and is_busy):
        return 0.0
    left_s = min(LONG_S, limit_s(phase_kind.limit_name) / 2) - _idle_or_saving_s(facts)
    return min(left_s, _until_stuck_s(view, facts.rank))


def _until_stuck_s(view: Timeline, rank: int) -> float:
    """In how many seconds it is known that a rank for which others wait cannot go on by itself; infinite if it may."""
    facts, doing = view.facts[rank], view.activities[rank]
    if (doing.waits_alone or doing.waits_for_data) and any(child.signal for child in facts.machine.ended):
        return 0.0
    lock = view.lock_waits.get(rank)
    if lock is not None and lock.holder == rank and lock.process is None:
        return 0.0
    slept_s = asleep_s(facts, doing)
    return max(ASLEEP_S - slept_s, 0.0) if slept_s is not None else math.inf


def _until_s(job: JobFacts, after_s: float) -> float:
    """How many seconds are left until ranks have waited for so long, if it is only the time that makes them ask.

    0 if they ask because a rank leaves or may be lost.
    """
    incident = job.incident
    is_time = incident.idle_s >= incident.suspect_after_s
    return max(after_s - incident.idle_s, 0.0) if is_time else 0.0


def _asked_after_s(job: JobFacts) -> float:
    """After how many seconds the wait is unusual, if not for what was found meanwhile."""
    incident = job.incident
    opener = next((facts for facts in job.ranks if facts.rank == incident.opened_by), None)
    is_early = opener is not None and phase_kind_of(opener.progress).is_long
    least_s = min(UNKNOWN_S, incident.timeout_s / 2) if is_early else 0.0
    return max(incident.suspect_after_s, least_s)


def _may_be_busy(job: JobFacts) -> bool:
    """Whether all that is alarming is a silent rank that is not seen to have ended, or to be stopped."""
    if job.incident.kind is not IncidentKind.SUSPECT or any(facts.exception for facts in job.ranks):
        return False
    seen = (one for one in job.witnessed if one.rank in job.silent)
    return not any(one.state in (*ENDED, *STOPPED) or one.ended_by or one.exit_code is not None for one in seen)


def _evaluates_first_batches(facts: RankFacts, phase_kind: PhaseKind) -> bool:
    """Whether a rank is in one of the first few batches that it evaluates: how long they take differs a lot."""
    before = facts.steps.validated if phase_kind.phase is Phase.VALIDATE else 0
    is_early = max(before, facts.progress.batch_idx + 1) <= BATCHES_TO_KNOW
    return phase_kind.evaluates and phase_kind.per_batch and is_early


def _idle_or_saving_s(facts: RankFacts) -> float:
    saves = (action.for_s for action in facts.progress.actions if action.name.startswith("save_checkpoint"))
    return max([facts.progress.idle_s, *saves])
