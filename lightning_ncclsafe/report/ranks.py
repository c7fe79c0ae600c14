"""The ranks of a job side by side: those that are alike share a line, and a stack."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning_ncclsafe.facts import Frame, JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.alike import Alike
from lightning_ncclsafe.rules.kit.sentences import batch_words
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import capitalised, duration_words, location_of, ranks_words

_MAX_LINES = 40
_MAX_STACKS = 12
_MAX_FRAMES = 60


def rank_table(job: JobFacts) -> Iterator[str]:
    """One line for all ranks that stand at the same place; the idle time is given as a range."""
    view = Timeline(job)
    alike = Alike(view)
    groups = alike.groups()
    yield from _limited((_line(alike, ranks) for ranks in groups), len(groups), _MAX_LINES)
    for rank in view.silent[:_MAX_LINES]:
        process = view.witnesses.get(rank)
        seen = f"its process {process.pid} is {process.state}" if process else "and nobody saw its process"
        yield f"rank {rank}: did not answer, {seen}"
    if len(view.silent) > _MAX_LINES:
        yield f"… {len(view.silent) - _MAX_LINES} more did not answer"


def _line(alike: Alike, ranks: tuple[int, ...]) -> str:
    rank, view = ranks[0], alike.view
    doing, facts = view.activities[rank], view.facts[rank]
    idle = sorted(view.facts[number].progress.idle_s for number in ranks)
    span = duration_words(idle[0])
    span += f" to {duration_words(idle[-1])}" if duration_words(idle[-1]) != span else ""
    hook = f", hook {doing.hook}" if doing.hook else ""
    line = f", line {location_of(doing.frame)}" if doing.frame else ""
    where = f"phase {facts.progress.phase.value}, {batch_words(facts.progress)}{hook}"
    return f"{ranks_words(ranks)}: {where}, no progress for {span}{line}; {alike.states[rank]}"


def stack_sections(diagnosis: Diagnosis) -> Iterator[tuple[str, Iterable[str]]]:
    """Titles and lines of stacks: first those of the ranks that findings name, then the rest, equal ones once."""
    culprits = {rank for finding in diagnosis.findings[:1] for rank in finding.ranks}
    alike: dict[tuple[bool, tuple[Frame, ...]], list[int]] = defaultdict(list)
    for facts in diagnosis.job.ranks:
        stack = facts.exception.stack if facts.exception and facts.exception.stack else facts.stack
        if stack:
            alike[(facts.rank not in culprits, stack)].append(facts.rank)
    ordered = sorted(alike.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    for (_, stack), ranks in ordered[:_MAX_STACKS]:
        yield f"Stack of {ranks_words(ranks)}", _stack_lines(stack)
    if len(ordered) > _MAX_STACKS:
        yield "More stacks", [f"{len(ordered) - _MAX_STACKS} more different stacks are in report.json."]


def _stack_lines(stack: tuple[Frame, ...]) -> Iterator[str]:
    """Outermost first, as Python prints them; the user's own frames are marked."""
    if len(stack) > _MAX_FRAMES:
        yield f"  … {len(stack) - _MAX_FRAMES} outer frames"
    for frame in stack[-_MAX_FRAMES:]:
        mark = ">" if frame.user else " "
        condition = f"   [under {frame.rank_condition}]" if frame.rank_condition else ""
        yield f"{mark} {location_of(frame)}" + (f": {frame.code}" if frame.code else "") + condition


def _limited(lines: Iterable[str], count: int, most: int) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == most:
            yield f"… {count - most} more lines are in report.json"
            return
        yield capitalised(line)
