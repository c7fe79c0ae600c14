"""Causes that dumps and logs show after a run: no rank was asked, and no Python stack was taken. One cause per file.

What they share is in ``kit``.
"""

from lightning_ncclsafe.rules.hang.gpu_memory_exhausted import gpu_memory_exhausted
from lightning_ncclsafe.rules.hang.shm_exhausted import shm_exhausted
from lightning_ncclsafe.rules.hang.worker_died import worker_died
from lightning_ncclsafe.rules.kit import WHAT_WAS_RECORDED

# What a traceback states explicitly comes first, and reads the same in a log.
RECORDED_RULES = (gpu_memory_exhausted, shm_exhausted, worker_died, *WHAT_WAS_RECORDED.of(__name__, __path__))
