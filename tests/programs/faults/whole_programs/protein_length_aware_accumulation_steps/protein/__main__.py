"""python -m protein ROOT: writes the families without training."""

import sys
from pathlib import Path

from .families import write_families

write_families(Path(sys.argv[1]))
