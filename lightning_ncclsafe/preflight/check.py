"""Compares hosts before training starts: every rank examines its own, rank 0 judges, and all follow its verdict."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning_ncclsafe.errors import HostPreflightError
from lightning_ncclsafe.exchange import Exchange, ExchangeError, poll_interval_s, wait_for_keys
from lightning_ncclsafe.exchange.meeting import Agreed, Meeting
from lightning_ncclsafe.facts import Incident, IncidentKind, JobFacts, LoadFacts, PreflightFacts, RankFacts
from lightning_ncclsafe.facts.findings import Diagnosis, Finding, Severity
from lightning_ncclsafe.probes.process.environment import launch_words
from lightning_ncclsafe.report.folder import IncidentNumbers, write_all
from lightning_ncclsafe.report.tables.preflight import render_preflight
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.preflight import PREFLIGHT_RULES
from lightning_ncclsafe.settings import OnProblem

LOOK_S = 3.0
"""How long a rank may take to examine its host."""

# How long ranks wait for those that take a little longer, or started a little later.
_MEET_S = 10.0
# How long ranks poll for rank 0's clock, and how often: 1,024 ranks a thousand times a second in all.
_CLOCK_S, _CLOCK_POLLS_PER_S, _CLOCK_POLL_S = 5.0, 1000.0, 0.005
_CLOCK = "preflight/clock"

FindingKey = tuple[str, tuple[int, ...], str]
"""Rule, ranks and summary, by which a finding that was printed is known."""


class Preflight:
    """One rank's part.

    Args:
        on_problem: Whether a problem with which the run would fail raises.
        incidents: Numbers of the incidents of this process; None if there are no others.
        printed: What this process has printed before, and does not print again; None if that is nothing.
        says_nothing: Whether to print nothing if nothing is wrong.
    """

    def __init__(
        self,
        look: Callable[[], PreflightFacts],
        *,
        on_problem: OnProblem,
        identity: RankFacts,
        world_size: int,
        report_dir: Path | None,
        say: Callable[[str], None],
        incidents: IncidentNumbers | None = None,
        printed: set[FindingKey] | None = None,
        render: Callable[[Diagnosis], str] = render_preflight,
        says_nothing: bool = True,
    ) -> None:
        self._look = look
        self._on_problem = on_problem
        self._identity = identity
        self._world_size = world_size
        self._report_dir = report_dir
        self._say = say
        self._incidents = incidents or IncidentNumbers()
        self._render = render
        self._says_nothing = says_nothing
        self._printed: set[FindingKey] = set() if printed is None else printed
        self._meeting: Meeting | None = None
        self._found: PreflightFacts | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ncclsafe-preflight", daemon=True)

    def begin(self) -> None:
        """Starts to examine the host, before ranks have connected."""
        self._thread.start()

    def wait(self) -> None:
        """Waits until this rank has examined its host, or its time is over."""
        self._thread.join(LOOK_S + 1)

    def compare(self, exchange: Exchange) -> Agreed:
        """Waits until all ranks have examined their hosts, and compares what they found.

        Raises:
            HostPreflightError: On all ranks, with ``on_problem="raise"``, if there is a problem with which the run
                would fail.
            ExchangeError: If ranks cannot share.
        """
        self.wait()
        why = f": {type(self._error).__name__}: {self._error}" if self._error is not None else ""
        found = self._found or PreflightFacts(missing=(f"no answer within {LOOK_S:g} s{why}",))
        self._found = self._with_clock(exchange, found)
        self._meeting = Meeting(
            exchange=exchange,
            rank=self._identity.rank,
            world_size=self._world_size,
            deadline_s=_MEET_S,
            say=self._say,
            name="preflight",
        )
        return self._meet(self._meeting, self._found)

    def compare_load(self, load: LoadFacts) -> None:
        """Compares again now that the loaders are known, and prints what is new.

        Args:
            load: What the run will need from this rank's host.

        Raises:
            HostPreflightError: See :meth:`compare`.
            ExchangeError: If ranks cannot share.
        """
        if self._meeting is not None and self._found is not None:
            new = {name: value for name in LoadFacts.__slots__ if (value := getattr(load, name)) is not None}
            self._meet(self._meeting, replace(self._found, load=replace(self._found.load, **new)))

    def _meet(self, meeting: Meeting, found: PreflightFacts) -> Agreed:
        agreed = meeting.meet(replace(self._identity, preflight=found, taken_ns=time.time_ns()), self._verdict)
        self._incidents.note(agreed.incident)
        if agreed.error:
            raise HostPreflightError(agreed.error, findings=agreed.findings, report_folder=agreed.folder)
        return agreed

    def _run(self) -> None:
        try:
            self._found = self._look()
        except Exception as error:  # what is missing is reported; the run continues
            self._error = error

    def _with_clock(self, exchange: Exchange, found: PreflightFacts) -> PreflightFacts:
        """Rank 0 publishes its time once all ranks have arrived, and the others compare theirs when they see it."""
        rank, ready = self._identity.rank, [f"preflight/ready/{rank}" for rank in range(self._world_size)]
        if self._world_size == 1:
            return found
        with suppress(ExchangeError):
            exchange.set(ready[rank], b"")
            poll_s = poll_interval_s(self._world_size, least_s=_CLOCK_POLL_S, polls_per_s=_CLOCK_POLLS_PER_S)
            keys = ready if rank == 0 else [_CLOCK]
            seen = wait_for_keys(exchange, keys, deadline_s=_CLOCK_S, poll_s=poll_s)
            now_ns = time.time_ns()
            if rank == 0:
                exchange.set(_CLOCK, str(now_ns).encode())
                return replace(found, clock_offset_s=0.0, clock_error_s=0.0)
            if _CLOCK in seen:
                # It was written at some time since the previous poll.
                ahead_s = (now_ns - int(seen[_CLOCK])) / 1e9
                return replace(found, clock_offset_s=ahead_s - poll_s / 2, clock_error_s=poll_s)
        return found

    def _verdict(self, ranks: tuple[RankFacts, ...]) -> Agreed:
        number = self._incidents.last + 1
        incident = Incident(
            number=number, kind=IncidentKind.PREFLIGHT, opened_by=self._identity.rank, opened_ns=time.time_ns()
        )
        job = JobFacts(incident=incident, world_size=self._world_size, ranks=ranks, launch=launch_words())
        diagnosis = judge(job, PREFLIGHT_RULES)
        is_fatal = any(finding.severity is Severity.ERROR for finding in diagnosis.findings)
        is_refused = is_fatal and self._on_problem == "raise"
        # What is refused is refused each time.
        fresh = [finding for finding in diagnosis.findings if is_refused or _key(finding) not in self._printed]
        self._printed.update(map(_key, fresh))
        diagnosis = replace(diagnosis, findings=tuple(fresh))
        if not diagnosis.findings and self._says_nothing:
            return Agreed(complete=True)
        folder = ""
        if self._report_dir is not None:
            folder = write_all(diagnosis, self._report_dir, self._say, is_refused=is_refused)
        text = self._render(diagnosis)
        if is_refused:
            return Agreed(complete=True, error=text, findings=diagnosis.findings, folder=folder, incident=number)
        self._say(f"{text}\nreport: {folder}" if folder else text)
        return Agreed(complete=True, findings=diagnosis.findings, folder=folder, incident=number)


def _key(finding: Finding) -> FindingKey:
    return finding.rule, finding.ranks, finding.summary
