"""Makes the pictures of the documentation, docs/pictures: a hang and a straggler on two ranks, as a user sees them.

    python tests/programs/pictures.py [--out FOLDER]

Everything in them is real: examples/hangs/rank0_evaluation.py hangs, and its report.html is photographed by headless
Chromium; what it and examples/straggler.py print in a terminal goes through rich's export. They run in a folder of a
neutral name, and the host of the machine is called node-1 in the report.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "browser"))
from chromium import Browser, found

from lightning_ncclsafe.report.html.page import render_html
from lightning_ncclsafe.report.json import read_report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("/tmp/train")
HOST = "node-1"
COLUMNS = 108
# Of one program; the hang has its limit after 12 s.
LIMIT_S = 120.0
MARK = "[ncclsafe] "
# Some machines have these fonts; whoever opens a picture has others, and none is to be fetched.
FETCHED_FONTS = re.compile(r"@font-face \{[^}]*\}\s*")
FONT = re.compile(r"font-family: Fira Code, monospace")
# Names of what is drawn, which are made from what is drawn and when.
RICH_NAMES = re.compile(r"terminal-\d+")


def in_terminal(command: list[str], cwd: Path) -> str:
    """What a program prints in a terminal; one that hangs is ended."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    environ |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    printed, until = b"", time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < until:
            printed += _read(ours)
            time.sleep(0.05)
        printed += _read(ours)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(ours)
    return printed.decode(errors="replace").replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    printed = b""
    try:
        while part := os.read(terminal, 1 << 16):
            printed += part
    except OSError:  # nothing more now, or ever
        pass
    return printed


def our_lines(printed: str) -> list[Text]:
    """What is ours of all that was printed, coloured as it was."""
    lines = (Text.from_ansi(line) for line in printed.split("\n"))
    return [line for line in lines if line.plain.startswith(MARK)]


def draw(command: str, lines: list[Text], path: Path) -> None:
    """A terminal with these lines."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True, force_jupyter=False)  # noqa: SIM115
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="~/train")
    svg = FONT.sub("font-family: 'DejaVu Sans Mono', Menlo, Consolas, monospace", FETCHED_FONTS.sub("", svg))
    path.write_text(RICH_NAMES.sub("terminal", svg), encoding="utf-8")


def with_host(value: Any, host: str) -> Any:
    """Facts in which every host has this name."""
    if isinstance(value, dict):
        return {key: host if key == "host" else with_host(one, host) for key, one in value.items()}
    return [with_host(one, host) for one in value] if isinstance(value, list) else value


def photograph(report: Path, out: Path) -> None:
    """The page's first screen: on a desktop, in the dark, and on a phone."""
    facts = with_host(json.loads(report.read_bytes()), HOST)
    page = report.with_name("report.html")
    page.write_text(render_html(read_report(json.dumps(facts).encode())), encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(found(), Path(profile))
        try:
            for name, width, height, dark, scale in (
                ("report", 1280, 800, False, 1),
                ("report-dark", 1280, 800, True, 1),
                ("report-phone", 390, 844, False, 2),
            ):
                with browser.page(page, width, height, dark=dark, scale=scale) as shown:
                    shown.screenshot(out / f"{name}.png")
        finally:
            browser.close()


@contextmanager
def neutral_folder() -> Iterator[Path]:
    """The examples where nothing tells whose machine this is."""
    FOLDER.mkdir()  # fails where somebody has one
    try:
        shutil.copytree(ROOT / "examples", FOLDER, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for hang in (FOLDER / "hangs").glob("*.py"):
            hang.rename(FOLDER / hang.name)
        yield FOLDER
    finally:
        shutil.rmtree(FOLDER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="default: %(default)s")
    out = parser.parse_args().out.resolve()
    if not found():
        print("error: there is no chromium or chrome on this machine", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    with neutral_folder() as folder:
        # Forked ranks need not import torch again, which on a busy machine takes longer than the hang's limits.
        forked = ("rank0_evaluation.py", "--start-method", "fork")
        hang = in_terminal([sys.executable, *forked, "--root-dir", "runs"], folder)
        reports = sorted(folder.glob("runs/ncclsafe/*/report.json"))
        rules = [json.loads(report.read_bytes())["findings"][0]["rule"] for report in reports]
        if rules != ["rank-zero-only-work"]:
            sys.exit(
                f"error: this is not the hang of the pictures, perhaps as the machine is too busy: {rules}\n{hang}"
            )
        photograph(reports[0], out)
        draw(f"python {' '.join(forked)}", our_lines(hang), out / "terminal.svg")
        straggler = in_terminal([sys.executable, "straggler.py", "--late", "0.1", "--root-dir", "runs"], folder)
        lines = our_lines(straggler)
        table = next(number for number, line in enumerate(lines) if "collectives of" in line.plain)
        draw("python straggler.py --late 0.1", lines[table:], out / "stragglers.svg")
    for picture in sorted(out.iterdir()):
        print(f"{picture.stat().st_size:>9,} bytes  {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
