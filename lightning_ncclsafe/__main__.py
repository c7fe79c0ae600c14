"""``python -m lightning_ncclsafe train.py``: as ``ncclsafe run train.py``, for launchers that start modules."""

import sys

from lightning_ncclsafe.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
