"""Compares what the ranks are about to read: rank 0 has the facts of all, judges them, and tells one verdict to all."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lightning_ncclsafe import codec
from lightning_ncclsafe.data_facts import DataFacts, LoaderFacts
from lightning_ncclsafe.errors import DatasetMismatchError, UnevenDataError
from lightning_ncclsafe.exchange import Exchange, ExchangeError
from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts, RankFacts
from lightning_ncclsafe.findings import Diagnosis, Finding, Severity
from lightning_ncclsafe.loaders.lockstep import Reading, Votes
from lightning_ncclsafe.loaders.terms import LoaderTerms, terms_of
from lightning_ncclsafe.report.data_table import render_mismatch
from lightning_ncclsafe.report.folder import write_report
from lightning_ncclsafe.report.text import render_short
from lightning_ncclsafe.rules import AGREEMENT_RULES, judge

T = TypeVar("T")

# Ranks come within a millisecond or so of each other, as Lightning has just let them wait for all.
_SHORTEST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
# What the other ranks wait longer than rank 0, which tells them who is missing.
_VERDICT_S = 10.0
# What ranks that have missed a comparison are given at the next one.
_ABSENT_S = 1.0
# With these there is no going on: ranks would call different collectives next.
_ALWAYS_RAISED = frozenset({"loader-count", "settings-disagreement"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """What one rank publishes. The number tells this comparison from the one before, which used the same key."""

    number: int
    facts: RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What rank 0 tells all ranks.

    Attributes:
        number: Which comparison it is about, from 1.
        error: The text of what is to be raised; empty where ranks agree, or go on all the same.
        findings: What differs, the most telling first.
        folder: Where the report is; empty where none was written.
        terms: What follows for each loader.
    """

    number: int
    error: str = ""
    findings: tuple[Finding, ...] = ()
    folder: str = ""
    terms: tuple[LoaderTerms, ...] = ()


class Agreement:
    """The comparisons of one call of ``fit``, ``validate``, ``test`` or ``predict``, seen from one rank.

    Args:
        exchange: What the ranks share.
        world_size: Number of ranks.
        identity: Who this rank is.
        report_dir: The folder of all reports; made when there is one.
        deadline_s: Seconds after which ranks that have not presented their loaders are named, and the others go on.
            The guard has asked before what they do instead, and ended the run if they can never come; one that still
            does not come has lost its own guard, and a comparison that fails must not hold up the run.
        say: Prints one or more lines to the user.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        world_size: int,
        identity: RankFacts,
        report_dir: Path,
        deadline_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._exchange = exchange
        self._world_size = world_size
        self._identity = identity
        self._report_dir = report_dir
        self._deadline_s = deadline_s
        self._say = say
        self._number = 0
        self._said: set[str] = set()
        self._absent: set[int] = set()
        self._last: dict[int, bytes] = {}

    def compare(self, data: DataFacts | None) -> tuple[LoaderTerms, ...]:
        """Presents this rank's loaders, waits for all other ranks', and returns what follows for each loader.

        Args:
            data: What this rank is about to read; None where it could not be found out, and then nothing is compared.

        Raises:
            DatasetMismatchError: On all ranks, if they disagree.
            ExchangeError: If ranks cannot share.
        """
        self._number += 1
        mine = Presented(number=self._number, facts=replace(self._identity, data=data))
        # The same key every time, so that loaders that are made anew each epoch do not fill the store: a rank comes
        # here again only after rank 0 has read what it wrote before.
        self._keep_trying(lambda: self._exchange.set(f"data/{self._identity.rank}", codec.encode(mine)))
        agreed = self._tell_all() if self._identity.rank == 0 else self._await_verdict()
        if agreed.error:
            raise DatasetMismatchError(agreed.error, findings=agreed.findings, report_folder=agreed.folder)
        return agreed.terms

    def uneven(self, data: DataFacts, loader: LoaderFacts, readings: list[Reading]) -> UnevenDataError:
        """The data of some rank has ended. All ranks know the same, and come to the same words.

        Args:
            data: What this rank has presented.
            loader: The loader that has ended.
            readings: How far each rank has come with it.

        Returns:
            What to raise where that is an error; where it is not, it is said once.
        """
        ranks = tuple(
            RankFacts(
                rank=rank,
                progress=self._identity.progress,
                data=replace(data, loaders=(replace(_alike(loader), read=reading.batches, ended=reading.ended),)),
            )
            for rank, reading in enumerate(readings)
        )
        diagnosis = judge(self._job(ranks), AGREEMENT_RULES)
        is_error, is_first = data.on_uneven == "raise", loader.name not in self._said
        self._said.add(loader.name)
        folder = self._write(diagnosis) if is_first else ""
        if not is_error and is_first and self._identity.rank == 0:
            self._say(render_short(diagnosis))
        return UnevenDataError(render_mismatch(diagnosis), findings=diagnosis.findings, report_folder=folder)

    def first_batches(self, data: DataFacts, loader: LoaderFacts, votes: Votes, *digests: int) -> None:
        """All ranks have their first two batches: those of two ranks must not be the same.

        Args:
            data: What this rank has presented.
            loader: The loader that is read.
            votes: What ranks vote with.
            digests: Of this rank's batches; 0 where one has none.

        Raises:
            DatasetMismatchError: On all ranks, if ranks read the same.
        """
        ranks = []
        for rank, (data_rank, *theirs) in enumerate(votes.gather(data.data_rank, *digests)):
            # Batches that are alike among themselves are made up, to measure speed for instance, and say nothing.
            tells = all(theirs) and len(set(theirs)) == len(theirs)
            fingerprints = {"first batches": "".join(f"{digest:016x}" for digest in theirs)} if tells else {}
            loaders = (replace(_alike(loader), fingerprints=fingerprints),)
            its_data = replace(data, data_rank=data_rank, loaders=loaders)
            ranks.append(RankFacts(rank=rank, progress=self._identity.progress, data=its_data))
        agreed = self._verdict(self._job(tuple(ranks)))
        if agreed.error:
            raise DatasetMismatchError(agreed.error, findings=agreed.findings, report_folder=agreed.folder)

    def _tell_all(self) -> Agreed:
        agreed = Agreed(number=self._number)
        try:
            agreed = self._verdict(self._gather())
        finally:
            # The others wait for a word, also where there is none to say.
            agreed = self._settle(agreed)
        if self._number > 1:
            self._keep_trying(lambda: self._exchange.set(self._verdict_key(self._number - 1), b""))
        return agreed

    def _settle(self, agreed: Agreed) -> Agreed:
        """What all ranks go by: this, unless another one has been faster."""
        stands = [codec.encode(agreed)]

        def settle() -> None:
            stands[0] = self._exchange.set_if_absent(self._verdict_key(self._number), stands[0])

        self._keep_trying(settle)
        return codec.decode(Agreed, stands[0])

    @staticmethod
    def _verdict_key(number: int) -> str:
        return f"data/verdict/{number}"

    def _gather(self) -> JobFacts:
        found: dict[int, RankFacts] = {}
        missing = set(range(self._world_size))

        def all_are_there() -> bool:
            answers = self._exchange.get_many(f"data/{rank}" for rank in sorted(missing))
            for rank in [*missing]:
                answer = answers.get(f"data/{rank}")
                # Most often it is still that of the comparison before; to decode it takes a fifth of a millisecond.
                if answer is None or answer == self._last.get(rank):
                    continue
                self._last[rank] = answer
                presented = codec.decode(Presented, answer)
                if presented.number == self._number:
                    found[rank] = presented.facts
                    missing.discard(rank)
            return not missing

        # Who has not come once is not waited for as long again.
        self._wait_until(all_are_there, _ABSENT_S)
        if missing - self._absent:
            self._wait_until(all_are_there, self._deadline_s)
        self._absent = missing
        return self._job(tuple(found[rank] for rank in sorted(found)))

    def _verdict(self, job: JobFacts) -> Agreed:
        data = [facts.data for facts in job.ranks if facts.data is not None]
        if len(data) < len(job.ranks):
            return Agreed(number=self._number)  # the rank that could not present its loaders has said why
        diagnosis = judge(job, AGREEMENT_RULES)
        if not diagnosis.findings:
            return Agreed(number=self._number, terms=terms_of(data))
        folder = self._write(diagnosis)
        if job.silent:
            self._warn(diagnosis, folder)
            return Agreed(number=self._number)
        if any(_is_raised(finding, data) for finding in diagnosis.findings):
            error = render_mismatch(diagnosis)
            return Agreed(number=self._number, error=error, findings=diagnosis.findings, folder=folder)
        self._warn(diagnosis, folder)
        return Agreed(number=self._number, findings=diagnosis.findings, folder=folder, terms=terms_of(data))

    def _warn(self, diagnosis: Diagnosis, folder: str) -> None:
        text = render_mismatch(diagnosis)
        if self._identity.rank == 0 and text not in self._said:
            self._said.add(text)
            self._say(f"{text}\nreport: {folder}")

    def _await_verdict(self) -> Agreed:
        found: list[bytes] = []
        key = self._verdict_key(self._number)

        def is_there() -> bool:
            found.extend(self._exchange.get_many([key]).values())
            return bool(found)

        if self._wait_until(is_there, self._deadline_s + _VERDICT_S):
            return codec.decode(Agreed, found[0])
        rank = self._identity.rank
        self._say(f"rank {rank}: rank 0 has not compared the ranks' data within {self._deadline_s:g} s; going on")
        # Should rank 0 come yet, it has to go by the same.
        return self._settle(Agreed(number=self._number))

    def _job(self, ranks: tuple[RankFacts, ...]) -> JobFacts:
        incident = Incident(
            number=self._number, kind=IncidentKind.DATA, opened_by=self._identity.rank, opened_ns=time.time_ns()
        )
        return JobFacts(incident=incident, world_size=self._world_size, ranks=ranks)

    def _write(self, diagnosis: Diagnosis) -> str:
        if self._identity.rank != 0:
            return ""
        try:
            return str(write_report(diagnosis, self._report_dir))
        except OSError as error:
            self._say(f"the report could not be written: {error}")
            return ""

    def _wait_until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Asks again and again, ever more rarely."""
        give_up, poll_s = time.monotonic() + limit_s, _SHORTEST_POLL_S
        while True:
            with suppress(_Busy):
                if self._once(is_done):
                    return True
            if time.monotonic() > give_up:
                return False
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.5, _LONGEST_POLL_S)

    def _keep_trying(self, call: Callable[[], None]) -> None:
        def done() -> bool:
            call()
            return True

        if not self._wait_until(done, self._deadline_s):
            call()

    def _once(self, call: Callable[[], T]) -> T:
        """An exchange that has missed one deadline may answer the next time."""
        try:
            return call()
        except ExchangeError as error:
            if self._exchange.lost:
                raise
            raise _Busy from error


def _alike(loader: LoaderFacts) -> LoaderFacts:
    """What other ranks can be taken to have in common with this one: all that could differ has been compared before."""
    return LoaderFacts(
        name=loader.name, loader=loader.loader, dataset=loader.dataset, datasets=loader.datasets, iterable=True
    )


class _Busy(Exception):
    """The exchange has not answered this time."""


def _is_raised(finding: Finding, ranks: list[DataFacts]) -> bool:
    if finding.rule in _ALWAYS_RAISED:
        return True
    return finding.severity is Severity.ERROR and any(data.on_mismatch == "raise" for data in ranks)
