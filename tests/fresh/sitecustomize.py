"""What Python does first in every program that the tests start: it looks for garbage less often.

torch and Lightning make half a million objects that stay; to look at them again and again is a tenth of their import.
"""

import gc

gc.set_threshold(100_000, 50, 100)
