"""Who finds the culprit in Flight Recorder dumps: ``python tests/programs/benchmarks/peers.py --nvrx path/to/its/src``.

Dumps of two real jobs on NCCL, of simulated ones and of such that were written step by step or as programs, read by
``ncclsafe diagnose``, by PyTorch's own analyser (``torch.distributed.flight_recorder``), and by ``fr_attribution`` of
NVIDIA's resiliency extension without its language model. That one is not part of what PyPI has (0.4.1): name the
``src`` folder of a checkout. Nothing here runs on a GPU.
"""

import argparse
import asyncio
import contextlib
import io
import logging
import pickle
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS / "reading"))

from further_incidents import FURTHER  # noqa: E402
from mixed_incidents import MIXED  # noqa: E402
from running_incidents import RUNNING  # noqa: E402
from simulated_incidents import incidents  # noqa: E402
from written_incidents import INCIDENTS  # noqa: E402

from lightning_ncclsafe.facts.findings import Confidence  # noqa: E402
from lightning_ncclsafe.reading.evidence import Artifacts  # noqa: E402
from lightning_ncclsafe.rules.judging import judge  # noqa: E402
from lightning_ncclsafe.rules.recorded import RECORDED_RULES  # noqa: E402

REAL = {"gpu_error_1st": (12, 14), "lock_gil_2nd": (10, 15)}
LATER = {*FURTHER, *MIXED}
Analyser = Callable[[Path], set[int]]


def ours(folder: Path) -> set[int]:
    """The ranks of all likely answers."""
    evidence = Artifacts()
    evidence.read(str(folder))
    job = evidence.job()
    found = judge(job, RECORDED_RULES).findings if job is not None else ()
    return {rank for finding in found if finding.confidence is not Confidence.POSSIBLE for rank in finding.ranks}


def of_torch(folder: Path) -> set[int]:
    """Ranks that its report calls missing in a collective, or culprits of a mismatch."""
    from torch.distributed.flight_recorder import fr_trace

    text = _said_by("Flight Recorder", lambda: fr_trace.main([str(folder), "-p", "_dump_", "--allow-incomplete-ranks"]))
    missing = re.findall(r"missing ranks:? *\{?([\d, ]+)", text, re.IGNORECASE)
    culprits = re.findall(r"[Cc]ulprit rank (\d+)", text)
    return {int(number) for numbers in [*missing, *culprits] for number in re.findall(r"\d+", numbers)}


def of_nvrx(folder: Path) -> set[int]:
    """Ranks that its table calls missing."""
    from nvidia_resiliency_ext.attribution.trace_analyzer import fr_attribution

    analyser = fr_attribution.CollectiveAnalyzer({"fr_path": str(folder), "pattern": "_dump_*"})
    text = asyncio.run(analyser.preprocess_FR_dumps())
    return set(fr_attribution._extract_missing_ranks_from_table(text))


def _said_by(name: str, run: Callable[[], object]) -> str:
    """What it logs and prints, also where it gives up."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger(name)
    kept, logger.handlers = logger.handlers, [handler]
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            run()
    except (Exception, SystemExit) as error:
        stream.write(f"\n{type(error).__name__}: {error}")
    finally:
        logger.handlers = kept
    return stream.getvalue()


@dataclass
class Tally:
    """How an analyser did.

    Attributes:
        right: Jobs of which it named all culprits and nobody else; of one without a culprit, nobody.
        of: Jobs.
        found: Culprits found.
        culprits: Culprits there were.
        false: Ranks named that are none.
        seconds: Processor time.
        failed: Jobs over which it failed.
    """

    right: int = 0
    of: int = 0
    found: int = 0
    culprits: int = 0
    false: int = 0
    seconds: float = 0.0
    failed: int = 0

    def add(self, analyser: Analyser, folder: Path, truth: set[int], among: set[int]) -> None:
        began = time.process_time()
        try:
            named = analyser(folder)
        except Exception:
            named = set()
            self.failed += 1
        self.seconds += time.process_time() - began
        self.of += 1
        self.culprits += len(truth)
        self.found += len(truth & named)
        self.false += len(named - truth - among)
        self.right += named >= truth and named <= truth | among and (bool(named) or not truth | among)


def write(folder: Path, dumps: dict[int, dict[str, Any]]) -> None:
    for rank, dump in dumps.items():
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


class Job(NamedTuple):
    """The dumps of one, whose fault it is, and who may be named beside."""

    kind: str
    dumps: dict[int, dict[str, Any]]
    truth: set[int]
    among: set[int]


def made(count: int) -> Iterator[Job]:
    """Simulated jobs, and those written step by step, of which dumps tell who it was."""
    for incident in incidents(count, first=5000):
        if incident.is_knowable:
            kind = "simulated, send and receive" if incident.has_p2p else "simulated, collectives alone"
            yield Job(kind, incident.dumps, set(incident.ranks), set(incident.among))
    for name, written in INCIDENTS.items():
        if written.is_sure:
            # Where all have called the same and none gets through, they may all be named.
            everybody = set(written.ranks) if written.kinds == ("all-joined",) else set()
            among = everybody or set(written.among)
            kind = "run as programs" if name in RUNNING else f"written step by step{', later' * (name in LATER)}"
            yield Job(kind, written.made(), set(written.ranks) - everybody, among)


def compare(analysers: dict[str, Analyser], count: int) -> dict[str, dict[str, Tally]]:
    """By kind of job, then by analyser."""
    table: dict[str, dict[str, Tally]] = defaultdict(lambda: defaultdict(Tally))
    for name, truth in REAL.items():
        for title, analyser in analysers.items():
            folder = TESTS / "reading" / "nccl_dumps" / name
            table["recorded from real jobs"][title].add(analyser, folder, set(truth), set())
    for job in made(count):
        with tempfile.TemporaryDirectory() as folder_of_dumps:
            write(Path(folder_of_dumps), job.dumps)
            for title, analyser in analysers.items():
                table[job.kind][title].add(analyser, Path(folder_of_dumps), job.truth, job.among)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="simulated incidents")
    parser.add_argument("--nvrx", help="the src folder of nvidia-resiliency-ext")
    told = parser.parse_args()
    analysers: dict[str, Analyser] = {"ncclsafe diagnose": ours, "torch's analyser": of_torch}
    if told.nvrx:
        sys.path.insert(0, told.nvrx)
        logging.getLogger("nvidia_resiliency_ext").setLevel(logging.WARNING)
        analysers["NVRx fr_attribution"] = of_nvrx
    print("| dumps | analyser | jobs right | culprits found | ranks falsely named | seconds a job | failed |")
    print("|---|---|---|---|---|---|---|")
    for kind, by_analyser in compare(analysers, told.count).items():
        for title, tally in by_analyser.items():
            print(
                f"| {kind} | {title} | {tally.right} of {tally.of} | {tally.found} of {tally.culprits} | {tally.false} "
                f"| {tally.seconds / tally.of:.2f} | {tally.failed} |"
            )


if __name__ == "__main__":
    main()
