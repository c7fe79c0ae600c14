"""Causes that dumps and logs show after a run: no rank was asked, and no Python stack was taken. One cause per file.

``roots`` is what most of them read: where waiting ends, and why. It draws the graph of who waits for whom from the
``calls`` of all ranks. ``divergences`` are calls that differ under one number, ``ends`` how ranks ended, ``statements``
what lines of a log state, and ``evidence`` the words.
"""

from lightning_ncclsafe.rules.hang.gpu_memory_exhausted import gpu_memory_exhausted
from lightning_ncclsafe.rules.hang.shm_exhausted import shm_exhausted
from lightning_ncclsafe.rules.hang.worker_died import worker_died
from lightning_ncclsafe.rules.kit import WHAT_WAS_RECORDED

# What a traceback states explicitly comes first, and reads the same in a log.
RECORDED_RULES = (gpu_memory_exhausted, shm_exhausted, worker_died, *WHAT_WAS_RECORDED.of(__name__, __path__))
