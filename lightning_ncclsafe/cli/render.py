"""``ncclsafe render``: convert a saved report to text, HTML or a trace."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_ncclsafe.cli import failed, write_to
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.report.json import ReportError, read_report

HELP = "convert a saved report to text, HTML or a trace"
DESCRIPTION = (
    "Converts a saved report to text, to an HTML page that needs no network, or to a trace for ui.perfetto.dev and"
    " chrome://tracing. Exit code: 0, or 2 if the report cannot be read or the file cannot be written."
)
_REPORT = "a report.json, the folder of an incident, or a folder with only one incident"
_FORMAT = "text, html or trace (default: text)"
_OUTPUT = "file to write to (default: standard output)"

# A report of 16,384 ranks has about a quarter of it.
_LARGEST_BYTES = 2_000_000_000
# More ranks than any job has: a damaged number, for which no memory must be reserved.
_MOST_RANKS = 1_000_000


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("report", metavar="REPORT", type=str, help=_REPORT)
    parser.add_argument("--format", choices=["text", "html", "trace"], default="text", help=_FORMAT)
    parser.add_argument("--output", type=str, default=None, metavar="FILE", help=_OUTPUT)


def run(config: Namespace) -> int:
    """Runs ``ncclsafe render``; returns the exit code."""
    try:
        text = _renderer(config.format, config.output)(_read(_file(Path(config.report))))
        _write(text, config.output)
    except ReportError as error:
        return failed(f"{config.report}: {error}")
    except OSError as error:
        return failed(f"{error.filename or config.output}: {error.strerror or error}")
    except Exception as error:  # an untrusted file
        return failed(f"{config.report}: the report cannot be rendered ({type(error).__name__}: {error!s:.200})")
    return 0


def _file(path: Path) -> Path:
    """The report file in a folder, or the file itself."""
    if not path.is_dir():
        return path
    # Their names sort in the order of events.
    incidents = sorted(found.parent for found in path.glob("*/report.json"))
    if (path / "report.json").exists():
        return path / "report.json"
    if not incidents:
        raise ReportError("neither this folder nor one in it has a report.json.")
    if len(incidents) > 1:
        raise ReportError(
            f"it contains {len(incidents):,} incidents; choose one, for example the last: {incidents[-1]}"
        )
    return incidents[0] / "report.json"


def _read(path: Path) -> Diagnosis:
    if not path.is_file() and path.exists():
        raise ReportError("Not a report: it is not a file.")
    with path.open("rb") as file:
        data = file.read(_LARGEST_BYTES + 1)
    if len(data) > _LARGEST_BYTES:
        raise ReportError(f"Not a report: it has more than {_LARGEST_BYTES:,} bytes.")
    diagnosis = read_report(data)
    if not 0 <= diagnosis.job.world_size <= _MOST_RANKS:
        raise ReportError(f"The report is damaged: it claims {diagnosis.job.world_size} ranks.")
    return diagnosis


def _renderer(format: str, output: str | None) -> Callable[[Diagnosis], str]:
    """The renderer of a format, imported only when needed: imports take a while."""
    if format == "html":
        from lightning_ncclsafe.report.html.page import render_html

        return render_html
    if format == "trace":
        from lightning_ncclsafe.report.trace.incident import render_trace

        return render_trace
    from lightning_ncclsafe.report.terminal import shown_report

    return partial(shown_report, stream=sys.stdout if output is None else None)


def _write(text: str, output: str | None) -> None:
    if output is not None:
        Path(output).write_text(text, encoding="utf-8", errors="replace")
    else:
        write_to(sys.stdout, text)
