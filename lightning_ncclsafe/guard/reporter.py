"""Reporting to the user: judges the facts of all ranks, writes the report and prints it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.facts import Incident, JobFacts, Phase, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding
from lightning_ncclsafe.facts.frames import ExceptionFacts
from lightning_ncclsafe.report.folder import write_page, write_report
from lightning_ncclsafe.report.json import plan_words
from lightning_ncclsafe.report.text import render_news
from lightning_ncclsafe.rules.expected_waits import (
    announced_for_s,
    busy_for_s,
    expected_for_s,
    saved_together_for_s,
)
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.kit.sentences import exit_status
from lightning_ncclsafe.rules.planning import cannot_go_on, next_start
from lightning_ncclsafe.settings import Limits

_MOST_SHARED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the reporting rank shares with the other ranks about an incident.

    Attributes:
        incident: The incident.
        answer: The report's first line.
        folder: Where the report was written; empty where it could not be.
        is_reported: Whether anything was written or printed; not if all ranks raise the same, or the wait is expected.
        findings: The causes found, the most probable first.
        ends_run: Whether the run cannot continue and must be ended.
        quiet_s: For how many seconds ranks ask nothing more, because what they wait for is expected to take that long;
            then nothing was written or printed. 0 otherwise.
        frozen: Ranks that cannot end themselves: stopped, or with the interpreter's lock held.
        logging_ranks: Ranks with loggers off the training thread: what these were given has to be written first.
        raised: Ranks that leave with their own exception, and print its traceback.
        is_joint: Whether no rank is left that still trains: all have raised the same, or have finished.
        reported_on: Name of the host on whose terminal it was printed.
    """

    incident: Incident
    answer: str
    folder: str = ""
    is_reported: bool = True
    findings: tuple[Finding, ...] = ()
    ends_run: bool = False
    quiet_s: float = 0.0
    frozen: tuple[int, ...] = ()
    logging_ranks: tuple[int, ...] = ()
    raised: tuple[int, ...] = ()
    is_joint: bool = False
    reported_on: str = ""


def hide_reported_errors() -> None:
    """Suppresses the traceback of a ``CollectiveTimeoutError`` that ends the process: it is already reported.

    So the failed rank's traceback is printed last. The exit status does not change.
    """
    if not isinstance(sys.excepthook, _HidesReported):
        sys.excepthook = _HidesReported(sys.excepthook)


@dataclass(frozen=True)
class _HidesReported:
    """A hook for uncaught exceptions that suppresses reported ones."""

    hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CollectiveTimeoutError):
            self.hook(kind, error, trace)


class Reporter:
    """Reports incidents, on the rank that has gathered the facts."""

    def __init__(self, report_dir: Path, limits: Limits, say: Callable[[str], None]) -> None:
        self._report_dir = report_dir
        self._limits = limits
        self._say = say
        self._reported_no_page = False

    def report(self, job: JobFacts, *, known: Verdict | None = None) -> Verdict:
        """Judges, writes and prints, unless the wait is unusual but expected according to the ranks' facts.

        Args:
            known: The verdict on the same incident that a rank has already printed. Only what is new is printed; the
                report is written in full.
        """
        quiet_s = announced_for_s(job) or busy_for_s(job) or saved_together_for_s(job)
        if self._limits.learned and not quiet_s:
            quiet_s = expected_for_s(job, self._limits.limit_s)
        if quiet_s > 0:
            return Verdict(incident=job.incident, answer="", is_reported=False, quiet_s=round(quiet_s, 1))
        if _all_are_done(job):
            return Verdict(incident=job.incident, answer="", is_reported=False, is_joint=True)
        diagnosis = judge(job)
        ends_run = self._limits.on_timeout == "abort" and cannot_go_on(diagnosis)
        folder, where = "", ""
        # If every rank raises the same, no rank waits, and nothing needs an explanation.
        is_joint = _all_raised_alike(job)
        if not is_joint:
            folder, where = self._write(diagnosis)
            start = next_start(diagnosis)
            closing = f"\nnext: {plan_words(start)}" if start is not None else ""
            closing += "\nthe run cannot continue, so the guard ends it" if ends_run else ""
            findings = known.findings if known is not None and known.folder else ()
            self._say(f"{render_news(diagnosis, findings)}\n{where}{closing}")
            self._write_page(diagnosis, folder)
        answer = diagnosis.findings[0].summary if diagnosis.findings else "No cause was found."
        return Verdict(
            incident=job.incident,
            answer=answer,
            folder=folder,
            is_reported=not is_joint,
            # Every rank reads them, and the store limits their size; the report has all.
            findings=diagnosis.findings[:_MOST_SHARED],
            ends_run=ends_run,
            frozen=tuple(
                seen.rank
                for seen in job.witnessed
                if seen.rank in job.silent and (seen.gil_held or seen.state == "stopped")
            ),
            logging_ranks=tuple(facts.rank for facts in job.ranks if facts.loggers),
            raised=tuple(facts.rank for facts in job.ranks if _raises(facts)),
            is_joint=is_joint,
        )

    def _write(self, diagnosis: Diagnosis) -> tuple[str, str]:
        try:
            folder = str(write_report(diagnosis, self._report_dir))
        except OSError as error:
            return "", f"the report could not be written: {error}"
        elsewhere = Path(folder).parent != self._report_dir
        return folder, f"report: {folder}" + (f" (nothing could be written to {self._report_dir})" if elsewhere else "")

    def _write_page(self, diagnosis: Diagnosis, folder: str) -> None:
        """Writes the page, last of all. It is tried for every incident; why there is none is printed once."""
        problem = write_page(diagnosis, Path(folder)) if folder else ""
        if problem and not self._reported_no_page:
            self._reported_no_page = True
            self._say(problem)


def _all_raised_alike(job: JobFacts) -> bool:
    raised = {_where(facts.exception) for facts in job.ranks if facts.exception is not None}
    return len(raised) == 1 and sum(map(_raises, job.ranks)) == job.world_size


def _where(exception: ExceptionFacts) -> tuple[object, ...]:
    """What is the same on ranks that raise alike; without the code of lines, which a rank may not have read in time."""
    return exception.type, *((frame.file, frame.line, frame.function) for frame in exception.stack[-1:])


def _raises(facts: RankFacts) -> bool:
    return facts.exception is not None and not facts.exception.is_consequence


def _all_are_done(job: JobFacts) -> bool:
    """Whether ranks that exit leave a run that has finished on all others, as programs do at their end."""
    left = [facts for facts in job.ranks if facts.exception is not None]
    others = [facts for facts in job.ranks if facts.exception is None]
    in_order = all(facts.exception is not None and exit_status(facts.exception) == 0 for facts in left)
    are_done = others and all(facts.progress.phase is Phase.FINISHED for facts in others)
    return bool(left and in_order and are_done) and not job.silent
