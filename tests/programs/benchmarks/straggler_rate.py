"""How often a straggler is named rightly, one rank that is 20 ms late in a tenth of the steps; and how often falsely.

Real trainings on gloo ranks that share this machine's cores. In every other one a rank is late from one step on, in
data loading, forward/backward, the optimizer or a hook; it has to be named, with its phase, within the next 200 steps.
In the others nobody is late, and nobody may be named.

python tests/programs/benchmarks/straggler_rate.py --runs 20
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from step_overhead import run_ranks

SCRIPT = Path(__file__).with_name("straggler_rank.py")
WITHIN_STEPS = 200
# The run goes on, so that nothing is named only because it ends.
AFTERWARDS = 100


def verdict(case: dict[str, Any], from_step: int) -> str:
    named = case["named"]
    if case["rank"] < 0:
        return "quiet" if not named else f"FALSE ALARM {named}"
    if not named:
        return "MISSED"
    first = named[0]
    right = (first["rank"], first["phase"]) == (case["rank"], case["phase"])
    steps = first["step"] - from_step
    return f"{'right' if right and steps <= WITHIN_STEPS else 'WRONG OR LATE'} after {steps} steps {first}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--from-step", type=int, default=100, help="the step from which one rank is late")
    parser.add_argument("--device-ms", type=float, default=0, help="what every step waits for, as if for a device")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = options.from_step + WITHIN_STEPS + AFTERWARDS
    arguments = [f"--runs={options.runs}", f"--steps={steps}", f"--from-step={options.from_step}"]
    arguments += [f"--seed={options.seed}", f"--device-ms={options.device_ms}"]
    with tempfile.TemporaryDirectory() as folder:
        first_rank, *_ = run_ranks(SCRIPT, arguments, options.ranks, folder)
    for case in first_rank:
        print(f"rank {case['rank']:2} {case['phase']:20} {case['step_ms']:6.1f} ms a step: ", end="")
        print(verdict(case, options.from_step))
    late = [verdict(case, options.from_step) for case in first_rank if case["rank"] >= 0]
    healthy = [verdict(case, options.from_step) for case in first_rank if case["rank"] < 0]
    print(f"named rightly in time: {sum(one.startswith('right') for one in late)} of {len(late)}")
    print(f"healthy runs without an alarm: {sum(one == 'quiet' for one in healthy)} of {len(healthy)}")


if __name__ == "__main__":
    main()
