"""The ranks of a job side by side, answering or recorded: equal ones share a line and a stack."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice

from lightning_ncclsafe.facts import Frame, InspectionFacts, JobFacts, Phase, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding
from lightning_ncclsafe.facts.wording import (
    capitalised,
    clause,
    duration_words,
    group_words,
    location_of,
    ranks_words,
    under_words,
)
from lightning_ncclsafe.rules.kit.activity import outstanding_p2p
from lightning_ncclsafe.rules.kit.landmarks import Kind
from lightning_ncclsafe.rules.kit.sentences import batch_words, exception_place, wait_words
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.recorded.kit.evidence import Words

NOTHING = "Nothing found: no rank waits for another in what was read."
_MOST_LINES = 40
_MOST_GROUPS = 4
_MOST_PLACES = 3
_MOST_HOSTS = 2
_MOST_STACKS = 12
_MOST_FRAMES = 60

_INSTALLED = re.compile(r".*(?:-packages|/lib/python3\.\d+)/")

_Key = tuple[object, ...]


def recorded_words(job: JobFacts) -> str:
    """``"Read 7 of 8 ranks: dumps of ranks 0-6; logs of ranks 1-6."``; ``"of 8 or more"`` if none says how many."""
    records = {facts.rank: facts.record for facts in job.ranks if facts.record is not None}
    dumps = [rank for rank, record in records.items() if record.has_dump]
    logs = [rank for rank, record in records.items() if record.has_log]
    parts = [f"{what} of {ranks_words(ranks)}" for what, ranks in (("dumps", dumps), ("logs", logs)) if ranks]
    if not parts:
        return "Read: logs that do not show what any rank did."
    read, size = len({*dumps, *logs}), job.world_size
    of = f" of {size:,}{' or more' * (not job.is_sized)}" if job.is_sized or read < size else ""
    return f"Read {read:,}{of} rank{'s' * ((size if of else read) != 1)}: {'; '.join(parts)}."


def recorded_table(job: JobFacts, named: Iterable[int] = (), *, as_list: bool = False) -> Iterator[str]:
    """One line per group of ranks with the same record.

    Args:
        named: Ranks that come first, so that they are not left out.
        as_list: Whether several parts of a record have lines of their own, with dashes.
    """
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    words = Words()
    first = frozenset(named)
    for facts in sorted(job.ranks, key=lambda facts: facts.rank not in first):
        alike[_state(facts, words)].append(facts.rank)
    silent = [rank for rank in job.silent if rank not in (*job.outdated, *job.left_out)]
    if silent:
        alike[("nothing of it was read" if len(silent) == 1 else "nothing of them was read",)] = silent
    if older := [rank for rank in job.silent if rank in job.outdated]:
        alike[("only an older dump was read",)] = older
    if others := [rank for rank in job.silent if rank in job.left_out]:
        alike[("only a dump was read that does not belong to this run and rank",)] = others
    entries = ((f"{ranks_words(ranks)}:", [*_of_several(state, len(ranks))]) for state, ranks in alike.items())
    for who, parts in islice(entries, _MOST_LINES):
        if as_list and len(parts) > 1:
            yield capitalised(who)
            yield from (f"- {part}" for part in parts)
        else:
            yield capitalised(f"{who} {'; '.join(parts)}")
    if len(alike) > _MOST_LINES:
        yield f"… {len(alike) - _MOST_LINES:,} more lines; --format json has all of them"


def _state(facts: RankFacts, words: Words) -> tuple[str, ...]:
    parts = [f"on {facts.host}"] if facts.host else []
    parts += [_group_words(facts, number, words) for number in range(min(len(facts.groups), _MOST_GROUPS))]
    if len(facts.groups) > _MOST_GROUPS:
        more = len(facts.groups) - _MOST_GROUPS
        parts.append(f"{more:,} more group{'s' * (more > 1)}")
    p2p = outstanding_p2p(facts)
    parts += [f"waits in {words.of(p2p)}"] if p2p is not None else []
    if facts.exception is not None:
        parts.append(f"raised {facts.exception.type}")
    if facts.record is not None and facts.record.exit_code:
        parts.append(f"ended with exit code {facts.record.exit_code}")
    if facts.record is not None and facts.record.awaited:
        parts.append(f"waited for {ranks_words(facts.record.awaited)} in {facts.record.awaited_in}")
    return tuple(parts) or ("no collective is mentioned",)


def _of_several(state: Iterable[str], ranks: int) -> Iterator[str]:
    """What one rank does, ``"waits in barrier"``, said of as many."""
    return (re.sub(r"(^|, )waits in ", r"\1wait in ", part) if ranks > 1 else part for part in state)


def _group_words(facts: RankFacts, number: int, words: Words) -> str:
    """Groups in words; those with outstanding collectives first."""
    pending = {call.group: call for call in reversed(facts.collectives) if not call.completed and not call.is_p2p}
    group = sorted(facts.groups, key=lambda one: one.name not in pending)[number]
    counters = f"called {group.last_enqueued:,}, completed {group.last_completed:,}"
    call = pending.get(group.name)
    # The group is named before.
    waits = f", waits in {words.of(call).replace(f', {group_words(group.name)})', ')')}" if call is not None else ""
    return f"{group_words(group.name, group.description)}: {counters}{waits}"


def inspected_words(job: JobFacts) -> str:
    """How ranks were inspected, and which of them moved meanwhile."""
    inspections = {facts.rank: facts.inspection for facts in job.ranks if facts.inspection is not None}
    looks = max((one.looks for one in inspections.values()), default=0)
    over_s = max((one.over_s for one in inspections.values()), default=0.0)
    seen = len(inspections) + len(job.witnessed)
    words = [
        f"Inspected from outside: {seen:,} of {job.world_size:,} rank{'s' * (job.world_size != 1)}, {looks} looks at "
        f"each within {duration_words(over_s)}."
    ]
    moving, still, unread = (_ranks_that_moved(job, moved) for moved in (True, False, None))
    words += [f"{capitalised(clause(moving, 'moves|move'))}."] if moving else []
    slept = [(one.slept_s, rank) for rank, one in inspections.items() if one.slept_s and one.idle_s > one.over_s]
    if slept:
        least_s, most_s = (duration_words(end(slept)[0]) for end in (min, max))
        span = least_s if least_s == most_s else f"{least_s} to {most_s}"
        who = clause([rank for _, rank in slept], "has|have")
        words.append(f"{capitalised(who)} not run for {span}, according to the kernel.")
    if still:
        words.append(
            f"{capitalised(ranks_words(still))} did not move. A longer step or save looks the same: inspect again "
            "before you end the job."
        )
    words += [f"The stack of {ranks_words(unread)} could not be read."] if unread else []
    return " ".join(words)


def inspected_answer(job: JobFacts) -> str:
    """The answer if no rule found anything."""
    moving, still, unread = (_ranks_that_moved(job, moved) for moved in (True, False, None))
    if not job.ranks or job.witnessed:
        seen = [process.rank for process in job.witnessed]
        return f"Nothing found: {clause(seen, 'has|have')} ended, so there is nothing left to inspect."
    if unread:
        why = next((text for facts in job.ranks if facts.rank in unread for text in facts.missing), "")
        return f"Nothing found: the stack of {ranks_words(unread)} could not be read{f': {why}' if why else ''}."
    if still and moving:
        meanwhile = clause(still, "made no progress meanwhile")
        return f"Nothing found: {clause(moving, 'moves|move')}, and {meanwhile}: inspect again."
    if still and not job.incident.idle_s:
        return (
            f"Nothing found: {clause(still, 'made no progress')}, and ended during the inspection, as after a long "
            "step, or as a hang that somebody ends."
        )
    if still:
        return f"Nothing found: {ranks_words(still)} did not move, and no rank is seen waiting for another."
    return f"Nothing found: the job makes progress. {capitalised(clause([f.rank for f in job.ranks], 'moves|move'))}."


def _ranks_that_moved(job: JobFacts, moved: bool | None) -> list[int]:
    """The inspected ranks that moved (True), did not (False), or whose stack could not be read (None)."""
    return [facts.rank for facts in job.ranks if facts.inspection is not None and facts.inspection.moved is moved]


def sampled_table(job: JobFacts) -> Iterator[str]:
    """What ranks were doing in how many samples of their stacks; equal ones share a line."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for facts in job.ranks:
        if facts.inspection is not None and facts.inspection.looks:
            alike[tuple(_sampled_words(facts.inspection))].append(facts.rank)
    yield from _limited((f"{ranks_words(ranks)}: {'; '.join(words)}" for words, ranks in alike.items()), len(alike))


def _sampled_words(inspection: InspectionFacts) -> Iterator[str]:
    for one in inspection.whereabouts[:_MOST_PLACES]:
        place = f" at {one.place}" if one.place else ""
        yield f"{one.looks} of {inspection.looks} in {one.doing}{place}"
    if len(inspection.whereabouts) > _MOST_PLACES:
        yield f"{sum(one.looks for one in inspection.whereabouts[_MOST_PLACES:])} elsewhere"


def hosts_words(hosts: Iterable[str]) -> str:
    """``"on node-3, node-4"``, ``"on 64 hosts"``; empty if unknown."""
    names = [*dict.fromkeys(filter(None, hosts))]
    return f"on {', '.join(names) if len(names) <= _MOST_HOSTS else f'{len(names):,} hosts'}" if names else ""


# The verbs that a state begins with.
_PLURAL = {"waits": "wait", "is": "are", "has": "have"}


class RankStates:
    """What each rank of a job does, in words, and which ranks do the same."""

    def __init__(self, view: Timeline) -> None:
        self.view = view

    @cached_property
    def states(self) -> dict[int, str]:
        """``"is in user code"``, ``"waits in broadcast (sequence number 7)"``, ``"raised ValueError"``, ascending.

        Empty if unknown.
        """
        return {rank: self._state(rank) for rank in sorted(self.view.facts)}

    def _state(self, rank: int) -> str:
        exception = self.view.facts[rank].exception
        if exception is not None:
            return f"raised {exception.type}"
        doing = self.view.activities[rank]
        if doing.waits_for_peers:
            return f"waits in {wait_words(self.view, rank)}"
        if doing.kind is Kind.FINISHED:
            return "has finished"
        # Unknown for a rank of which only a record was read.
        facts = self.view.facts[rank]
        is_known = facts.progress.phase is not Phase.UNKNOWN or (facts.inspection is not None and bool(facts.stack))
        return f"is in {doing.kind.value}" if is_known else ""

    def state(self, ranks: Sequence[int]) -> str:
        """What equal ranks do: ``"wait in broadcast (sequence number 7)"``."""
        verb, space, rest = self.states[ranks[0]].partition(" ")
        return f"{_PLURAL.get(verb, verb) if len(ranks) > 1 else verb}{space}{rest}"

    def batch(self, rank: int) -> str:
        """At which batch a rank is; empty if it has finished: the loop's counters say nothing then."""
        is_over = self.view.activities[rank].kind is Kind.FINISHED
        return "" if is_over else batch_words(self.view.facts[rank].progress)

    def stall(self, ranks: Sequence[int]) -> str:
        """``"no progress for 4 s to 12 s"``; empty if they have raised, and are to make none, or stood for no time."""
        have_raised = all(self.view.facts[rank].exception is not None for rank in ranks)
        idle = idle_words(self.view, ranks)
        return "" if have_raised or idle == duration_words(0) else f"no progress for {idle}"

    @cached_property
    def _has_hosts(self) -> bool:
        return len({facts.host for facts in self.view.facts.values()}) > 1

    def hosts(self, ranks: Iterable[int]) -> str:
        """``"on node-3"``; empty if all ranks of the job that answered are on one host."""
        return hosts_words(self.view.facts[rank].host for rank in ranks) if self._has_hosts else ""

    def place(self, rank: int) -> Frame | None:
        """The user's line that a rank is at, or at which it has raised; None if there is none."""
        facts = self.view.facts[rank]
        raised_at = exception_place(facts)
        return raised_at if raised_at is not None else self.view.activities[rank].frame

    def silence(self, rank: int) -> str:
        """``"did not answer; its process is stopped"``: the state of a rank that has not answered."""
        if self.view.job.is_recorded:
            return "left nothing that was read"
        process = self.view.witnesses.get(rank)
        return f"did not answer; {f'its process is {process.state}' if process else 'nobody saw its process'}"

    def silences(self) -> Iterator[tuple[list[int], str]]:
        """The ranks that have not answered, equal ones together, and their state."""
        alike: dict[str, list[int]] = defaultdict(list)
        for rank in self.view.silent:
            alike[self.silence(rank)].append(rank)
        for words, ranks in alike.items():
            several = words.replace("its process is", "their processes are").replace("its process", "their processes")
            yield ranks, words if len(ranks) == 1 else several

    def groups(self, *, waiting_anywhere: bool = False) -> list[tuple[int, ...]]:
        """The ranks that answered, equal ones together; ascending by their lowest rank.

        Args:
            waiting_anywhere: Whether ranks that wait in the same collective are equal even at different lines.
        """
        alike: dict[_Key, list[int]] = defaultdict(list)
        for rank, state in self.states.items():
            doing = self.view.activities[rank]
            line = "" if waiting_anywhere and doing.waits_for_peers else location_of(self.place(rank))
            alike[batch_words(self.view.facts[rank].progress), doing.hook, doing.kind, line, state].append(rank)
        return [tuple(ranks) for ranks in alike.values()]


# The same finding on another rank differs in ranks, processes and amounts.
_NUMBERS = re.compile(r"(?:\branks? )?\d+(?:(?:, |[-.,:])\d+)*(?:, … \(\d+ ranks\))?")


def without_repeats(findings: Iterable[Finding]) -> list[tuple[Finding, tuple[int, ...]]]:
    """The findings, without those that say the same about other ranks.

    Returns:
        The first of each, with the ranks that the dropped ones are about.
    """
    distinct: list[tuple[Finding, set[int]]] = []
    first_with: dict[_Key, int] = {}
    for finding in findings:
        words = (_NUMBERS.sub("#", text) for text in (finding.summary, finding.remedy))
        same = finding.rule, finding.location, finding.confidence, finding.severity, *words
        place = first_with.setdefault(same, len(distinct))
        # Two findings on the same rank are not repeats.
        if place < len(distinct) and not {*distinct[place][0].ranks, *distinct[place][1]} & {*finding.ranks}:
            distinct[place][1].update(finding.ranks)
        else:
            distinct.append((finding, set()))
    return [(finding, tuple(sorted(others))) for finding, others in distinct]


def rank_table(job: JobFacts, named: Iterable[int] = ()) -> Iterator[str]:
    """One line for all ranks at the same place, with the range of their idle times; one for those as silent.

    Args:
        named: Ranks that come first, so that they are not left out.
    """
    alike = RankStates(Timeline(job))
    lines = [(ranks, _line(alike, ranks)) for ranks in alike.groups()]
    lines += [(tuple(ranks), _silent_line(alike, ranks, words)) for ranks, words in alike.silences()]
    first = frozenset(named)
    lines.sort(key=lambda line: first.isdisjoint(line[0]))
    yield from _limited((line for _, line in lines), len(lines))


def _silent_line(alike: RankStates, ranks: list[int], words: str) -> str:
    process = alike.view.witnesses.get(ranks[0]) if len(ranks) == 1 else None
    return f"{ranks_words(ranks)}: {words}{f' (pid {process.pid})' if process is not None else ''}"


def _line(alike: RankStates, ranks: tuple[int, ...]) -> str:
    rank, view = ranks[0], alike.view
    doing, facts = view.activities[rank], view.facts[rank]
    place = alike.place(rank)
    where = ", ".join(filter(None, [f"phase {facts.progress.phase.value}", alike.batch(rank)]))
    if facts.inspection is not None and facts.progress.phase is Phase.UNKNOWN:
        where = "in no Trainer"
    moves = facts.inspection is not None and facts.inspection.moved
    progress = ("moves" if len(ranks) == 1 else "move") if moves else alike.stall(ranks)
    what = "; ".join(filter(None, [alike.state(ranks), progress, alike.hosts(ranks), where]))
    hook, line = (f", hook {doing.hook}" if doing.hook else ""), (f", line {location_of(place)}" if place else "")
    return f"{ranks_words(ranks)}: {what}{hook}{line}"


def idle_words(view: Timeline, ranks: Iterable[int]) -> str:
    """For how long ranks have made no progress: ``"4 s"``, ``"4 s to 12 s"``."""
    idle_s = [view.facts[rank].progress.idle_s for rank in ranks]
    least, most = duration_words(min(idle_s)), duration_words(max(idle_s))
    return least if least == most else f"{least} to {most}"


def named_ranks(diagnosis: Diagnosis) -> frozenset[int]:
    """The ranks that the first finding names."""
    return frozenset(rank for finding in diagnosis.findings[:1] for rank in finding.ranks)


def stack_sections(diagnosis: Diagnosis) -> Iterator[tuple[str, Iterable[str]]]:
    """Titles and lines of stacks: first those of the ranks that findings name, then the rest, equal ones once."""
    culprits = named_ranks(diagnosis)
    alike: dict[tuple[bool, str, tuple[Frame, ...], tuple[str, ...]], list[int]] = defaultdict(list)
    for facts in diagnosis.job.ranks:
        raised = facts.exception if facts.exception is not None and facts.exception.stack else None
        stack = raised.stack if raised is not None else facts.stack
        native = facts.inspection.native if facts.inspection is not None else ()
        if stack:
            alike[facts.rank not in culprits, raised.type if raised else "", stack, native].append(facts.rank)
    ordered = sorted(alike.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    for (_, type_, stack, native), ranks in ordered[:_MOST_STACKS]:
        lines = chain(_stack_lines(stack), (f"  native: {function}" for function in native))
        yield f"Stack of {ranks_words(ranks)}{f', where {type_} was raised' if type_ else ''}", lines
    if len(ordered) > _MOST_STACKS:
        yield "More stacks", [f"{len(ordered) - _MOST_STACKS} more different stacks are in report.json."]


def _stack_lines(stack: tuple[Frame, ...]) -> Iterator[str]:
    """Outermost first, as Python prints them; the user's own frames are marked."""
    if len(stack) > _MOST_FRAMES:
        yield f"  … {len(stack) - _MOST_FRAMES} outer frames"
    for frame in stack[-_MOST_FRAMES:]:
        mark = ">" if frame.user else " "
        condition = f"   [{under_words(frame.rank_condition)}]" if frame.rank_condition else ""
        shown = frame if frame.user else replace(frame, file=short_path(frame.file))
        yield f"{mark} {location_of(shown)}" + (f": {frame.code}" if frame.code else "") + condition


def short_path(file: str) -> str:
    """A library file without the path to all libraries: ``"torch/serialization.py"``, ``"selectors.py"``."""
    return _INSTALLED.sub("", file.replace("\\", "/"))


def _limited(lines: Iterable[str], count: int) -> Iterator[str]:
    """The first of ``count`` lines, and where the rest is."""
    yield from map(capitalised, islice(lines, _MOST_LINES))
    if count > _MOST_LINES:
        more = count - _MOST_LINES
        yield f"… {more:,} more {'line is' if more == 1 else 'lines are'} in report.json"
