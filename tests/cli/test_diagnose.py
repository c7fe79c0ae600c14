"""``ncclsafe diagnose``: what is printed for each kind of input, and the exit codes."""

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ncclsafe.cli import main
from lightning_ncclsafe.facts import (
    Collective,
    Frame,
    Group,
    Incident,
    IncidentKind,
    JobFacts,
    Phase,
    Progress,
    RankFacts,
)
from lightning_ncclsafe.report.json import read_report, report_json
from lightning_ncclsafe.rules.judging import judge

Diagnose = Callable[..., tuple[int, str, str]]
TIMED_OUT = (
    "[rank{0}]:[E1126 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=61, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600061 "
    "milliseconds before timing out.\n"
)


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]) -> Diagnose:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["diagnose", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def dump(enqueued: int) -> bytes:
    entry = {
        "process_group": ("0", "default_pg"),
        "pg_id": 0,
        "collective_seq_id": enqueued,
        "profiling_name": "nccl:all_reduce",
        "state": "started" if enqueued == 61 else "completed",
        "input_sizes": [[4096]],
    }
    status = {"last_enqueued_collective": enqueued, "last_completed_collective": 60}
    return pickle.dumps({"version": "2.10", "pg_status": {"0": status}, "entries": [entry]}, protocol=2)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(dump(60 if rank == 1 else 61))
    return tmp_path


def report(kind: IncidentKind = IncidentKind.TIMEOUT) -> bytes:
    def rank(number: int) -> RankFacts:
        seq = 60 + number
        calls = (Collective(group="0", seq=61, op="all_reduce", backend="gloo"),) if number else ()
        group = Group(name="0", ranks=(0, 1), last_enqueued=seq, last_completed=60)
        return RankFacts(rank=number, progress=Progress(phase=Phase.TRAIN), groups=(group,), collectives=calls)

    incident = Incident(number=2, kind=kind, opened_by=1, idle_s=1800.0)
    return report_json(judge(JobFacts(incident=incident, world_size=2, ranks=(rank(0), rank(1)))))


def test_a_folder_of_dumps_is_explained(dumps: Path, diagnose: Diagnose) -> None:
    code, out, err = diagnose(dumps)
    assert (code, err) == (0, "")
    assert out.startswith(
        "host-stuck: Rank 1 has called 60 collectives of the default group and finished all, and never"
    )
    assert "Read 3 ranks: dumps of ranks 0-2." in out
    assert "Ranks 0, 2: the default group: called 61, completed 60, wait in all_reduce (sequence number 61" in out


def test_the_number_of_ranks_that_were_read_is_not_that_of_the_job(tmp_path: Path, diagnose: Diagnose) -> None:
    line = (
        "[rank6]:[E429 13:55:49 ProcessGroupNCCL.cpp:684] [Rank 6] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800328 "
        "milliseconds before timing out.\n"
    )
    (tmp_path / "a.log").write_text(line)
    _, unsized, _ = diagnose(tmp_path)
    (tmp_path / "a.log").write_text(f"world_size=8\n{line}")
    _, sized, _ = diagnose(tmp_path)
    assert "Read 1 of 7 or more ranks: logs of rank 6." in unsized
    assert "Read 1 of 8 ranks: logs of rank 6." in sized


def test_a_quoted_line_that_is_cut_says_so(tmp_path: Path, diagnose: Diagnose) -> None:
    whole, longer = TIMED_OUT.format(1), TIMED_OUT.format(2).strip() + " It waits" * 40 + "\n"
    (tmp_path / "a.log").write_text(whole + longer)
    _, out, _ = diagnose(tmp_path, "--format", "json")
    quoted = {
        item["rank"]: item["text"] for item in json.loads(out)["findings"][0]["evidence"] if item["source"] == "log"
    }
    assert quoted[1] == whole[len("[rank1]:") :].strip()
    assert len(quoted[2]) <= 300 and quoted[2].endswith("…")


def test_an_empty_file_is_not_a_run_without_problems(tmp_path: Path, diagnose: Diagnose) -> None:
    (tmp_path / "a.log").touch()
    assert diagnose(tmp_path / "a.log") == (2, "", f"error: {tmp_path / 'a.log'}: empty\n")


def test_json_output_is_a_report(dumps: Path, diagnose: Diagnose) -> None:
    code, out, _ = diagnose(dumps, "--format", "json")
    assert code == 0
    first = json.loads(out)["findings"][0]
    assert (first["rule"], first["ranks"]) == ("host-stuck", [1])
    assert read_report(out.encode()).job.incident.kind is IncidentKind.RECORDED


def test_its_own_json_output_is_readable(dumps: Path, diagnose: Diagnose, tmp_path: Path) -> None:
    _, out, _ = diagnose(dumps, "--format", "json")
    (tmp_path / "saved.json").write_text(out)
    code, again, _ = diagnose(tmp_path / "saved.json")
    assert (code, again.partition(":")[0]) == (0, "host-stuck")


def test_a_large_report_is_read_under_any_name(
    dumps: Path, diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saved.json").write_text(diagnose(dumps, "--format", "json")[1])
    monkeypatch.setattr("lightning_ncclsafe.reading.evidence.MOST_BYTES", 100)
    assert diagnose(tmp_path / "saved.json")[0] == 0


def test_a_log_from_stdin_is_explained(diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "world_size=3\n" + TIMED_OUT.format(0) + TIMED_OUT.format(2)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = diagnose("-")
    assert (code, out.partition(":")[0]) == (0, "silent-rank")


def test_a_healthy_run_has_nothing_to_explain(tmp_path: Path, diagnose: Diagnose) -> None:
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(dump(60))
    code, out, _ = diagnose(tmp_path)
    assert code == 1
    assert out.startswith("Nothing found: no rank waits for another in what was read.")


def test_a_log_without_a_hang_has_nothing_to_explain(tmp_path: Path, diagnose: Diagnose) -> None:
    (tmp_path / "train.log").write_text("epoch 3, loss 0.1\n")
    code, out, err = diagnose(tmp_path)
    assert (code, err) == (1, "")
    assert out == "nothing to explain: in 1 file, no rank waits for another, fails or dies\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no", None, "No such file or directory"),
        ("nccl_trace_rank_0", b"\x80\x02cos\nsystem\n.", "refused: it would call os.system"),
        ("trace_0.json", b'{"entries": [', "it is JSON that is damaged or was cut off"),
        ("other.json", b'{"a": 1}', "neither a dump of PyTorch's Flight Recorder nor a report"),
        ("model.bin", b"\0\1\2", "it is neither a dump, nor a report, nor a log"),
        ("report.json", b'{"schema": 99, "findings": []}', "schema 99"),
    ],
)
def test_unreadable_input_is_a_single_error(
    name: str, content: bytes | None, said: str, tmp_path: Path, diagnose: Diagnose
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = diagnose(tmp_path / name)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"error: {tmp_path / name}: ") and said in line


def test_an_empty_folder_is_an_error(tmp_path: Path, diagnose: Diagnose) -> None:
    assert diagnose(tmp_path) == (2, "", f"error: no dump, report or log in {tmp_path}\n")


def test_a_bad_file_is_reported_and_the_rest_explained(dumps: Path, diagnose: Diagnose) -> None:
    (dumps / "nccl_trace_rank_7").write_bytes(b"\x80\x02cposix\nsystem\n.")
    code, out, err = diagnose(dumps)
    assert (code, out.partition(":")[0]) == (0, "host-stuck")
    assert err.count("\n") == 1 and "posix.system" in err


def test_reports_are_diagnosed_again(tmp_path: Path, diagnose: Diagnose) -> None:
    (tmp_path / "report.json").write_bytes(report())
    (tmp_path / "report.txt").write_text(TIMED_OUT.format(0))
    code, out, err = diagnose(tmp_path)
    assert (code, err) == (0, "")
    assert "Incident 2: rank 1 made no progress for 30 min, the limit." in out
    assert "rank-behind" in out.splitlines()[0]


def test_each_of_several_reports_has_a_heading(tmp_path: Path, diagnose: Diagnose) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(report())
    code, out, _ = diagnose(tmp_path)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("===")] == [
        f"=== {tmp_path / name / 'report.json'}" for name in ("one", "two")
    ]


def test_escape_codes_in_a_name_are_escaped(tmp_path: Path, diagnose: Diagnose) -> None:
    _, _, err = diagnose(tmp_path / "\x1b[31mred")
    assert "\x1b" not in err and "\\x1b[31mred" in err


def test_escape_codes_in_a_dump_are_escaped(tmp_path: Path, diagnose: Diagnose) -> None:
    made: dict[str, Any] = pickle.loads(dump(61))
    made["entries"][0] |= {
        "profiling_name": "nccl:\x1b]0;title\x07all",
        "frames": [{"filename": "\x1b[31m.py", "name": "\u202ef", "line": 1}],
    }
    (tmp_path / "trace_0").write_bytes(pickle.dumps(made, protocol=2))
    _, out, _ = diagnose(tmp_path)
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_a_closed_output_is_not_an_error(dumps: Path) -> None:
    script = f"import sys; from lightning_ncclsafe.cli import main; sys.exit(main(['diagnose', {str(dumps)!r}]))"
    done = subprocess.run(
        f'"{sys.executable}" -c "{script}" | true', shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def test_neither_torch_nor_lightning_is_needed(dumps: Path) -> None:
    script = (
        "import sys; from lightning_ncclsafe.cli import main; "
        f"main(['diagnose', {str(dumps)!r}]); "
        "print(*sorted({'torch', 'lightning', 'numpy', 'psutil', 'rich', 'jinja2'} & sys.modules.keys()), 'end')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "end"


def test_a_data_report_keeps_its_findings() -> None:
    saved = read_report(report())
    job = replace(saved.job, incident=replace(saved.job.incident, kind=IncidentKind.DATA))
    from lightning_ncclsafe.cli.diagnose import _judged_again

    assert _judged_again(replace(saved, job=job)).findings == saved.findings


@pytest.mark.parametrize(("mark", "is_judged"), [("", False), ("own", True)])
def test_a_report_without_frame_marks_keeps_its_findings(mark: str, is_judged: bool) -> None:
    from lightning_ncclsafe.cli.diagnose import _judged_again

    ours = Frame(file="/venv/site-packages/lightning_ncclsafe/a.py", line=1, function="f", mark=mark)
    saved = read_report(report())
    job = replace(saved.job, ranks=tuple(replace(facts, stack=(ours,)) for facts in saved.job.ranks))
    was = replace(saved, job=job, findings=saved.findings[:1] * 2)
    assert (_judged_again(was).findings != was.findings) is is_judged
