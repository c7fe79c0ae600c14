"""What Python does first in every program that the tests start: it looks for garbage less often, and stays in line.

torch and Lightning make half a million objects that stay; to look at them again and again is a tenth of their import.
A process that gives way to all others, as that which encodes media does, would start minutes later where tests keep all
cores busy, and these wait for it.
"""

import gc
import os

gc.set_threshold(100_000, 50, 100)
os.nice = lambda increment: 0  # type: ignore[assignment]
