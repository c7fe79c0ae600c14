from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist


def setup():
    """torchrun has set the environment; Lightning uses the group that is there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


@lru_cache(maxsize=1)
def patient_group():
    return dist.new_group(backend="gloo", timeout=timedelta(hours=2))


@contextmanager
def main_process_first(what: str):
    """The main process runs the block alone, then the others do, with what it has left on the disk."""
    group, main = patient_group(), dist.get_rank() == 0
    if not main:
        dist.barrier(group)
    elif what:
        print(f"preparing {what} on the main process", flush=True)
    try:
        yield
    finally:
        if main:
            dist.barrier(group)
