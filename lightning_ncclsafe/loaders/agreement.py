"""Compares what the ranks are about to read; the result is an error on all ranks, a warning, or how epochs end."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_ncclsafe.errors import DatasetMismatchError, UnevenDataError
from lightning_ncclsafe.exchange.meeting import Agreed, Meeting
from lightning_ncclsafe.facts import DataFacts, EpochEnd, Incident, IncidentKind, JobFacts, LoaderFacts, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Evidence, Severity
from lightning_ncclsafe.facts.wording import joined, short_place
from lightning_ncclsafe.loaders.lockstep import BatchesRead, Votes
from lightning_ncclsafe.probes.process.environment import launch_words
from lightning_ncclsafe.report.folder import IncidentNumbers, write_all
from lightning_ncclsafe.report.tables.data import render_mismatch
from lightning_ncclsafe.report.text import render_short
from lightning_ncclsafe.rules.agreement import AGREEMENT_RULES
from lightning_ncclsafe.rules.agreement.batches import (
    different_trainer_settings,
    differing_settings,
    is_refused,
    is_uneven,
    uneven_batches,
    way_on,
)
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.data import (
    HOW_DATA_DIFFERS,
    JobData,
    epoch_batches,
    evaluates_independently,
    runs_independently,
)
from lightning_ncclsafe.settings import OnUneven

LineAt = Callable[[tuple[int, ...]], str]
SetAt = Callable[[Iterable[str]], str]

_OF_DATA = {rule.name for rule in HOW_DATA_DIFFERS if rule.is_of_data}
_HOW_MUCH = "How much of this data a rank has is decided"
_GOES_ON = 'Training continues; DatasetAgreement(on_mismatch="raise") would refuse to start.'


class Agreement:
    """The comparisons of one call of ``fit``, ``validate``, ``test`` or ``predict``, seen from one rank.

    Args:
        meeting: Brings all ranks to one verdict.
        identity: This rank, without data.
        report_dir: The folder of all reports; created with the first one.
    """

    def __init__(
        self,
        *,
        meeting: Meeting,
        world_size: int,
        identity: RankFacts,
        report_dir: Path,
        incidents: IncidentNumbers,
        say: Callable[[str], None],
    ) -> None:
        self._meeting = meeting
        self._world_size = world_size
        self._identity = identity
        self._report_dir = report_dir
        self._incidents = incidents
        self._say = say
        self._reported: set[str] = set()

    def compare(
        self, data: DataFacts, line_at: LineAt = lambda _: "", set_at: SetAt = lambda _: ""
    ) -> tuple[EpochEnd, ...]:
        """Compares this rank's loaders with those of all others; returns how an epoch of each ends.

        Nothing is returned if a rank takes no part.

        Args:
            data: What this rank shares.
            line_at: Called if ranks disagree, with the positions of the loaders whose numbers of batches differ, or
                with none about which data there is; returns the line that decides it, see
                :func:`~lightning_ncclsafe.probes.data.data_line.data_line`.
            set_at: Called with the Trainer's settings that differ; returns the line that gives it them, see
                :func:`~lightning_ncclsafe.probes.trainer.setting_lines.setting_line`.

        Raises:
            DatasetMismatchError: On all ranks, if they disagree.
        """
        verdict = partial(self._verdict, with_places=partial(_with_places, line_at=line_at, set_at=set_at))
        return self._raised(self._meeting.meet(replace(self._identity, data=data), verdict)).ends

    def all_can(self, can: bool) -> bool:
        """Whether every rank can do what all have just tried, given whether this one can."""

        def judge_all(ranks: tuple[RankFacts, ...]) -> Agreed:
            return Agreed(complete=len(ranks) == self._world_size and all(facts.data is not None for facts in ranks))

        facts = replace(self._identity, data=DataFacts(stage="") if can else None)
        return self._meeting.meet(facts, judge_all).complete

    def withdraw(self) -> None:
        """From now on this rank takes no part, and the others compare nothing without it."""
        self._meeting.withdraw(self._identity)

    def uneven(
        self, data: DataFacts, loader: LoaderFacts, readings: list[BatchesRead], ends_at: str = ""
    ) -> UnevenDataError:
        """Reports that some rank's data has ended. All ranks know the same facts and use the same words.

        Args:
            data: What this rank has shared.
            loader: The loader that has ended.
            readings: How many batches of it each rank has read.
            ends_at: The line that decides how much data this rank has; named if it is the same on all ranks.

        Returns:
            The exception to raise if that is an error; otherwise it is reported once.
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
        if len({reading.place for reading in readings}) == 1:
            diagnosis = _with_place(diagnosis, lambda: ends_at, _HOW_MUCH)
        is_error, folder = data.on_uneven == "raise", ""
        if loader.name not in self._reported:
            self._reported.add(loader.name)
            folder = self._write(diagnosis, is_refused=is_error)
            self._incidents.note(diagnosis.job.incident.number)
            if not is_error and self._identity.rank == 0:
                self._say(render_short(diagnosis))
        return UnevenDataError(render_mismatch(diagnosis), findings=diagnosis.findings, report_folder=folder)

    def first_batches(self, data: DataFacts, loader: LoaderFacts, votes: Votes, *digests: int) -> None:
        """Compares the first two batches of all ranks; no two ranks may have the same ones.

        Args:
            data: What this rank has shared.
            votes: How ranks vote.
            digests: Those of this rank's batches; 0 where there is none.

        Raises:
            DatasetMismatchError: On all ranks, if two ranks read the same data.
        """
        ranks = []
        for rank, (data_rank, *theirs) in enumerate(votes.gather(data.data_rank, *digests)):
            # Batches that equal each other are synthetic, for a benchmark for instance, and prove nothing.
            differ = all(theirs) and len(set(theirs)) == len(theirs)
            fingerprints = {"first batches": "".join(f"{digest:016x}" for digest in theirs)} if differ else {}
            loaders = (replace(_alike(loader), fingerprints=fingerprints),)
            its_data = replace(data, data_rank=data_rank, loaders=loaders)
            ranks.append(RankFacts(rank=rank, progress=self._identity.progress, data=its_data))
        self._raised(self._verdict(tuple(ranks)))

    def _raised(self, agreed: Agreed) -> Agreed:
        self._incidents.note(agreed.incident)
        if agreed.error:
            raise DatasetMismatchError(agreed.error, findings=agreed.findings, report_folder=agreed.folder)
        return agreed

    def _verdict(
        self, ranks: tuple[RankFacts, ...], with_places: Callable[[Diagnosis], Diagnosis] = lambda same: same
    ) -> Agreed:
        data = [facts.data for facts in ranks if facts.data is not None]
        if len(data) < len(ranks):
            return Agreed()  # the rank that takes no part has reported why
        is_complete = len(ranks) == self._world_size
        job = self._job(ranks)
        diagnosis = judge(job, AGREEMENT_RULES)
        if is_complete and any(is_refused(finding, job) for finding in diagnosis.findings):
            diagnosis = _with_way_on(with_places(diagnosis))
            folder = self._write(diagnosis, is_refused=True)
            return Agreed(
                complete=True,
                error=render_mismatch(diagnosis),
                findings=diagnosis.findings,
                folder=folder,
                incident=diagnosis.job.incident.number,
            )
        return Agreed(
            complete=is_complete,
            findings=diagnosis.findings,
            incident=self._warn(diagnosis, with_places) if diagnosis.findings else 0,
            ends=epoch_ends(data) if is_complete else (),
        )

    def _warn(self, diagnosis: Diagnosis, with_places: Callable[[Diagnosis], Diagnosis]) -> int:
        """Warns once, even where every epoch creates new loaders whose data differs in another way.

        Where only what would hang is refused, anything else is not an incident and gets no report.

        Returns:
            The incident's number; 0 without one.
        """
        loaders = [loader.name for facts in diagnosis.job.ranks[:1] if facts.data for loader in facts.data.loaders]
        about = " ".join([*loaders, *sorted(finding.rule for finding in diagnosis.findings)])
        if about in self._reported:
            return 0
        self._reported.add(about)
        policies = {facts.data.on_mismatch for facts in diagnosis.job.ranks if facts.data}
        is_incident = policies != {"raise_on_hang"}
        if self._identity.rank == 0:
            is_error = any(finding.severity is Severity.ERROR for finding in diagnosis.findings)
            diagnosis = with_places(diagnosis)
            lines = [render_mismatch(diagnosis)]
            lines += [_GOES_ON] if is_error else []
            lines += [f"report: {self._write(diagnosis)}"] if is_incident else []
            self._say("\n".join(lines))
        return diagnosis.job.incident.number if is_incident else 0

    def _job(self, ranks: tuple[RankFacts, ...]) -> JobFacts:
        incident = Incident(
            number=self._incidents.last + 1,
            kind=IncidentKind.DATA,
            opened_by=self._identity.rank,
            opened_ns=time.time_ns(),
        )
        return JobFacts(incident=incident, world_size=self._world_size, ranks=ranks, launch=launch_words())

    def _write(self, diagnosis: Diagnosis, *, is_refused: bool = False) -> str:
        if self._identity.rank != 0:
            return ""
        folder = write_all(diagnosis, self._report_dir, self._say, is_refused=is_refused)
        if is_refused and folder:
            # A launcher may end this rank, whose exception has the folder, as soon as another one has raised.
            self._say(f"report: {folder}")
        return folder


def _with_places(diagnosis: Diagnosis, line_at: LineAt, set_at: SetAt) -> Diagnosis:
    """Adds the lines that decide how many batches there are, which data, or a setting, to findings about that."""
    view = JobData(diagnosis.job)
    settings, uneven = differing_settings(view), tuple(one.index for one in view.loaders if is_uneven(one))
    of_settings = {different_trainer_settings.name}
    diagnosis = _with_place(diagnosis, lambda: set_at(settings) if settings else "", "This value is set", of_settings)
    diagnosis = _with_place(diagnosis, lambda: line_at(uneven) if uneven else "", _HOW_MUCH, {uneven_batches.name})
    return _with_place(diagnosis, lambda: line_at(()), "This data is made")


def _with_place(
    diagnosis: Diagnosis, find: Callable[[], str], words: str, rules: Collection[str] = _OF_DATA
) -> Diagnosis:
    """Adds a line to findings of these rules that have none; all ranks run the same source."""
    about_it = [one for one in diagnosis.findings if one.rule in rules and not one.location]
    place = find() if about_it else ""
    if not place:
        return diagnosis
    evidence = Evidence(source="source code", text=f"{words} at {place}.")
    text = f"{words} at {short_place(place)}."
    findings = tuple(
        replace(one, location=place, summary=joined((one.summary, text)), evidence=(*one.evidence, evidence))
        if one in about_it
        else one
        for one in diagnosis.findings
    )
    return replace(diagnosis, findings=findings)


def _with_way_on(diagnosis: Diagnosis) -> Diagnosis:
    """Adds to an error how to train anyway."""
    way = way_on(diagnosis.findings, diagnosis.job)
    findings = (
        replace(finding, remedy=joined((finding.remedy, way))) if finding.severity is Severity.ERROR else finding
        for finding in diagnosis.findings
    )
    return replace(diagnosis, findings=tuple(findings))


def _alike(loader: LoaderFacts) -> LoaderFacts:
    """The facts of this rank as those of all others: everything that may differ has been compared before."""
    return LoaderFacts(
        name=loader.name,
        loader=loader.loader,
        dataset=loader.dataset,
        datasets=loader.datasets,
        iterable=loader.iterable,
    )


def epoch_ends(ranks: Iterable[DataFacts]) -> tuple[EpochEnd, ...]:
    """How an epoch of each loader of a stage ends: whether ranks vote on it, and whether its length changes.

    Empty if ranks have different numbers of loaders.
    """
    data = list(ranks)
    if not data or len({len(one.loaders) for one in data}) != 1:
        return ()
    # When they predict, and mostly when they evaluate, ranks are independent and may end at any batch.
    lengths_are_known = all(loader.length is not None for one in data for loader in one.loaders)
    ends_together = lengths_are_known and len({epoch_batches(one) for one in data}) == 1
    if all(map(runs_independently, data)) or ends_together:
        return tuple(EpochEnd() for _ in data[0].loaders)
    on_uneven = data[0].on_uneven
    ends_independently = all(map(evaluates_independently, data))
    return tuple(
        _epoch_end(each, on_uneven, ends_independently) for each in zip(*(one.loaders for one in data), strict=True)
    )


def _epoch_end(loaders: tuple[LoaderFacts, ...], on_uneven: OnUneven | str, ends_independently: bool) -> EpochEnd:
    lengths = tuple(loader.length for loader in loaders)
    known = tuple(length for length in lengths if length is not None)
    if len(known) == len(lengths) and len(set(known)) == 1:
        return EpochEnd()
    agreed = {"stop_together": min, "repeat": max}.get(on_uneven)
    length = agreed(known) if agreed is not None and len(known) == len(lengths) else None
    if any(loader.iterable for loader in loaders) or len(known) < len(lengths):
        return EpochEnd(
            votes=True,
            looks_ahead=all(loader.made_by_workers for loader in loaders),
            ends_independently=ends_independently,
            length=length,
            hides_length=length is None and bool(known),
        )
    if length is not None:
        return EpochEnd(length=length)
    # One more than the shortest rank has: asking for that one, all ranks reach the end.
    return EpochEnd(length=min(known) + 1, ends_at=min(known), lengths=known)
