"""Ranks of which dumps or logs were read, in words: what there was, and how far each has come."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from lightning_ncclsafe.facts import IncidentKind, JobFacts, RankFacts
from lightning_ncclsafe.rules.kit.wording import capitalised, group_words, ranks_words
from lightning_ncclsafe.rules.recorded.questions import pending_p2p
from lightning_ncclsafe.rules.recorded.telling import Words

NOTHING = "Nothing found: no rank waits for another in what was read."
_MOST_LINES = 40
_MOST_GROUPS = 4


def is_recorded(job: JobFacts) -> bool:
    """Whether the facts were read from what a run has left behind."""
    return job.incident.kind is IncidentKind.RECORDED


def recorded_words(job: JobFacts) -> str:
    """``"Read of 8 ranks: dumps of ranks 0-6; logs of ranks 1-7."``."""
    records = {facts.rank: facts.record for facts in job.ranks if facts.record is not None}
    dumps = [rank for rank, record in records.items() if record.has_dump]
    logs = [rank for rank, record in records.items() if record.has_log]
    parts = [f"{what} of {ranks_words(ranks)}" for what, ranks in (("dumps", dumps), ("logs", logs)) if ranks]
    if not parts:
        return "Read: logs that do not say of any rank what it did."
    return f"Read of {job.world_size:,} rank{'s' * (job.world_size != 1)}: {'; '.join(parts)}."


def recorded_table(job: JobFacts) -> Iterator[str]:
    """One line for all ranks of which the same was read."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    words = Words()
    for facts in job.ranks:
        alike[_state(facts, words)].append(facts.rank)
    silent = [rank for rank in job.silent if rank not in job.outdated]
    if silent:
        alike[("nothing was read of it" if len(silent) == 1 else "nothing was read of them",)] = silent
    if older := [rank for rank in job.silent if rank in job.outdated]:
        alike[("only a dump of an earlier moment was read",)] = older
    for number, (state, ranks) in enumerate(alike.items()):
        if number == _MOST_LINES:
            yield f"… {len(alike) - _MOST_LINES:,} more lines; --format json has all of them"
            return
        yield capitalised(f"{ranks_words(ranks)}: {'; '.join(state)}")


def _state(facts: RankFacts, words: Words) -> tuple[str, ...]:
    parts = [f"on {facts.host}"] if facts.host else []
    parts += [_group_words(facts, number, words) for number in range(min(len(facts.groups), _MOST_GROUPS))]
    if len(facts.groups) > _MOST_GROUPS:
        parts.append(f"{len(facts.groups) - _MOST_GROUPS:,} more groups")
    parts += [f"waits in {words.of(call)}" for call in islice(pending_p2p(facts), 1)]
    if facts.exception is not None:
        parts.append(f"raised {facts.exception.type}")
    if facts.record is not None and facts.record.exit_code:
        parts.append(f"ended with exit code {facts.record.exit_code}")
    if facts.record is not None and facts.record.awaited:
        parts.append(f"waited for {ranks_words(facts.record.awaited)} in {facts.record.awaited_in}")
    return tuple(parts) or ("nothing is said of collectives",)


def _group_words(facts: RankFacts, number: int, words: Words) -> str:
    """What waits comes first: groups in which nothing is outstanding are of less interest."""
    pending = {call.group: call for call in reversed(facts.collectives) if not call.completed and not call.is_p2p}
    group = sorted(facts.groups, key=lambda one: one.name not in pending)[number]
    counters = f"called {group.last_enqueued:,}, completed {group.last_completed:,}"
    call = pending.get(group.name)
    waits = f", waits in {words.of(call)}" if call is not None else ""
    about = f" ({group.description})" if group.description not in ("", "default_pg", "undefined") else ""
    return f"{group_words(group.name)}{about}: {counters}{waits}"
