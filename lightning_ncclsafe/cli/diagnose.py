"""``ncclsafe diagnose``: finds from dumps, logs and reports why a run hung."""

import os
import sys
from collections.abc import Iterator, Sequence

from jsonargparse import ArgumentParser, Namespace

from lightning_ncclsafe.cli import failed, say
from lightning_ncclsafe.code.marks import lacks_mark
from lightning_ncclsafe.facts import IncidentKind, JobFacts
from lightning_ncclsafe.facts.findings import Diagnosis
from lightning_ncclsafe.inspecting.diagnosing import diagnosis_of, joined
from lightning_ncclsafe.reading.evidence import Artifacts
from lightning_ncclsafe.report.json import report_json
from lightning_ncclsafe.report.lines import first_of, safe
from lightning_ncclsafe.report.terminal import shown_report
from lightning_ncclsafe.rules.hang import HANG_RULES
from lightning_ncclsafe.rules.judging import judge
from lightning_ncclsafe.rules.recorded import RECORDED_RULES

_RULES = {
    IncidentKind.SUSPECT: HANG_RULES,
    IncidentKind.EXCEPTION: HANG_RULES,
    IncidentKind.TIMEOUT: HANG_RULES,
    IncidentKind.RECORDED: RECORDED_RULES,
}
HELP = "find out why a run hung, from its logs and dumps"
DESCRIPTION = (
    "Reads Flight Recorder dumps of PyTorch (pickle or JSON), logs of any launcher (also .gz), and reports of this"
    " package. Names the rank that the others waited for, and the reason. Dumps and logs of one command must be of one"
    " run. Nothing in them is executed. Exit code: 0 if there is an explanation, 1 if there is none, 2 if nothing"
    " could be read."
)
_MOST_NAMED = 3
_PATHS = "files or folders; - reads a log from standard input"
_FORMAT = "text (default), or json: one document like report.json per run and report"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("paths", metavar="PATH", nargs="+", type=str, help=_PATHS)
    parser.add_argument("--format", choices=["text", "json"], default="text", help=_FORMAT)


def run(config: Namespace) -> int:
    """Runs ``ncclsafe diagnose``: reads all files and prints the diagnosis; returns the exit code."""
    evidence = Artifacts()
    for path in dict.fromkeys(config.paths):
        evidence.read(path)
    for error in evidence.errors:
        say(f"error: {safe(error)}", sys.stderr)
    diagnoses = list(_diagnoses(evidence))
    if not diagnoses:
        return _nothing(evidence, config.paths)
    for title, diagnosis in diagnoses:
        if config.format == "json":
            say(report_json(diagnosis).decode("utf-8", "replace").rstrip("\n"), sys.stdout)
        else:
            say((f"{safe(title)}\n\n" if len(diagnoses) > 1 else "") + shown_report(diagnosis, sys.stdout), sys.stdout)
    return 0 if any(diagnosis.findings for _, diagnosis in diagnoses) else 1


def _diagnoses(evidence: Artifacts) -> Iterator[tuple[str, Diagnosis]]:
    """The diagnoses, with titles in case there are several."""
    inspected = [one.job for _, one in evidence.reports if one.job.is_inspected]
    for seen in joined(inspected):
        yield f"=== inspection of {seen.launch or 'a job'}", diagnosis_of(seen)
    for path, diagnosis in evidence.reports:
        if not diagnosis.job.is_inspected:
            yield f"=== {path}", _judged_again(diagnosis)
    job = evidence.job()
    if job is not None:
        yield "=== dumps and logs", judge(job, RECORDED_RULES)


def _judged_again(diagnosis: Diagnosis) -> Diagnosis:
    """Judges a hang by the current rules; comparisons before training stay as they were, as they depend on settings."""
    rules = _RULES.get(diagnosis.job.incident.kind)
    again = judge(diagnosis.job, rules) if rules is not None and not _is_unmarked(diagnosis.job) else diagnosis
    return again if again.findings else diagnosis


def _is_unmarked(job: JobFacts) -> bool:
    """Whether a version without marks on frames wrote this report: only that version knew what its frames wait for."""
    stacks = [*(facts.stack for facts in job.ranks), *(process.stack for process in job.witnessed)]
    return any(lacks_mark(frame.file, frame.mark) for stack in stacks for frame in stack)


def _nothing(evidence: Artifacts, paths: Sequence[str]) -> int:
    if all(os.path.isfile(path) and not os.path.getsize(path) for path in paths):
        return failed(f"{', '.join(first_of(paths, _MOST_NAMED))}: empty")
    if not evidence.files:
        return 2 if evidence.errors else failed(f"no dump, report or log in {', '.join(first_of(paths, _MOST_NAMED))}")
    files = f"{evidence.files:,} file{'s' * (evidence.files != 1)}"
    say(f"nothing to explain: in {files}, no rank waits for another, fails or dies", sys.stdout)
    return 1
