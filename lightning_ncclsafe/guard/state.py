"""What the two threads of one rank's guard share: the main thread, which trains, and the watchdog's."""

import threading

from lightning_ncclsafe.errors import CollectiveTimeoutError
from lightning_ncclsafe.facts import Incident, IncidentKind
from lightning_ncclsafe.guard.reporter import Verdict


class GuardState:
    """What one rank knows of the incident it takes part in, and how far its main thread is on the way out.

    Attributes:
        began_ns: When the guard began to watch, nanoseconds since the epoch.
        open_incident: The incident that is open; None between incidents.
        verdict: The verdict that stands; None while there is none.
        is_ending: Whether this rank is being ended: its verdict stands, and nothing is a recovery any more.
        is_off: Whether the guard has failed or is closed: it neither asks nor answers any more.
        answered: The ranks that took part in the last round before all ranks joined the process group.
        is_leaving: Whether this rank has finished, and is about to leave other ranks behind.
        leaving_is_reported: Set once that has been reported, or never will be.
        exception_is_reported: Set once this rank's exception has been reported, or never will be.
        main_thread_left: Set once the main thread has left the Trainer's function.
    """

    def __init__(self) -> None:
        self.began_ns = 0
        self.open_incident: Incident | None = None
        self.verdict: Verdict | None = None
        self.is_ending = False
        self.is_off = False
        self.answered: set[int] = set()
        self.is_leaving = False
        self.leaving_is_reported = threading.Event()
        self.exception_is_reported = threading.Event()
        self.main_thread_left = threading.Event()

    @property
    def ends_run(self) -> bool:
        """Whether the run cannot go on, and is being ended."""
        return self.verdict is not None and self.verdict.ends_run

    @property
    def limit_is_reported(self) -> bool:
        """Whether the verdict that stands is the one at the hard limit."""
        return self.verdict is not None and self.verdict.incident.kind is IncidentKind.TIMEOUT

    def forget_incident(self) -> None:
        """The incident is over, and its verdict with it; unless that is what this rank is being ended for."""
        if not self.is_ending:
            self.open_incident = self.verdict = None

    def error(self) -> CollectiveTimeoutError:
        """The verdict as an exception; there has to be a verdict."""
        verdict = self.verdict
        assert verdict is not None
        return CollectiveTimeoutError(verdict.answer, findings=verdict.findings, report_folder=verdict.folder)
