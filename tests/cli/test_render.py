"""``ncclsafe render``: a report in each format, one error for what is no report, and no time lost on imports."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from incidents import incident_of, poisoned

from lightning_ncclsafe.cli import main
from lightning_ncclsafe.report.html.page import render_html
from lightning_ncclsafe.report.json import report_json
from lightning_ncclsafe.report.text import render_text

FORMATS = ("text", "trace", "html")

Render = Callable[..., tuple[int, str, str]]


@pytest.fixture
def render(capsys: pytest.CaptureFixture[str]) -> Render:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["render", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "incident" / "report.json"
    path.parent.mkdir()
    path.write_bytes(report_json(incident_of(2)))
    return path


def test_the_default_is_text_from_a_file_or_its_folder(report: Path, render: Render) -> None:
    assert render(report) == (0, render_text(incident_of(2)), "")
    assert render(report.parent) == (0, render_text(incident_of(2)), "")


def test_html_and_trace_are_rendered(report: Path, render: Render) -> None:
    assert render(report, "--format", "html") == (0, render_html(incident_of(2)), "")
    code, out, err = render(report, "--format=trace")
    assert (code, err) == (0, "") and json.loads(out)["traceEvents"]


@pytest.mark.parametrize("format", FORMATS)
def test_output_goes_to_a_file(report: Path, render: Render, tmp_path: Path, format: str) -> None:
    expected = render(report, "--format", format)[1]
    assert render(report, "--format", format, "--output", tmp_path / "made") == (0, "", "")
    assert (tmp_path / "made").read_text() == expected


def test_an_unwritable_output_is_an_error(report: Path, render: Render, tmp_path: Path) -> None:
    assert render(report, "--output", tmp_path) == (2, "", f"error: {tmp_path}: Is a directory\n")
    gone = tmp_path / "no" / "where"
    assert render(report, "--output", gone) == (2, "", f"error: {gone}: No such file or directory\n")


def test_a_missing_report_is_an_error(render: Render, tmp_path: Path) -> None:
    assert render(tmp_path / "no") == (2, "", f"error: {tmp_path / 'no'}: No such file or directory\n")
    assert render(tmp_path)[2] == f"error: {tmp_path}: neither this folder nor one in it has a report.json.\n"


def test_the_only_incident_of_a_folder_is_rendered_and_of_several_one_must_be_chosen(
    render: Render, report: Path
) -> None:
    folder = report.parent.parent
    assert render(folder) == render(report) and render(folder)[0] == 0
    (folder / "a-later-one").mkdir()
    (folder / "a-later-one" / "report.json").write_bytes(report.read_bytes())
    last = max(report.parent, folder / "a-later-one")
    said = f"error: {folder}: it contains 2 incidents; choose one, for example the last: {last}\n"
    assert render(folder) == (2, "", said)


def written(change: Callable[[dict[str, Any]], Any]) -> bytes:
    plain = json.loads(report_json(incident_of(2)))
    change(plain)
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "Not a report: the file is empty."),
        (b"\x80\x04\x95.", "Logs and dumps are read by: ncclsafe diagnose."),
        (b"[" * 100_000, "Not a report: expected JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "it has no 'schema' number"),
        (report_json(incident_of(2))[:-500], "The report is damaged or was cut off: copy it again ("),
        (written(lambda plain: plain.update(schema=99)), "another version: schema 99"),
        (written(lambda plain: plain.pop("job")), "The report lacks 'job'"),
        (written(lambda plain: plain["job"].update(world_size="two")), "The report is damaged"),
        (written(lambda plain: plain["job"].update(world_size=10**12)), "claims 1000000000000 ranks"),
        (written(lambda plain: plain["job"].update(world_size=-1)), "claims -1 ranks"),
        (written(lambda plain: plain["job"]["incident"].update(kind="\x1b[31m")), "The report is damaged"),
    ],
    ids=[
        "empty",
        "a pickle",
        "nested",
        "a list",
        "an object",
        "truncated",
        "another schema",
        "a missing part",
        "a wrong type",
        "a huge world",
        "a negative world",
        "escape",
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_an_invalid_report_is_a_single_error(
    tmp_path: Path, render: Render, data: bytes, said: str, format: str
) -> None:
    (tmp_path / "report.json").write_bytes(data)
    code, out, err = render(tmp_path, "--format", format)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {tmp_path}: ") and said in err and "\x1b" not in err


def numbers(value: Any) -> list[tuple[Any, Any]]:
    """Every number in plain data, as the list or dictionary that holds it and its place there."""
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in places:
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        found += [(value, key)] if is_number else numbers(item)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_absurd_numbers_give_a_report_or_a_single_error(tmp_path: Path, render: Render, format: str) -> None:
    chosen = random.Random(7)
    for _ in range(6):
        plain = json.loads(report_json(incident_of(2)))
        for holder, key in chosen.sample(numbers(plain["job"]["ranks"]), 8):
            holder[key] = chosen.choice((-1, 0, 2**63, -(2**70), 10**400, 1e308, -1e308, 0.5))
        (tmp_path / "report.json").write_text(json.dumps(plain))
        code, _, err = render(tmp_path, "--format", format)
        assert (code, err.count("\n")) in ((0, 0), (2, 1)), err


@pytest.mark.parametrize("format", FORMATS)
def test_escape_codes_in_a_report_are_escaped(tmp_path: Path, render: Render, format: str) -> None:
    (tmp_path / "report.json").write_bytes(report_json(poisoned(incident_of(4, silent=(3,)))))
    code, out, _ = render(tmp_path, "--format", format)
    assert code == 0
    assert not [char for char in out if char not in "\n\xa0" and not char.isprintable()]


def test_an_oversized_file_is_not_read(report: Path, render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ncclsafe.cli.render._LARGEST_BYTES", 1_000)
    assert render(report) == (2, "", f"error: {report}: Not a report: it has more than 1,000 bytes.\n")


def test_a_device_is_not_read(render: Render) -> None:
    assert render("/dev/zero") == (2, "", "error: /dev/zero: Not a report: it is not a file.\n")


def test_a_closed_pipe_is_not_an_error(report: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    script = f"import sys; from lightning_ncclsafe.cli import main; sys.exit(main(['render', {str(report)!r}]))"
    done = subprocess.run([sys.executable, "-c", script], stdout=writes, stderr=subprocess.PIPE, timeout=30)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


def test_only_needed_modules_are_imported(report: Path) -> None:
    script = f"""
import sys
from lightning_ncclsafe.cli import main
for format in {FORMATS!r}:
    main(["render", {str(report)!r}, "--format", format, "--output", {os.devnull!r}])
    heavy = ("torch", "lightning", "numpy", "psutil", "rich", "jinja2", "lightning_ncclsafe.cli.preflight")
    print(format, *(name for name in heavy if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "text\ntrace\nhtml jinja2\n"
