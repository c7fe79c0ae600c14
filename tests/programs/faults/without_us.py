"""What a person has without us, of the same faults: ``python tests/programs/faults/without_us.py --json stock.json``.

Each training runs with Lightning's own DDPStrategy, whose collectives time out after 15 s here. It is counted how often
its ranks end by themselves, and how often a traceback that they print shows the line that is to blame. ``--keep`` keeps
what such a run leaves, which ``ncclsafe diagnose`` reads: the log and, with ``--gpu``, dumps of all ranks' Flight
Recorders. With gloo, PyTorch's own analyser (``torch.distributed.flight_recorder``) is no help: no timeout of gloo's
writes dumps, and of those that are written for it, it fails (torch 2.13: ``KeyError`` for the default group). With
NCCL, it reads what ``--keep`` has kept where no rank's dump is missing; ``docs/cost/accuracy.md`` compares the two.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER)]

from running import run_case  # noqa: E402
from scoreboard import AT_ONCE, chosen  # noqa: E402
from truths import Case  # noqa: E402
from warm import Warm  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """What there was of one case.

    Attributes:
        case: Its name.
        ended: Whether all ranks have ended by themselves.
        shows_line: Whether a traceback shows the line; None where none is to blame.
    """

    case: str
    ended: bool
    shows_line: bool | None


def without(warm: Warm, case: Case, *, on_gpu: bool = False, keep: Path | None = None) -> Without | None:
    """Runs a case; None where it cannot be run here.

    Args:
        warm: What its ranks are forked from.
        case: The case.
        on_gpu: Whether the ranks share one GPU and communicate with NCCL.
        keep: Where the log and the dumps are kept, in a folder for each case; None where they are not.
    """
    outcome = run_case(warm, case, strategy="DDPStrategy", on_gpu=on_gpu)
    if outcome.skipped:
        return None
    if keep is not None:
        folder = keep / case.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.log").write_text(outcome.output)
        for rank, dump in outcome.dumps.items():
            (folder / f"nccl_trace_rank_{rank}").write_bytes(dump)
    file, _, line = case.place.strip().rpartition(":")
    return Without(
        case=case.name,
        ended=len(outcome.exit_codes) == case.world_size,
        shows_line=f'File "{file}", line {line}, in' in outcome.output if case.place else None,
    )


def share(answers: Iterable[bool | None]) -> str:
    known = [answer for answer in answers if answer is not None]
    return f"{sum(known)} of {len(known)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what there was of each, too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, scenarios or causes")
    parser.add_argument("--from-threads", action="store_true", help="only those written after public threads")
    parser.add_argument("--gpu", action="store_true", help="ranks share one GPU and communicate with NCCL")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what a run leaves: its log and its dumps")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases that run at a time (default: %(default)s)")
    options = parser.parse_args()
    cases = [case for case in chosen(options.only, "SafeDDP") if case.scenario.needs != "recording"]
    faults = [case for case in cases if not case.is_healthy and (case.scenario.source or not options.from_threads)]
    warm = Warm()
    try:
        with ThreadPoolExecutor(options.at_once) as pool:
            each = pool.map(lambda case: without(warm, case, on_gpu=options.gpu, keep=options.keep), faults)
            found = [one for one in each if one is not None]
    finally:
        warm.close()
    print(f"all ranks end by themselves: {share(one.ended for one in found)}")
    print(f"a traceback shows the line: {share(one.shows_line for one in found)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
