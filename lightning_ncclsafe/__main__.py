"""``python -m lightning_ncclsafe train.py``: as ``ncclsafe run train.py``, for launchers that start modules.

The commands of ``ncclsafe`` work, too, where that is not on the path. A program with the name of a command takes
precedence, as launchers cannot name it in another way.
"""

import os
import sys
from collections.abc import Sequence

from lightning_ncclsafe.cli import COMMANDS, main


def words_of(given: Sequence[str]) -> list[str]:
    """What ``ncclsafe`` is called with.

    Args:
        given: What follows ``python -m lightning_ncclsafe``.
    """
    first = given[0] if given else "--help"
    is_command = first in COMMANDS and not os.path.exists(first)
    return [*given] if is_command else ["--help"] if first in ("-h", "--help") else ["run", *given]


if __name__ == "__main__":
    sys.exit(main(words_of(sys.argv[1:])))
