"""Reading NCCL's recorder while another thread waits for the device in the driver: does Python go on meanwhile?"""

import threading
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from nccl_abort import GIVE_UP
from nccl_here import Here

from lightning_ncclsafe._torch import recorders
from lightning_ncclsafe.probes.process.flight_recorder import FlightRecorder

# The thread is in cudaFree by then.
_BEFORE_READING_S = 2.0
_CACHED_BYTES = 64 << 20


def behind_cuda_free(here: Here) -> dict[str, Any]:
    """Rank 0 waits for rank 1, which never comes; beside that memory is given back, which waits for the device."""
    dist.all_reduce(here.ones(8))
    here.sync()
    if here.rank != 0:
        here.store.wait(["told"], GIVE_UP)
        return {}
    cached = torch.empty(_CACHED_BYTES, dtype=torch.uint8, device=here.device)
    del cached
    dist.all_reduce(here.ones())
    freeing = threading.Thread(target=torch.cuda.empty_cache, daemon=True)
    freeing.start()
    freeing.join(_BEFORE_READING_S)
    is_over, ticks = threading.Event(), [time.monotonic()]

    def tick() -> None:
        while not is_over.wait(0.01):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    recorder = FlightRecorder()
    answers = recorders.driver_answers()
    _, collectives = recorder.read()
    is_over.set()
    ticking.join()
    told = {
        "is_freeing": freeing.is_alive(),
        "driver_answers": answers,
        "collectives": len(collectives),
        "unrecorded": [group.why for group in recorder.unrecorded],
        "longest_pause_s": max(after - before for before, after in pairwise(ticks)),
    }
    here.store.set("told", "")
    return told


READS = {"behind_cuda_free": behind_cuda_free}
