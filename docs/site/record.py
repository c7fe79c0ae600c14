"""Records the facts whose report the page of a cause shows: ``python docs/site/record.py [NAME[=CASE]...]``.

Without names, it records those that are missing. It takes the best available source: a real training of ``make
faults``; a log or the dumps of a real job; facts that tests construct, if the cause needs GPUs, many hosts or a host in
a bad state. Each file states its source.
"""

import argparse
import json
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), *(str(TESTS / folder) for folder in ("rules", "reading", "programs/faults"))]

from catalogue import CASES  # noqa: E402
from made_logs import TRACEBACK, timeout  # noqa: E402
from pages import RULES, facts_file  # noqa: E402
from preflight_scenes import SCENES as PREFLIGHT_SCENES  # noqa: E402
from recorded import RECORDINGS, without_defaults  # noqa: E402
from running import run_case  # noqa: E402
from scores import score_fault  # noqa: E402
from simulated_incidents import incidents  # noqa: E402
from test_agreement import SCENES as AGREEMENT_SCENES  # noqa: E402
from test_scenes import SCENES as HANG_SCENES  # noqa: E402
from truths import Case  # noqa: E402
from warm import Warm  # noqa: E402

from lightning_ncclsafe.facts import JobFacts  # noqa: E402
from lightning_ncclsafe.facts.codec import from_plain  # noqa: E402
from lightning_ncclsafe.reading.evidence import Artifacts  # noqa: E402
from lightning_ncclsafe.rules.judging import judge  # noqa: E402

LIVE, RECORDED, DISAGREEMENT, HOSTS = RULES
Recorded = dict[str, Any]


def first_finding(kind: str, job: JobFacts | None) -> str:
    """What today's rules name first; empty if nothing."""
    found = judge(job, RULES[kind]).findings if job is not None else ()
    return found[0].rule if found else ""


def from_training(kind: str, name: str, warm: Warm, wanted: str = "") -> Iterator[Recorded]:
    """Real ranks on gloo, small jobs first; those of the requested case, if there is one."""
    cases = [case for case in CASES.values() if case.scenario.causes[:1] == (name,) and "SafeDDP" in _strategies(case)]
    cases = [case for case in cases if wanted in ("", case.name)]
    for case in sorted(cases, key=lambda case: (bool(case.scenario.needs), case.world_size)):
        outcome = run_case(warm, case)
        if outcome.report is None or not score_fault(case, outcome.report, outcome.delay_s).is_right:
            continue
        plain = json.loads(_without_this_machine(json.dumps(outcome.report["job"])))
        job = from_plain(JobFacts, plain)
        if first_finding(kind, job) == name:
            made = (
                f"From a real training on {case.world_size} gloo ranks with this fault:"
                f' `make faults FAULTS="--only {case.name}"`.'
            )
            made += IMITATED.get(case.scenario.name, "")
            if source := case.scenario.source:
                made += f" It was written from [a public issue]({source})."
            yield {"made": made, "job": without_defaults(job)}


# What these machines do not have is raised by the scenario itself.
IMITATED = {
    "no_memory_left_on_a_device": " There is no GPU: the scenario raises the exception itself, with a made-up text.",
    "worker_that_finds_no_shared_memory": " The scenario raises the exception itself; `/dev/shm` is not full.",
}


def _strategies(case: Case) -> tuple[str, ...]:
    return case.scenario.strategies


def _without_this_machine(text: str) -> str:
    """Replaces paths, names and addresses of this machine by generic ones."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    replaced = {path: f"/venv/lib/{Path(path).parent.name}/site-packages" for path in packages} | {
        str(TESTS / "programs" / "faults"): "/home/me/project",
        str(ROOT): "/home/me/lightning-ncclsafe",
        str(Path(sys.prefix)): "/venv",
        str(Path(sys.base_prefix)): "/usr",
        socket.gethostname(): "node-0",
    }
    for mine, theirs in replaced.items():
        text = text.replace(json.dumps(mine)[1:-1], theirs)
    return re.sub(r"/tmp/fault-\w+", "/tmp/run", text)


def from_recording(kind: str, name: str) -> Iterator[Recorded]:
    """Facts of GPUs and large jobs that were made by hand for ``make faults``."""
    for path in sorted(RECORDINGS.glob("*.json")):
        file = json.loads(path.read_text())
        if file["truth"]["causes"][:1] == [name] and first_finding(kind, from_plain(JobFacts, file["job"])) == name:
            yield {"made": CONSTRUCTED.format(path.relative_to(ROOT)), "job": file["job"]}


CONSTRUCTED = "From facts constructed after what such jobs leave, not recorded: `{}`."


def from_scene(kind: str, name: str) -> Iterator[Recorded]:
    """Facts that the tests of rules construct."""
    scenes = {LIVE: HANG_SCENES, DISAGREEMENT: AGREEMENT_SCENES, HOSTS: PREFLIGHT_SCENES}.get(kind, ())
    for scene in scenes:
        if scene.rule == name:
            job = scene.job if hasattr(scene, "job") else _built(scene)
            if first_finding(kind, job) == name:
                made = CONSTRUCTED.format(f"the scene “{scene.name}” in tests/rules")
                yield {"made": made, "job": without_defaults(job)}


def _built(scene: Any) -> JobFacts:
    from builders import NCCL

    job: JobFacts = scene.build(NCCL)
    return job


def from_dumps(kind: str, name: str) -> Iterator[Recorded]:
    """What real NCCL jobs have dumped."""
    for job in sorted(each for each in (TESTS / "reading" / "nccl_dumps").iterdir() if each.is_dir()):
        path = job.relative_to(ROOT)
        if names(kind, name, path):
            made = f"From the dumps of a real NCCL job on 16 GPUs: `ncclsafe diagnose {path}`."
            yield {"made": made, "files": [str(path)]}


def from_logs(kind: str, name: str) -> Iterator[Recorded]:
    """What a public thread has quoted."""
    for folder in ("recorded", "threads", "held"):
        logs = TESTS / "reading" / "logs" / folder
        for truth in json.loads((logs / "truth.json").read_text()):
            path = (logs / truth["file"]).relative_to(ROOT)
            # If a log does not show the cause, rank-behind is the only right answer.
            is_told = (truth["derivable"]["kind"] == "cannot-tell") == (name == "rank-behind")
            if is_told and "#" in truth["source"] and names(kind, name, path):
                made = f"From the log in {_thread(truth['source'])}: `ncclsafe diagnose {path}`."
                yield {"made": made, "files": [str(path)]}


def from_made_log(kind: str, name: str) -> Iterator[Recorded]:
    """PyTorch's own words, with a traceback of nobody's program."""
    if name not in LOADER_ERRORS:
        return
    lines = TRACEBACK.replace("ValueError: bad label 11", LOADER_ERRORS[name]).splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "slurm-4711.out")
        log.write_text("".join(f"[rank1]: {line}" for line in lines) + timeout(0))
        evidence = Artifacts()
        evidence.read(str(log))
    if (job := evidence.job()) is not None and first_finding(kind, job) == name:
        yield {"made": CONSTRUCTED.format("a log with PyTorch's own words for it"), "job": without_defaults(job)}


LOADER_ERRORS = {
    "shm-exhausted": (
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory. Please try to raise your shared memory limit."
    ),
    "worker-died": "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
}


def names(kind: str, name: str, path: Path) -> bool:
    """Whether this cause is the first finding about a file or folder."""
    evidence = Artifacts()
    evidence.read(str(ROOT / path))
    return first_finding(kind, evidence.job()) == name


def _thread(source: str) -> str:
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def from_simulation(kind: str, name: str) -> Iterator[Recorded]:
    """The smallest of the jobs of the simulator of NCCL's recorder."""
    for incident in sorted(incidents(SIMULATED), key=lambda incident: len(incident.dumps)):
        evidence = Artifacts()
        for rank, dump in incident.dumps.items():
            evidence.add_dump(f"nccl_trace_rank_{rank}", dump)
        job = evidence.job()
        if name in incident.rules and first_finding(kind, job) == name:
            made = f"From the dumps of a simulated NCCL job on {len(incident.dumps)} GPUs (`{SIMULATOR}`)."
            yield {"made": made, "job": without_defaults(job)}


SIMULATOR = "tests/reading/simulated_incidents.py"
SIMULATED = 60


def record(kind: str, name: str, warm: Warm, wanted: str = "") -> str:
    """Writes the facts of one cause; returns their source."""
    makers: dict[str, tuple[Callable[..., Iterator[Recorded]], ...]] = {
        LIVE: (from_training, from_recording, from_scene),
        DISAGREEMENT: (from_training, from_scene),
        HOSTS: (from_scene,),
        RECORDED: (from_dumps, from_logs, from_simulation, from_made_log),
    }
    for make in makers[kind]:
        more = (warm, wanted) if make is from_training else ()
        found = next(make(kind, name, *more), None)
        if found is not None:
            path = facts_file(kind, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")
            return found["made"]
    return "NOTHING FOUND"


def main() -> None:
    """Records the causes that are named, or those that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="causes; without any, those that have no facts yet")
    wanted = dict(given.partition("=")[::2] for given in parser.parse_args().names)
    warm = Warm()
    try:
        for kind, rules in RULES.items():
            for name in dict.fromkeys(rule.name for rule in rules):
                if name in wanted if wanted else not facts_file(kind, name).exists():
                    print(f"{name} ({kind}): {record(kind, name, warm, wanted.get(name, ''))}", flush=True)
    finally:
        warm.close()


if __name__ == "__main__":
    main()
