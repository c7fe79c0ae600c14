"""Writes reports: one folder per incident, private to the user.

``report.json``, ``report.txt`` and, if the run is over, ``plan.json`` come first. The page takes longer, and nothing
else is lost if it fails.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TypeVar

from lightning_ncclsafe.code.side_thread import NoThreadError, SideThread, UnansweredError
from lightning_ncclsafe.facts import Incident
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.json import PLAN_FILE, plan_json, report_json
from lightning_ncclsafe.report.text import render_text
from lightning_ncclsafe.rules.planning import next_start

T = TypeVar("T")

# Other ranks wait until the page is done, and with more ranks it would take longer: this is the time that it has.
_MOST_S = 3.0
_MOST_RANKS = 2_048
# The longest wait for storage, by the number of ranks: some seconds later another rank writes the report.
_STORAGE_S, _STORAGE_S_A_RANK = 2.5, 0.005

# Threads that wait for storage, by the folder of reports.
_storage_threads: dict[Path, SideThread] = {}


def write_report(diagnosis: Diagnosis, report_dir: Path, *, is_refused: bool = False) -> Path:
    """Writes ``report.json`` and ``report.txt`` into the incident's folder; a later report on it replaces an earlier.

    If the run is over, writes ``plan.json``, too.

    Args:
        is_refused: Whether the job does not start because of it, if data or hosts were only compared.
        report_dir: The folder of all incidents. If it cannot be written to or does not answer, which may be why ranks
            wait, a temporary folder is used instead.

    Returns:
        The folder that was written to.

    Raises:
        OSError: If neither can be written to.
    """
    name, files = folder_name(diagnosis.job.incident), _files(diagnosis, is_refused)
    deadline_s = _deadline_s(diagnosis)
    try:
        return _within(deadline_s, report_dir, lambda: _write(report_dir / name, files))
    except OSError:
        elsewhere = Path(tempfile.gettempdir())
        return _within(
            deadline_s,
            elsewhere,
            lambda: _write(Path(tempfile.mkdtemp(prefix="ncclsafe-", dir=elsewhere)) / name, files),
        )


def write_page(diagnosis: Diagnosis, folder: Path) -> str:
    """Writes ``report.html`` next to the report, if that does not take long; never raises.

    Returns:
        Why there is no page, in words; empty if there is one.
    """
    path = folder / "report.html"
    try:
        if len(diagnosis.job.ranks) > _MOST_RANKS:
            raise TimeoutError(f"there are more than {_MOST_RANKS:,} ranks")
        # Jinja is needed for nothing else, and only if something is wrong.
        from lightning_ncclsafe.report.html.page import render_html

        content = render_html(diagnosis, most_s=_MOST_S).encode("utf-8", "replace")
        _within(_deadline_s(diagnosis), folder.parent, lambda: _write_file(path, content))
    except Exception as error:  # the report is complete without it
        with suppress(OSError):
            # The page of an earlier report on the incident.
            _within(_STORAGE_S, folder.parent, lambda: path.unlink(missing_ok=True))
        return f"report.html was not written ({error}); to write it: ncclsafe render {folder} --format html"
    return ""


def write_all(diagnosis: Diagnosis, report_dir: Path, say: Callable[[str], None], *, is_refused: bool = False) -> str:
    """Writes the report and the page for a comparison of ranks, and prints what could not be written; never raises.

    Returns:
        The folder; empty if there is no report: the verdict matters more.
    """
    try:
        folder = write_report(diagnosis, report_dir, is_refused=is_refused)
    except Exception as error:
        say(f"the report could not be written: {error}")
        return ""
    if problem := write_page(diagnosis, folder):
        say(problem)
    return str(folder)


def folder_name(incident: Incident) -> str:
    """The name of an incident's folder: its UTC time and number, so that names sort in the order of events."""
    moment = datetime.fromtimestamp(incident.opened_ns / 1e9, tz=timezone.utc)
    return f"{moment:%Y-%m-%dT%H-%M-%S}Z-incident-{incident.number}"


def _files(diagnosis: Diagnosis, is_refused: bool) -> dict[str, bytes | None]:
    """The files of a report by name; None for one that an earlier report on the incident may have left."""
    start = next_start(diagnosis, is_refused=is_refused)
    return {
        "report.json": report_json(diagnosis),
        "report.txt": render_text(diagnosis).encode("utf-8", "replace"),
        PLAN_FILE: plan_json(start) if start is not None else None,
    }


def _write(folder: Path, files: Mapping[str, bytes | None]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    for name, content in files.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            _write_file(folder / name, content)
    return folder


def _deadline_s(diagnosis: Diagnosis) -> float:
    return _STORAGE_S + _STORAGE_S_A_RANK * len(diagnosis.job.ranks)


def _within(deadline_s: float, storage: Path, act: Callable[[], T]) -> T:
    """Writes on a thread, which is abandoned if storage does not answer; until it does, no other is started.

    Raises:
        OSError: Storage refuses, or does not answer.
        Exception: Whatever else is raised.
    """
    thread = _storage_threads.setdefault(storage, SideThread("ncclsafe-report"))
    try:
        return thread.call(act, deadline_s)
    except UnansweredError as error:
        raise TimeoutError(f"{storage} {error}") from error
    except NoThreadError:
        return act()


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of this one once it is complete: readers never see a part of it.

    Only this user can read it. If writing fails, nothing is left of it.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_file(path: Path, content: bytes) -> None:
    with replaced(path) as file:
        file.write(content)


class IncidentNumbers:
    """Numbers the incidents of a process, from 1; the ranks of a job agree on them.

    An incident that is not reported has no number: the next incident gets it.

    Attributes:
        last: Number of the last incident; 0 if there was none.
    """

    def __init__(self) -> None:
        self.last = 0

    def note(self, number: int) -> None:
        """An incident with this number was reported, perhaps by another rank."""
        self.last = max(self.last, number)
