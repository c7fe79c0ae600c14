"""``ncclsafe inspect``: what the ranks of this host do now, and why they hang. The job needs no preparation."""

import re
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_ncclsafe.cli import failed, write_to
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.diagnosing import LONG_STEP_S
from lightning_ncclsafe.inspecting.inspection import LOOKS, SECONDS, inspect
from lightning_ncclsafe.report.folder import write_page, write_report
from lightning_ncclsafe.report.json import report_json
from lightning_ncclsafe.report.lines import safe
from lightning_ncclsafe.report.terminal import shown_report

HELP = "inspect the training processes of this host: what they do now, and why they hang"
DESCRIPTION = (
    "Inspects the training processes of this user on this host from outside, several times. Names the rank that the"
    " others wait for, and the reason; if the job makes progress, shows where the time goes. The job needs no"
    " preparation and is not changed: no process is stopped, signalled or written to. For a job on several hosts, run"
    " it on each with --output DIR on shared storage, then run: ncclsafe diagnose DIR. Exit code: 0 if the job makes"
    " progress, 1 if a rank is stuck or could not be inspected, 2 if there is no training process."
)
_PIDS = "process ids of the ranks (default: all ranks that are found)"
_FORMAT = "text, json (one document like report.json per job) or html (default: text)"
_OUTPUT = "write report.json, report.txt and report.html to this folder, in one subfolder per host and job"
_HOW_OFTEN = f"how many times to look at each rank (default: {LOOKS})"
_HOW_LONG = (
    f"seconds from the first look to the last (default: {SECONDS:g}, and longer while ranks make no progress, until one"
    f" is known to have made none for {LONG_STEP_S:g} s)"
)
_NATIVE = "also read native frames; for that, each rank that makes no progress is stopped once, for about 0.1 s"
_RECORDER = (
    "make ranks dump PyTorch's Flight Recorder if they were started with TORCH_NCCL_DEBUG_INFO_PIPE_FILE; each writes"
    " the file that its environment names, and the file stays"
)
_NO_NAME = re.compile(r"[^\w.-]+")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--pid", nargs="+", type=int, default=[], metavar="PID", help=_PIDS)
    parser.add_argument("--format", choices=["text", "json", "html"], default="text", help=_FORMAT)
    parser.add_argument("--output", type=str, default=None, metavar="DIR", help=_OUTPUT)
    parser.add_argument("--looks", type=int, default=LOOKS, metavar="N", help=_HOW_OFTEN)
    parser.add_argument("--native", action="store_true", help=_NATIVE)
    parser.add_argument("--recorder", action="store_true", help=_RECORDER)
    parser.add_argument("--seconds", type=float, default=None, metavar="S", help=_HOW_LONG)


def run(config: Namespace) -> int:
    """Runs ``ncclsafe inspect``; returns the exit code."""
    if config.looks < 2 or (config.seconds is not None and config.seconds <= 0):
        return failed("--looks must be at least 2 and --seconds more than 0, because progress is seen between looks")
    # On a terminal, a person waits for the answer.
    early = _EarlyAnswer() if config.format == "text" and sys.stdout.isatty() else None
    found = inspect(
        config.pid,
        looks=config.looks,
        over_s=config.seconds,
        may_write=config.recorder,
        may_stop=config.native,
        say=_note,
        so_far=early.show if early is not None else lambda _: False,
    )
    for note in found.notes:
        _note(note)
    if not found.diagnoses:
        return 2
    # If the answer cannot be written, it is still printed: the job may be gone by the next inspection.
    folders = [Path(config.output)] * len(found.diagnoses) if config.output is not None else []
    is_written = all([_is_done(partial(_write, *one)) for one in zip(found.diagnoses, folders, strict=False)])
    is_shown = _is_done(partial(_show, found.diagnoses, config.format, early))
    return int(any(map(_may_be_stuck, found.diagnoses))) if is_written and is_shown else 2


class _EarlyAnswer:
    """Reports that are shown before the inspection ends, so that the final ones need not repeat them."""

    def __init__(self) -> None:
        self._shown: dict[str, list[tuple[Any, ...]]] = {}

    def show(self, diagnoses: Sequence[Diagnosis]) -> bool:
        """Shows those that have findings; returns whether there are any."""
        found = [diagnosis for diagnosis in diagnoses if diagnosis.findings]
        self._shown = {diagnosis.job.launch: _findings_key(diagnosis) for diagnosis in found}
        return bool(found) and _is_done(partial(_show, found, "text"))

    def is_unchanged(self, diagnosis: Diagnosis) -> bool:
        """Whether the same findings have been shown, perhaps with another confidence."""
        return self._shown.get(diagnosis.job.launch) == _findings_key(diagnosis)


def _findings_key(diagnosis: Diagnosis) -> list[tuple[Any, ...]]:
    return [(one.rule, one.ranks, one.location) for one in diagnosis.findings]


def _unchanged_words(diagnosis: Diagnosis) -> str:
    found = ", ".join(f"{one.rule} ({one.confidence.value})" for one in diagnosis.findings)
    return f"The same after {diagnosis.job.incident.idle_s:.0f} s without progress: {found}.\n"


def _is_done(act: Callable[[], None]) -> bool:
    try:
        act()
    except OSError as error:
        where = f"{safe(str(error.filename))}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return False
    return True


def _note(text: str) -> None:
    print(f"note: {safe(text)}", file=sys.stderr, flush=True)


def _may_be_stuck(diagnosis: Diagnosis) -> bool:
    """Whether there is a finding, or a rank that was not seen to make progress."""
    moves = all(facts.inspection is not None and facts.inspection.moved for facts in diagnosis.job.ranks)
    return bool(diagnosis.findings) or not moves


def _write(diagnosis: Diagnosis, folder: Path) -> None:
    """Into a separate folder for each host and job, so that hosts can share one."""
    name = _NO_NAME.sub("-", f"{socket.gethostname()}-{diagnosis.job.launch}").strip("-")
    written = write_report(diagnosis, folder / name)
    if why := write_page(diagnosis, written):
        _note(why)
    elsewhere = "" if folder in written.parents else f", because {folder} cannot be written to"
    print(f"written to {safe(f'{written}{elsewhere}')}", file=sys.stderr)


def _show(diagnoses: Sequence[Diagnosis], format: str, early: _EarlyAnswer | None = None) -> None:
    for diagnosis in diagnoses:
        if format == "json":
            text = report_json(diagnosis).decode("utf-8", "replace")
        elif format == "html":
            from lightning_ncclsafe.report.html.page import render_html

            text = render_html(diagnosis)
        else:
            title = f"=== {safe(diagnosis.job.launch)}\n\n" if len(diagnoses) > 1 else ""
            is_repeated = early is not None and early.is_unchanged(diagnosis)
            text = title + (_unchanged_words(diagnosis) if is_repeated else shown_report(diagnosis, sys.stdout))
        write_to(sys.stdout, text)
