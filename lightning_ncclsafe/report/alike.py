"""What is the same on many ranks is told once: ranks that do the same, and findings that differ in their ranks."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from lightning_ncclsafe.facts import Phase
from lightning_ncclsafe.facts.findings import Finding
from lightning_ncclsafe.report.recorded import is_recorded
from lightning_ncclsafe.rules.kit.sentences import batch_words, wait_words
from lightning_ncclsafe.rules.kit.timeline import Timeline
from lightning_ncclsafe.rules.kit.wording import location_of

_Key = tuple[object, ...]


class Alike:
    """What each rank of a job does, in words, and which ranks are alike.

    Args:
        view: The shared answers about the job.
    """

    def __init__(self, view: Timeline) -> None:
        self.view = view

    @cached_property
    def states(self) -> dict[int, str]:
        """``"is in user code"``, ``"waits in broadcast (sequence number 7)"``, ``"raised ValueError"``, ascending.

        Empty where nobody knows.
        """
        return {rank: self._state(rank) for rank in sorted(self.view.facts)}

    def _state(self, rank: int) -> str:
        exception = self.view.facts[rank].exception
        if exception is not None:
            return f"raised {exception.type}"
        doing = self.view.activities[rank]
        if doing.waits_for_peers:
            return f"waits in {wait_words(self.view, rank)}"
        # Of a rank of which only a record was read, nobody knows.
        return f"is in {doing.kind.value}" if self.view.facts[rank].progress.phase is not Phase.UNKNOWN else ""

    def silence(self, rank: int) -> str:
        """``"did not answer; its process is stopped"``: what there is to say of a rank that has said nothing."""
        if is_recorded(self.view.job):
            return "left nothing behind that was read"
        process = self.view.witnesses.get(rank)
        return f"did not answer; {f'its process is {process.state}' if process else 'nobody saw its process'}"

    def groups(self, *, waiting_anywhere: bool = False) -> list[tuple[int, ...]]:
        """The ranks that answered, those that are alike together; ascending by their lowest rank.

        Args:
            waiting_anywhere: Whether ranks that wait in the same are alike also where they do so at different lines.
        """
        alike: dict[_Key, list[int]] = defaultdict(list)
        for rank in self.states:
            alike[self._place(rank, waiting_anywhere)].append(rank)
        return [tuple(ranks) for ranks in alike.values()]

    def _place(self, rank: int, waiting_anywhere: bool) -> _Key:
        doing = self.view.activities[rank]
        line = "" if waiting_anywhere and doing.waits_for_peers else location_of(doing.frame)
        return batch_words(self.view.facts[rank].progress), doing.hook, doing.kind, line, self.states[rank]


# Ranks, processes and amounts are what the same finding on another rank differs in.
_NUMBERS = re.compile(r"(?:\branks? )?\d+(?:(?:, |[-.,:])\d+)*(?:, … \(\d+ ranks\))?")


def told_once(findings: Iterable[Finding]) -> list[tuple[Finding, tuple[int, ...]]]:
    """The findings; those that say the same of different ranks once.

    Returns:
        The first of each, with the other ranks, of which others say the same; none where it stands alone.
    """
    told: list[tuple[Finding, set[int]]] = []
    first_with: dict[_Key, int] = {}
    for finding in findings:
        place = first_with.setdefault(_sentence(finding), len(told))
        # What is said of the same rank twice is not the same.
        if place < len(told) and not {*told[place][0].ranks, *told[place][1]} & {*finding.ranks}:
            told[place][1].update(finding.ranks)
        else:
            told.append((finding, set()))
    return [(finding, tuple(sorted(others))) for finding, others in told]


def _sentence(finding: Finding) -> _Key:
    """All that it says, but for numbers."""
    words = (_NUMBERS.sub("#", text) for text in (finding.summary, finding.remedy))
    return finding.rule, finding.location, finding.confidence, finding.severity, *words
