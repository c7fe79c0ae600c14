"""Cases that are judged from facts in files: what needs GPUs or hosts that are not there.

``recordings/NAME.json`` holds ``made`` (``"constructed"``: written by hand after what such jobs record, and no
recording of NCCL), ``truth`` (causes; ranks, or null where it cannot be said of
some that they cause it) and ``job``, a job's facts.
"""

import json
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from scores import Score, planned, score_fault
from truths import Case, Moment, Scenario

from lightning_ncclsafe.facts import IncidentKind, JobFacts
from lightning_ncclsafe.facts.codec import from_plain, to_plain
from lightning_ncclsafe.report.json import read_report, report_json
from lightning_ncclsafe.rules.judging import judge

RECORDINGS = Path(__file__).with_name("recordings")


def recorded_cases() -> list[Case]:
    """One of each file."""
    return [_case(path) for path in sorted(RECORDINGS.glob("*.json"))]


def _case(path: Path) -> Case:
    file = json.loads(path.read_text())
    truth, world_size = file["truth"], file["job"]["world_size"]
    scenario = Scenario(
        name=path.stem,
        run=_not_run,
        causes=tuple(truth["causes"]),
        ranks=tuple(truth["ranks"] or ()),
        has_ranks=truth["ranks"] is not None,
        at={Moment.MIDDLE: (world_size,)},
        has_line=False,
        has_phase=False,
        needs="recording",
    )
    return Case(scenario=scenario, world_size=world_size, moment=Moment.MIDDLE)


def _not_run(_: Any) -> None:
    raise NotImplementedError("a recording is judged, not run")


def score_recording(case: Case) -> Score:
    """What the rules make of a file, beside its truth."""
    file = json.loads((RECORDINGS / f"{case.scenario.name}.json").read_text())
    diagnosis = judge(from_plain(JobFacts, file["job"]))
    report = json.loads(report_json(diagnosis))
    return score_fault(case, report, why_none="no finding", start=planned(report))


def score_report(case: Case, path: Path) -> Score:
    """What today's rules make of the facts in a case's report, beside its truth.

    Of what ranks agree on before they train, it is what the report says: lines were searched for when it was written.
    """
    diagnosis = read_report(path.read_bytes())
    if diagnosis.job.incident.kind not in (IncidentKind.DATA, IncidentKind.PREFLIGHT):
        diagnosis = judge(diagnosis.job)
    report = json.loads(report_json(diagnosis))
    return score_fault(case, report, why_none="no finding", start=planned(report))


def write(name: str, causes: tuple[str, ...], ranks: tuple[int, ...] | None, job: JobFacts) -> Path:
    """Writes a constructed one; returns its file."""
    truth = {"causes": [*causes], "ranks": None if ranks is None else [*ranks]}
    path = RECORDINGS / f"{name}.json"
    file = {"made": "constructed", "truth": truth, "job": without_defaults(job)}
    path.write_text(json.dumps(file, separators=(",", ":")) + "\n")
    return path


def without_defaults(value: Any) -> Any:
    """As plain data, without what is as it is by default: facts may get more of that."""
    if isinstance(value, tuple):
        return [without_defaults(item) for item in value]
    if not is_dataclass(value):
        return to_plain(value)
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: _default(field) for field in fields(value)}
    return {name: without_defaults(one) for name, one in found.items() if one != defaults[name]}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
