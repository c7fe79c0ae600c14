"""SIGTERM at random instants of a training on two ranks: each time a checkpoint that loads, within the grace period.

Each run sanity-checks, accumulates gradients, validates in the middle of epochs and saves with a ModelCheckpoint. One
rank or both are told, once or twice, at an instant drawn anew each time. A run that has made no step has nothing to
save. What is reported: whether both ranks have ended in time, whether there is one checkpoint, whether it loads, and of
which step it is next to those that ranks say they have made.

python tests/programs/benchmarks/sigterms.py --runs 200
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
from contextlib import suppress
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
)


def run_once(warm: Warm, folder: Path, instants: random.Random) -> str:
    """One run; how it went, in words."""
    output = folder / "output"
    argv = [str(FIT), *OPTIONS, f"--root-dir={folder}"]
    with output.open("wb") as file:
        envs = [os.environ | env for env in ranks_of(2)]
        ranks = [warm.start(argv, output=file.fileno(), cwd=folder, env=env) for env in envs]
        time.sleep(instants.uniform(0.3, 6.0))
        tell([ranks[rank].pid for rank in instants.choice([[0], [1], [0, 1]])], instants)
        try:
            ends = time.monotonic() + GRACE_S
            for rank in ranks:
                rank.wait(max(ends - time.monotonic(), 0.01))
        except TimeoutError:
            for rank in ranks:
                rank.end_session()
            return "NOT ENDED IN TIME"
    return judge(output.read_text(errors="replace"), [*(folder / "checkpoints").glob("just-in-time-*.ckpt")])


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
    options = parser.parse_args()
    instants, outcomes, warm = random.Random(options.seed), Counter[str](), Warm()
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as name:
            outcome = run_once(warm, Path(name), instants)
            outcomes[outcome] += 1
            if outcome.isupper() or outcome.split()[0].isupper():
                print(f"run {number}: {outcome}\n{(Path(name) / 'output').read_text(errors='replace')}", flush=True)
    warm.close()
    for outcome, count in outcomes.most_common():
        print(f"{count:4d}  {outcome}")


if __name__ == "__main__":
    main()
