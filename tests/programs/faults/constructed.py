"""Writes the constructed recordings anew: ``python tests/programs/faults/constructed.py``.

They are written by hand after what such jobs are known to leave: watchdog lines, recorders' counters, NVML, kernel
logs in public threads. None of them is a recording of NCCL; those are made by ``make gpu``.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1] / "rules"), str(FOLDER.parents[1]), str(FOLDER)]

import constructed_devices  # noqa: E402
import constructed_jobs  # noqa: E402
from constructing import MADE  # noqa: E402
from recorded import write  # noqa: E402

THEMES = (constructed_devices, constructed_jobs)


def main() -> None:
    for name, one in MADE.items():
        print(write(name, one.causes, one.ranks, one.job()).name)


if __name__ == "__main__":
    main()
