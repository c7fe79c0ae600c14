"""What SafeDDP, and CollectiveTimer with it, cost next to DDPStrategy with NCCL, as ratios of step times.

The ranks share one GPU and talk over loopback sockets, so a step takes longer than on a real machine: milliseconds mean
nothing elsewhere, and what the guard adds to a step is a smaller part of it here. What is "allowed" is so on CPUs.

python tests/programs/gpu/overhead.py
python tests/programs/gpu/overhead.py --ranks 4 --blocks 20 --guarded safe timer
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import step_overhead
from one_gpu import missing

# The benchmark for CPUs, with another program for each rank.
step_overhead.ONE_RANK = Path(__file__).with_name("overhead_rank.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="steps of one training")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of four trainings")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--guarded", nargs="+", choices=step_overhead.GUARDED, default=[*step_overhead.GUARDED])
    options = parser.parse_args()
    if reason := missing():
        print(f"nothing measured: {reason}")
        return
    for guarded in options.guarded:
        training = step_overhead.Training(
            steps=options.steps, ranks=options.ranks, data="known", batch_size=options.batch_size, guarded=guarded
        )
        step_overhead.show(step_overhead.measure(training, options.blocks))


if __name__ == "__main__":
    main()
