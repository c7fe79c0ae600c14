"""When an incident is reported the page comes last: after the text and JSON, and after the user has been told."""

from pathlib import Path

import pytest
from incidents import job_of

from lightning_ncclsafe.guard import reporter
from lightning_ncclsafe.guard.reporter import Reporter
from lightning_ncclsafe.settings import Limits


def limits() -> Limits:
    return Limits(suspect_after_s=20.0, timeout_s=1_800.0, on_timeout="report")


class Listener:
    """What is said, and which files there are at that moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said: list[str] = []
        self.files: list[set[str]] = []

    def __call__(self, text: str) -> None:
        self.said.append(text)
        self.files.append({path.name for path in self._folder.glob("*/*")})


def test_the_user_is_notified_before_the_page_is_written(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    verdict = Reporter(tmp_path, limits(), listener).report(job_of(2))
    assert listener.files == [{"report.json", "report.txt"}]
    assert {path.name for path in Path(verdict.folder).iterdir()} == {"report.json", "report.txt", "report.html"}


def test_a_missing_page_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "write_page", lambda *_: "report.html was not written (no room)")
    listener = Listener(tmp_path)
    told = Reporter(tmp_path, limits(), listener)
    assert [told.report(job_of(2)).answer[:20] for _ in range(2)] == ["Rank 0 is working al"] * 2
    assert [text for text in listener.said if "no room" in text] == ["report.html was not written (no room)"]


def test_without_a_folder_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(reporter, "write_report", full)
    monkeypatch.setattr(reporter, "write_page", lambda *_: pytest.fail("there is nowhere to write to"))
    assert Reporter(tmp_path, limits(), lambda _: None).report(job_of(2)).folder == ""
