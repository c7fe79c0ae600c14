"""Timeouts that process groups have of their own, in which ranks wait."""

from lightning_ncclsafe.facts import VOTE_GROUPS, group_and_backend
from lightning_ncclsafe.rules.kit.rule import once
from lightning_ncclsafe.rules.kit.timeline import Timeline

_RECENT = 16


@once
def usual_timeouts_ms(view: Timeline) -> set[int]:
    """The timeouts of the default group, which follow the strategy's limits from phase to phase.

    A shorter one than any of these limits is the program's own: it has set the timeout of the group.
    """
    shortest_ms = round(view.job.incident.shortest_timeout_s * 1000)
    # Other groups may have many recent calls, as with a sharded model.
    of_default = (
        [call for call in facts.collectives if group_and_backend(call.group)[0] == "0"] for facts in view.facts.values()
    )
    return {call.timeout_ms for calls in of_default for call in calls[-_RECENT:] if call.timeout_ms >= shortest_ms}


@once
def own_timeouts(view: Timeline) -> dict[int, tuple[str, int]]:
    """Group and timeout in milliseconds of what each rank waits in, if it is shorter than the strategy's."""
    ours = {group.name for facts in view.facts.values() for group in facts.groups if group.description in VOTE_GROUPS}
    waits = {rank: view.activities[rank].collective for rank in view.waiting}
    limit_ms, usual = view.job.incident.timeout_s * 1000, usual_timeouts_ms(view)
    return {
        rank: (call.group, call.timeout_ms)
        for rank, call in waits.items()
        if call is not None and 0 < call.timeout_ms < limit_ms and call.timeout_ms not in usual
        if call.group not in ours
    }


def waited_ms(view: Timeline, rank: int) -> float:
    """For how long a rank had been in its collective when it was asked; 0 if unknown."""
    call, taken_ns = view.activities[rank].collective, view.facts[rank].taken_ns
    return (taken_ns - call.created_ns) / 1e6 if call is not None and call.created_ns and taken_ns else 0.0


def is_unenforced(view: Timeline, rank: int) -> bool:
    """Whether a rank has been in its collective for far longer than its group's own timeout."""
    return waited_ms(view, rank) >= 2 * own_timeouts(view)[rank][1]
