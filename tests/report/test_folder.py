"""Where reports are written: one private folder an incident, whole files or none, and a place when there is none."""

import errno
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from diagnoses import diagnosis, with_first
from own_threads import join_own_threads

from lightning_ncclsafe.facts import Incident, IncidentKind
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report import folder as report_folder
from lightning_ncclsafe.report.folder import folder_name, write_page, write_report
from lightning_ncclsafe.report.html import page
from lightning_ncclsafe.report.json import read_report

# 2026-03-04T05:06:07Z
MOMENT_NS = 1_772_600_767_000_000_000
FILES = {"report.json", "report.txt"}
# Nothing comes near it unless something is wrong.
AMPLE_S = 20.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder of temporary files, of which a test must not leave any."""
    folder = tmp_path / "system-temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder


def incident(number: int = 1, later_s: int = 0) -> Incident:
    moment_ns = MOMENT_NS + later_s * 1_000_000_000
    return Incident(number=number, kind=IncidentKind.SUSPECT, opened_by=0, opened_ns=moment_ns)


def at(moment: Incident, base: Diagnosis | None = None) -> Diagnosis:
    base = base or diagnosis()
    return replace(base, job=replace(base.job, incident=moment))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_both_files_are_written_to_the_incident_folder(tmp_path: Path) -> None:
    folder = write_report(at(incident()), tmp_path / "reports")
    assert folder == tmp_path / "reports" / "2026-03-04T05-06-07Z-incident-1"
    assert names(folder) == FILES
    assert read_report((folder / "report.json").read_bytes()) == at(incident())
    assert diagnosis().findings[0].summary in (folder / "report.txt").read_text()


def test_names_sort_by_time() -> None:
    events = [incident(1), incident(2), incident(3, later_s=1), incident(4, later_s=3600), incident(10, 90_000)]
    written = [folder_name(event) for event in events]
    assert sorted(written) == written


def test_the_name_is_in_utc_in_any_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setenv("TZ", "JST-9")
        time.tzset()
        name = folder_name(incident())
    time.tzset()
    assert name == "2026-03-04T05-06-07Z-incident-1"


def test_only_the_user_can_read_the_report(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = write_report(at(incident()), tmp_path / "reports")
    finally:
        os.umask(before)
    assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
    assert {mode(path) for path in folder.iterdir()} == {0o600}


def test_permissions_of_an_existing_folder_are_kept(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    reports.chmod(0o755)
    folder = write_report(at(incident()), reports)
    assert (mode(reports), mode(folder)) == (0o755, 0o700)


def test_a_later_report_on_an_incident_replaces_the_earlier(tmp_path: Path) -> None:
    first = write_report(at(incident()), tmp_path)
    reader = (first / "report.json").open("rb")
    with reader:
        later = at(incident(), with_first(summary="Rank 1 is gone."))
        assert write_report(later, tmp_path) == first
        # Who has the earlier one open reads it to its end.
        assert read_report(reader.read()) == at(incident())
    assert json.loads((first / "report.json").read_bytes())["findings"][0]["summary"] == "Rank 1 is gone."
    assert names(first) == FILES


def test_each_incident_has_its_own_folder(tmp_path: Path) -> None:
    folders = {write_report(at(incident(number)), tmp_path / "reports") for number in (1, 2)}
    assert set((tmp_path / "reports").iterdir()) == folders


def test_a_file_in_place_of_the_folder_falls_back_to_a_temporary_one(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    folder = write_report(at(incident()), tmp_path / "taken")
    assert folder.is_relative_to(temporary)
    assert names(folder) == FILES
    assert mode(folder.parent) == 0o700
    assert (tmp_path / "taken").read_text() == "mine"


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


class FullDisk:
    """A file on a disk that takes the first bytes and no more; where it is, is in the file's name."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        self._file.write(content[:10])
        self._file.flush()
        return int(full())


def fill(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    fdopen = os.fdopen

    def opened(handle: int, *args: Any) -> Any:
        file = fdopen(handle, *args)
        return FullDisk(file) if os.readlink(f"/proc/self/fd/{handle}").startswith(f"{disk}/") else file

    monkeypatch.setattr(os, "fdopen", opened)


def test_a_full_disk_falls_back_to_a_temporary_folder(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, tmp_path / "reports")
    folder = write_report(at(incident()), tmp_path / "reports")
    assert folder.is_relative_to(temporary)
    assert names(folder) == FILES
    assert not [path for path in (tmp_path / "reports").rglob("*") if path.is_file()]


def test_a_full_disk_leaves_the_earlier_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = write_report(at(incident()), tmp_path / "reports")
    fill(monkeypatch, tmp_path / "reports")
    write_report(at(incident(), with_first(summary="Rank 1 is gone.")), tmp_path / "reports")
    assert read_report((earlier / "report.json").read_bytes()) == at(incident())
    assert names(earlier) == FILES


def test_a_failed_replace_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(at(incident()), tmp_path / "reports")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_nothing_writable_raises_an_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="No space left"):
        write_report(at(incident()), tmp_path / "reports")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unresponsive_storage_does_not_block_the_report(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may be the very cause, and the process that writes the report has to name it."""
    answers, asked = threading.Event(), list[Path]()
    write = report_folder._write_file

    def write_file(path: Path, content: bytes) -> None:
        if path.is_relative_to(tmp_path / "reports"):
            asked.append(path)
            answers.wait(30)
        write(path, content)

    monkeypatch.setattr(report_folder, "_write_file", write_file)
    monkeypatch.setattr(report_folder, "_STORAGE_S", 0.2)
    try:
        for number in (1, 2):
            folder = write_report(at(incident(number)), tmp_path / "reports")
            assert folder.is_relative_to(temporary) and names(folder) == FILES
        assert len(asked) == 1, "no second thread waits for it"
    finally:
        answers.set()
    join_own_threads("report")
    assert write_report(at(incident(3)), tmp_path / "reports").parent == tmp_path / "reports"
    assert len([*(tmp_path / "reports").iterdir()]) == 2, "the late report and the third one"


def test_unresponsive_storage_does_not_block_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage stops responding after the report; removing an earlier page would block too, so it is left."""
    folder = write_report(at(incident()), tmp_path / "reports")
    answers, unlink = threading.Event(), Path.unlink
    monkeypatch.setattr(report_folder, "_write_file", lambda *_: answers.wait(AMPLE_S))
    monkeypatch.setattr(Path, "unlink", lambda path, **keys: (answers.wait(AMPLE_S), unlink(path, **keys)))
    monkeypatch.setattr(report_folder, "_STORAGE_S", 0.1)
    began = time.monotonic()
    try:
        assert f"{tmp_path / 'reports'} did not answer within 0.1 s" in write_page(at(incident()), folder)
        assert time.monotonic() - began < AMPLE_S / 2
    finally:
        answers.set()
    join_own_threads("report")


def test_the_page_is_written_beside_the_report_and_private(tmp_path: Path) -> None:
    folder = write_report(at(incident()), tmp_path / "reports")
    assert write_page(at(incident()), folder) == ""
    assert names(folder) == FILES | {"report.html"}
    assert (folder / "report.html").read_text() == page.render_html(at(incident()))
    assert mode(folder / "report.html") == 0o600


def broken(*_: object, **__: object) -> str:
    raise KeyError("in the page")


def test_a_failed_page_keeps_the_report_and_removes_an_earlier_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_report(at(incident()), tmp_path / "reports")
    assert write_page(at(incident()), folder) == ""
    monkeypatch.setattr(page, "render_html", broken)
    problem = f"report.html was not written ('in the page'); to write it: ncclsafe render {folder} --format html"
    assert write_page(at(incident()), folder) == problem
    assert names(folder) == FILES


def test_a_page_on_a_full_disk_keeps_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_report(at(incident()), tmp_path / "reports")
    fill(monkeypatch, tmp_path / "reports")
    assert "No space left on device" in write_page(at(incident()), folder)
    assert names(folder) == FILES


def test_a_page_that_would_take_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_report(at(incident()), tmp_path / "reports")
    with monkeypatch.context() as few:
        few.setattr(report_folder, "_MOST_RANKS", 2)
        assert "there are more than 2 ranks" in write_page(at(incident()), folder)
    monkeypatch.setattr(report_folder, "_MOST_S", 0.0)
    assert "it took too long" in write_page(at(incident()), folder)
    assert names(folder) == FILES
