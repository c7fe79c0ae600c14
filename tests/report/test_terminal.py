"""What we print in a terminal: coloured, as wide as it is, the answer first; and plain lines wherever it is none."""

import fcntl
import os
import re
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from incidents import incident_of
from warm import Running, Warm, environment

from lightning_ncclsafe.report.json import report_json
from lightning_ncclsafe.report.text import render_short, render_text

SAY = (
    "import sys; from lightning_ncclsafe.report.terminal import say_on_stderr; say_on_stderr(open(sys.argv[1]).read());"
)
RENDER = "import sys; from lightning_ncclsafe.cli import main; sys.exit(main(['render', sys.argv[1]]));"
Start = Callable[..., Running]
ESCAPE = re.compile(r"\x1b\[([\d;]*)m")
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3\d|9\d)(?:;[\d;]*)?m")
DIAGNOSIS = incident_of(64, silent=tuple(range(3, 60, 2)))
LONG_PATH = "/gpfs/projects/vision/users/a.longname/checkouts/2026-11-21/src/retrieval/training/loops/contrastive.py:93"


@pytest.fixture
def start(warm: Warm) -> Start:
    def started(program: str, file: Path, output: int, **environ: str) -> Running:
        script = file.with_suffix(".py")
        script.write_text(program)
        kept = {
            name: value for name, value in environment().items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")
        }
        env = {**kept, "TERM": "xterm-256color", **environ}
        return warm.start([str(script), str(file)], output=output, cwd=file.parent, env=env)

    return started


def in_terminal(start: Start, program: str, file: Path, *, columns: int, **environ: str) -> str:
    """What a program writes to a terminal so wide."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    running = start(program, file, theirs, **environ)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # the terminal is gone with the program
        pass
    finally:
        os.close(ours)
        assert running.wait(30) == 0, written
    return written.decode().replace("\r\n", "\n")


def to_file(start: Start, program: str, file: Path, **environ: str) -> str:
    with file.with_suffix(".log").open("w+") as log:
        assert start(program, file, log.fileno(), **environ).wait(30) == 0
        return Path(log.name).read_text()


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "short.txt"
    path.write_text(f"{render_short(DIAGNOSIS)}\nreport: {LONG_PATH}")
    return path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_bytes(report_json(DIAGNOSIS))
    return path


@pytest.mark.parametrize("columns", [60, 100])
def test_lines_fit_the_terminal_and_have_the_prefix(start: Start, short: Path, columns: int) -> None:
    written = in_terminal(start, SAY, short, columns=columns)
    first, *lines = ESCAPE.sub("", written).splitlines()
    assert not first
    assert all(line.startswith("[ncclsafe] ") for line in lines)
    assert [line for line in lines if len(line) > columns] == [
        line for line in lines if LONG_PATH in line and columns < 119
    ]
    assert any(LONG_PATH in line for line in lines), "a path stays whole"
    joined = " ".join(line.removeprefix("[ncclsafe] ").strip() for line in lines)
    assert joined == " ".join(short.read_text().split())


def test_the_answer_stands_out_and_comes_first(start: Start, short: Path) -> None:
    written = in_terminal(start, SAY, short, columns=80)
    answer = render_short(DIAGNOSIS).partition("\n")[0]
    bold = "".join(re.findall(r"\x1b\[1m([^\x1b]*)", written))
    for word in answer.partition(": ")[2].split():
        assert word in bold
    first, *rest = written.splitlines()[1:]
    assert re.match(r"\x1b\[2m\[ncclsafe\]\x1b\[0m\x1b\[1m \x1b\[0m\x1b\[1;31mstopped-process\x1b\[0m\x1b\[1m: ", first)
    assert any(re.search(r"\x1b\[1m +remedy:\x1b\[0m", line) for line in rest)


def test_no_color_disables_colour(start: Start, short: Path) -> None:
    assert COLOUR.search(in_terminal(start, SAY, short, columns=80))
    assert not COLOUR.search(in_terminal(start, SAY, short, columns=80, NO_COLOR="1"))
    assert "\x1b" not in in_terminal(start, SAY, short, columns=80, TERM="dumb")


@pytest.mark.parametrize("environ", [{}, {"FORCE_COLOR": "1"}, {"COLUMNS": "40"}], ids=["plain", "forced", "narrow"])
def test_a_log_has_unwrapped_lines_without_escapes(
    start: Start, short: Path, report: Path, environ: dict[str, str]
) -> None:
    said = short.read_text().splitlines()
    assert to_file(start, SAY, short, **environ) == "\n" + "".join(f"[ncclsafe] {line}\n" for line in said)
    assert to_file(start, RENDER, report, **environ) == render_text(DIAGNOSIS)


@pytest.mark.parametrize("columns", [60, 250])
def test_a_report_has_a_readable_width(start: Start, report: Path, columns: int) -> None:
    written = in_terminal(start, RENDER, report, columns=columns)
    plain = ESCAPE.sub("", written)
    assert COLOUR.search(written)
    assert not [line for line in plain.splitlines() if len(line) > min(columns, 110) and len(line.split()) > 1]
    assert "".join(plain.split()).replace("-", "") == "".join(render_text(DIAGNOSIS).split()).replace("-", "")


def test_a_report_begins_on_a_line_of_its_own_and_a_notice_stays_one_line(start: Start, tmp_path: Path) -> None:
    """A progress bar leaves the cursor behind itself."""
    bar = "import sys; sys.stderr.write('Epoch 2: 71%|###'); sys.stderr.flush(); " + SAY
    for text, written in (
        ("a-cause: …\n  where: x.py:3", "\n[ncclsafe] a-cause: …\n[ncclsafe]   where: x.py:3\n"),
        ("recovered", "[ncclsafe] recovered\n"),
    ):
        said = tmp_path / "said.txt"
        said.write_text(text)
        assert to_file(start, bar, said) == f"Epoch 2: 71%|###{written}"
