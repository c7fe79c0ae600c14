"""A diagnosis in words: ``report.txt`` in full, and the few lines that go to the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_ncclsafe.facts import STORE_UNUSABLE, Incident, IncidentKind, JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Evidence, Finding
from lightning_ncclsafe.facts.wording import duration_words, ranks_words
from lightning_ncclsafe.report.json import plan_words
from lightning_ncclsafe.report.lines import WIDTH, cut, moment_words, safe, section, wrapped
from lightning_ncclsafe.report.ranks import (
    NOTHING,
    inspected_answer,
    inspected_words,
    named_ranks,
    rank_table,
    recorded_table,
    recorded_words,
    sampled_table,
    stack_sections,
    without_repeats,
)
from lightning_ncclsafe.report.tables.data import data_table
from lightning_ncclsafe.report.tables.preflight import preflight_table
from lightning_ncclsafe.rules.kit.sentences import batch_words
from lightning_ncclsafe.rules.kit.silent_ranks import is_gone
from lightning_ncclsafe.rules.kit.timeline import timeline
from lightning_ncclsafe.rules.planning import next_start

_SHORT_EVIDENCE = 3
_LEGEND = "(Outermost call first. > marks your own code.)"

_OPENINGS = {
    IncidentKind.SUSPECT: "made no progress for {idle}",
    IncidentKind.EXCEPTION: "raised an exception",
    IncidentKind.TIMEOUT: "made no progress for {idle}, the limit",
}

_NOTHING = {
    IncidentKind.DATA: "Nothing found: the ranks' data agrees.",
    IncidentKind.PREFLIGHT: "Nothing found: nothing is wrong with the ranks' hosts.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was observed alike on some ranks.

    Attributes:
        source: Where it comes from.
        text: The observation in words.
        ranks: The ranks it was made on; empty if it is about several.
    """

    source: str
    text: str
    ranks: tuple[int, ...]


def render_text(diagnosis: Diagnosis, width: int = WIDTH) -> str:
    """The whole report. Its first line is the answer; its length does not grow with ranks that are alike.

    Args:
        width: Characters on a line of a paragraph. The answer is one line, of any length.
    """
    parts = [
        safe(answer_words(diagnosis)),
        wrapped(" ".join([incident_words(diagnosis), *_when_and_what(diagnosis)]), width=width),
        *([wrapped(f"Next: {plan_words(start)}.", width=width)] if (start := next_start(diagnosis)) else ()),
        *(_finding(number, *entry, width) for number, entry in enumerate(without_repeats(diagnosis.findings), 1)),
        *_all_ranks(diagnosis, width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _all_ranks(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """The sections on all ranks. Ranks that were only compared do not hang, so their stacks mean nothing."""
    hangs = not diagnosis.job.is_compared
    if hangs:
        job, named = diagnosis.job, named_ranks(diagnosis)
        table = recorded_table(job, named, as_list=True) if job.is_recorded else rank_table(job, named)
        yield section("All ranks", table, width=width)
    if diagnosis.job.is_inspected:
        yield section("Where they were at each look", sampled_table(diagnosis.job), width=width)
    yield section("The data of all ranks", data_table(diagnosis.job), wrap=False)
    yield section("The hosts of all ranks", preflight_table(diagnosis.job), wrap=False)
    yield section("What these facts cannot tell", (f"- {line}" for line in diagnosis.unanswered), width=width)
    if hangs:
        stacks = [section(title, lines, wrap=False) for title, lines in stack_sections(diagnosis)]
        # A legend, which only the first stack needs.
        yield from (stack if number else f"{stack}\n{_LEGEND}" for number, stack in enumerate(stacks))


def render_short(diagnosis: Diagnosis) -> str:
    """The answer, why it is believed and what to do, in a dozen lines at most, very long ones cut."""
    return "\n".join(map(cut, answer_lines(diagnosis)))


def answer_lines(diagnosis: Diagnosis) -> list[str]:
    """The answer, why it is believed and what to do, in a dozen lines at most."""
    lines = [answer_words(diagnosis)]
    distinct = without_repeats(diagnosis.findings)
    for finding, alike in distinct[:1]:
        lines += [f"  same for: {ranks_words(alike)}"] if alike else []
        lines += [f"  where: {finding.location}"] if finding.location else []
        lines += [f"  decided: {finding.decided_at}"] if _is_decided_elsewhere(finding) else []
        lines += [f"  because: {_evidence_words(item)}" for item in _telling(observed(finding.evidence))]
        lines.append(f"  remedy: {finding.remedy}")
    if distinct[1:]:
        also = "also found" if diagnosis.job.is_compared else "also possible"
        others = (f"{item.rule} ({ranks_words((*item.ranks, *alike))})" for item, alike in distinct[1:4])
        lines.append(f"  {also}: {', '.join(others)}")
    lines += [f"  not known: {line}" for line in _gaps(diagnosis)[:1]]
    return [safe(line) for line in lines]


def _gaps(diagnosis: Diagnosis) -> list[str]:
    """What this report lacks. The file also has what every report of this back end lacks."""
    job = diagnosis.job
    view = timeline(job)
    gone = {rank for rank in view.silent if is_gone(view, rank)}
    # Without the process that had the job's store, nobody can use it: that only follows.
    follows = {line for line in job.missing if gone and line.startswith(STORE_UNUSABLE)}
    lacks = bool({*view.silent} - gone or {*job.missing} - follows)
    return [line for line in diagnosis.unanswered if line not in follows] if lacks else []


def render_news(diagnosis: Diagnosis, known: Sequence[Finding]) -> str:
    """What is new to a reader of an earlier report on the same incident.

    Args:
        known: The causes that were reported, the most probable first.

    Returns:
        A few lines if the most probable cause is the same; else :func:`render_short`.
    """
    findings = diagnosis.findings
    if not findings or not known or _cause(findings[0]) != _cause(known[0]):
        return render_short(diagnosis)
    first, incident = findings[0], diagnosis.job.incident
    limit = ", the limit" if incident.kind is IncidentKind.TIMEOUT else ""
    place = f" at {first.location}" if first.location else ""
    lines = [f"still {first.rule} after {duration_words(incident.idle_s)}{limit}: {ranks_words(first.ranks)}{place}"]
    known_causes = {*map(_cause, known)}
    for item, alike in without_repeats(item for item in findings if _cause(item) not in known_causes):
        likewise = f" The same for {ranks_words(alike)}." if alike else ""
        lines.append(f"  also possible now: {item.rule}: {item.summary}{likewise}")
    return "\n".join(safe(cut(line)) for line in lines)


def answer_words(diagnosis: Diagnosis) -> str:
    """The first cause with its name, or that nothing was found."""
    if diagnosis.findings:
        first = diagnosis.findings[0]
        return f"{first.rule}: {first.summary}"
    return nothing_found(diagnosis)


def nothing_found(diagnosis: Diagnosis) -> str:
    """The answer if no rule found anything."""
    ranks = diagnosis.job.ranks
    if diagnosis.job.is_compared:
        return _NOTHING[diagnosis.job.incident.kind]
    if diagnosis.job.is_recorded:
        return NOTHING
    if diagnosis.job.is_inspected:
        return inspected_answer(diagnosis.job)
    if not ranks:
        return "Nothing found: no rank answered."
    where = sorted({batch_words(facts.progress) for facts in ranks})
    more = f" and {len(where) - 2} more places" if len(where) > 2 else ""
    names = ranks_words(facts.rank for facts in ranks)
    return f"Nothing found: no rank waits for another; {names} at work: {'; '.join(where[:2])}{more}."


def incident_words(diagnosis: Diagnosis) -> str:
    """Why ranks were asked, how many of them answered, and the limits that applied."""
    incident, job = diagnosis.job.incident, diagnosis.job
    if diagnosis.job.is_compared:
        return f"Incident {incident.number}: {_compared_words(job)}."
    if job.is_recorded:
        return recorded_words(job)
    if job.is_inspected:
        return inspected_words(job)
    opening = _OPENINGS[incident.kind].format(idle=duration_words(incident.idle_s))
    return (
        f"Incident {incident.number}: rank {incident.opened_by} {opening}. {len(job.ranks):,} of {job.world_size:,} "
        f"ranks answered.{_limits(incident)}"
    )


def _when_and_what(diagnosis: Diagnosis) -> list[str]:
    """When ranks were asked, and in which job: ``["That was on 27 November 2026, 15:52:12 UTC."]``."""
    job = diagnosis.job
    when = moment_words(job.incident.opened_ns)
    if job.is_recorded:
        return [f"The last call that was recorded was made on {when}."] if when else []
    parts = [*([f"on {when}"] if when else ()), *([f"in {job.launch}"] if job.launch else ())]
    return [f"That was {', '.join(parts)}."] if parts else []


def _limits(incident: Incident) -> str:
    if not incident.timeout_s:
        return ""
    suspect, limit = duration_words(incident.suspect_after_s), duration_words(incident.timeout_s)
    return f" A rank is suspect after {suspect}; the limit is {limit}."


def _compared_words(job: JobFacts) -> str:
    """``"all 4 ranks presented their train_dataloader"``, ``"3 of 4 ranks checked their hosts"``."""
    if job.incident.kind is IncidentKind.PREFLIGHT:
        checked = sum(facts.preflight is not None for facts in job.ranks)
        return _all_or_some(checked, job.world_size, "checked its host", "checked their hosts")
    stages = [facts.data.stage for facts in job.ranks if facts.data is not None]
    what = max(stages, key=stages.count, default="data")
    return _all_or_some(len(stages), job.world_size, f"presented its {what}", f"presented their {what}")


def _all_or_some(done: int, world_size: int, one: str, many: str) -> str:
    if done < world_size:
        return f"{done:,} of {world_size:,} ranks {many}"
    return f"the only rank {one}" if done == 1 else f"all {done:,} ranks {many}"


def _cause(finding: Finding) -> tuple[str, tuple[int, ...]]:
    return finding.rule, finding.ranks


def _finding(number: int, finding: Finding, alike: tuple[int, ...], width: int) -> str:
    title = (
        f"{number}. {finding.rule} ({finding.confidence.value}, {finding.severity.value}), {ranks_words(finding.ranks)}"
    )
    lines = [wrapped(finding.summary, "   ", width)]
    if alike:
        lines.append(wrapped(f"The same was found for {ranks_words(alike)}; report.json lists each.", "   ", width))
    lines += [f"   Where: {safe(finding.location)}"] if finding.location else []
    lines += [f"   Decided: {safe(finding.decided_at)}"] if _is_decided_elsewhere(finding) else []
    if finding.evidence:
        lines.append("   How we know:")
        lines += [wrapped(f"- {_evidence_words(item)}", "   ", width) for item in observed(finding.evidence)]
    lines += ["   What to do:", wrapped(finding.remedy, "   ", width)]
    return "\n".join([safe(title), *lines])


def observed(evidence: Iterable[Evidence]) -> list[Observed]:
    """The evidence in its order, equal observations once."""
    alike: dict[tuple[str, str], list[int]] = {}
    for item in evidence:
        ranks = alike.setdefault((item.source, item.text), [])
        ranks += [item.rank] if item.rank is not None else []
    return [Observed(source=source, text=text, ranks=tuple(ranks)) for (source, text), ranks in alike.items()]


def _is_decided_elsewhere(finding: Finding) -> bool:
    return finding.decided_at not in ("", finding.location)


def _evidence_words(evidence: Observed) -> str:
    ranks = f", {ranks_words(evidence.ranks)}" if evidence.ranks else ""
    return f"[{evidence.source}{ranks}] {evidence.text}"


def _telling(evidence: Sequence[Observed]) -> tuple[Observed, ...]:
    """The first of each source: a terminal has no room for every rank's. The phase is in the answer itself."""
    first: dict[str, Observed] = {}
    for item in evidence:
        if item.source != "phase" or len(evidence) == 1:
            first.setdefault(item.source, item)
    return tuple(first.values())[:_SHORT_EVIDENCE]
