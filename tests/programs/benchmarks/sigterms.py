"""SIGTERM at random instants of a training on two ranks: each time a checkpoint that loads, within the grace period.

Each run sanity-checks, accumulates gradients, validates in the middle of epochs and saves with a ModelCheckpoint. One
rank or both are told, once or twice, at an instant drawn anew each time: any, or one in the middle of what is drawn as
well. A run that has made no step has nothing to save. What is reported: whether both ranks have ended in time, whether
there is one checkpoint, whether it loads, and of which step it is next to those that ranks say they have made.

python tests/programs/benchmarks/sigterms.py --runs 200 --at-once 2
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parents[2]
sys.path.append(str(HERE))
from warm import Warm, ranks_of  # type: ignore[import-not-found]  # noqa: E402

FIT = HERE / "checkpoints" / "saved_fit.py"
GRACE_S = 30.0
OPTIONS = (
    "nothing",
    "--accumulate=3",
    "--pace=0.02",
    "--epochs=400",
    "--sanity",
    "--validate-every=3",
    "--save-every=2",
    "--says-stage",
)
STAGES = ("sanity check", "accumulation", "validation", "save", "between epochs")
# Until a rank does what is drawn.
AIM_S = 6.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run.

    Attributes:
        stage: What the first rank that was told did then.
        outcome: How it went, in words; in capitals what must not be.
        took_s: From the signal until both ranks had ended, seconds.
        said: What they have said.
    """

    stage: str
    outcome: str
    took_s: float
    said: str


def run_once(warm: Warm, folder: Path, instants: random.Random) -> Result:
    output = folder / "output"
    argv = [str(FIT), *OPTIONS, f"--root-dir={folder}"]
    told = instants.choice([[0], [1], [0, 1]])
    with output.open("wb") as file:
        envs = [os.environ | env for env in ranks_of(2)]
        ranks = [warm.start(argv, output=file.fileno(), cwd=folder, env=env) for env in envs]
        stage = wait_for_instant(folder / f"stage-{told[0]}", instants)
        began = time.monotonic()
        tell([ranks[rank].pid for rank in told], instants)
        try:
            for rank in ranks:
                rank.wait(max(began + GRACE_S - time.monotonic(), 0.01))
            outcome = ""
        except TimeoutError:
            outcome = "NOT ENDED IN TIME"
            for rank in ranks:
                rank.end_session()
    took_s, said = time.monotonic() - began, output.read_text(errors="replace")
    outcome = outcome or judge(said, [*(folder / "checkpoints").glob("just-in-time-*.ckpt")])
    return Result(stage=stage, outcome=outcome, took_s=took_s, said=said)


def wait_for_instant(path: Path, instants: random.Random) -> str:
    """What the rank does then: anything, or what is drawn."""

    def stage() -> str:
        with suppress(FileNotFoundError):
            return path.read_text()
        return "start"

    wanted = instants.choice([*STAGES, *[""] * len(STAGES)])
    if wanted != STAGES[0]:
        time.sleep(instants.uniform(0.3, 6.0))
    ends = time.monotonic() + AIM_S
    while wanted and stage() != wanted and time.monotonic() < ends:
        time.sleep(0.001)
    if wanted:
        time.sleep(instants.uniform(0.0, 0.02))
    return stage()


def tell(pids: Sequence[int], instants: random.Random) -> None:
    """Sends the signal, some times twice."""
    for _ in range(instants.choice([1, 1, 2])):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(instants.uniform(0.0, 0.2))


def judge(said: str, saved: Sequence[Path]) -> str:
    made = max(map(int, re.findall(r"step (\d+) was made", said)), default=0)
    if re.search(r"rank 0 has made \d+ steps", said):
        return "had ended before"
    if not saved:
        return "NOTHING SAVED" if made else "nothing to save yet"
    if len(saved) > 1:
        return "MORE THAN ONE SAVED"
    try:
        step = torch.load(saved[0], weights_only=False)["global_step"]
    except Exception as error:
        return f"DOES NOT LOAD: {error!r}"
    return "saved the last step" if step >= made else f"SAVED STEP {step} OF {made}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    warm, found = Warm(), list[Result]()

    def run(number: int) -> Result:
        with tempfile.TemporaryDirectory() as name:
            return run_once(warm, Path(name), random.Random(f"{options.seed}-{number}"))

    with ThreadPoolExecutor(options.at_once) as pool:
        for number, result in enumerate(pool.map(run, range(options.runs))):
            found.append(result)
            if result.outcome.split()[0].isupper():
                print(f"run {number}, {result.stage}: {result.outcome}\n{result.said}", flush=True)
    warm.close()
    for (stage, outcome), count in sorted(Counter((each.stage, each.outcome) for each in found).items()):
        print(f"{count:4d}  {stage}: {outcome}")
    for outcome, count in Counter(each.outcome for each in found).most_common():
        print(f"{count:4d}  {outcome}")
    print(f"from the signal to the end: {max(each.took_s for each in found):.1f} s at most, of {GRACE_S:.0f} s")


if __name__ == "__main__":
    main()
