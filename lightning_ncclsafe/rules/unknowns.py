"""What the facts cannot tell, so that a report does not claim more than it knows."""

from collections import defaultdict
from collections.abc import Iterator

from lightning_ncclsafe.facts import IncidentKind, JobFacts
from lightning_ncclsafe.rules.recorded.unknowns import recorded_unknowns
from lightning_ncclsafe.rules.timeline import Timeline, timeline
from lightning_ncclsafe.rules.wording import capitalised, ranks_words, verb


def unknowns(job: JobFacts) -> tuple[str, ...]:
    """What these facts cannot tell, one sentence each."""
    view = timeline(job)
    if job.incident.kind in (IncidentKind.DATA, IncidentKind.PREFLIGHT):
        # Nobody waits yet: there is no recorder to ask, and a rank that did not take part is a finding.
        return (*job.missing, *_missing(view))
    if job.incident.kind is IncidentKind.RECORDED:
        return (*job.missing, *recorded_unknowns(job), *_device_state(view))
    return (
        *_silence(view),
        *_recorder(view),
        *job.missing,
        *_missing(view),
        *_device_state(view),
    )


def _silence(view: Timeline) -> Iterator[str]:
    if not view.facts and view.silent:
        yield "No rank answered, so nothing is known about any of them."
    elif view.silent:
        names = ranks_words(view.silent)
        yield f"{capitalised(names)} did not answer: what {verb(view.silent, 'it does', 'they do')} is not known."


def _recorder(view: Timeline) -> Iterator[str]:
    without = tuple(sorted(rank for rank, facts in view.facts.items() if not facts.groups))
    if without and len(view.facts) + len(view.silent) > 1:
        names = capitalised(ranks_words(without))
        yield f"{names} gave no Flight Recorder data: who is behind is judged by stacks alone."
    lost = [rank for rank in view.facts if _has_lost(view, rank)]
    if lost:
        yield (
            f"The Flight Recorder of {ranks_words(lost)} has lost the entry of an outstanding collective: set "
            "TORCH_FR_BUFFER_SIZE higher to keep more."
        )


def _has_lost(view: Timeline, rank: int) -> bool:
    recorded = {entry.group for entry in view.facts[rank].collectives}
    groups = view.facts[rank].groups
    return any(group.last_enqueued > max(group.last_completed, 0) and group.name not in recorded for group in groups)


def _device_state(view: Timeline) -> Iterator[str]:
    backends = {doing.collective.backend for doing in view.activities.values() if doing.collective is not None}
    if "gloo" in backends:
        yield "Gloo does not say whether a collective has started, only that it was called and whether it has ended."


def _missing(view: Timeline) -> Iterator[str]:
    """Ranks that miss the same are named together."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, facts in sorted(view.facts.items()):
        for text in (*facts.missing, *(facts.preflight.missing if facts.preflight is not None else ())):
            by_text[text].append(rank)
    for text, ranks in by_text.items():
        yield f"{capitalised(ranks_words(ranks))}: {text}"
