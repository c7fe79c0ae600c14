"""One rank of a scene, of an abort or of a reading: writes down what it has measured and recorded.

Started by ``one_gpu.run_ranks``: ``python nccl_rank.py delay --ranks 2 --folder FOLDER``.
"""

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nccl_abort import ABORTS
from nccl_here import Here
from nccl_reads import READS
from nccl_scenes import SCENES
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lightning_ncclsafe._torch import build

# Beyond the end of any scene: what hangs is to be seen by the recorder, and not ended by the back end.
_TIMEOUT = timedelta(seconds=300)
_LEAVE = timedelta(seconds=30)


def join(ranks: int) -> Here:
    """Joins the process group: NCCL's where there is a GPU, else gloo's."""
    rank, on_gpu = int(os.environ["NODE_RANK"]), torch.cuda.is_available()
    store: Any = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=_TIMEOUT,
        # As Lightning does: the communicator is made at once.
        device_id=device if on_gpu else None,
    )
    return Here(rank, ranks, device, PrefixStore("scene", store.clone()), store)


def leave(here: Here) -> None:
    """Ends this process without a word to the back end, which may hang; the store's host goes last."""
    here.store.set(f"left/{here.rank}", "")
    if here.rank == 0:
        here.store.wait([f"left/{rank}" for rank in range(here.ranks)], _LEAVE)
    os._exit(0)


def perform(here: Here, name: str) -> dict[str, Any]:
    """What the rank has to tell of a scene."""
    if act := (ABORTS | READS).get(name):
        return act(here)
    truth = SCENES[name](here)
    told = {"truth": truth, "dump": here.dump(), "versions": build.versions()}
    here.meet("dumped")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*SCENES, *ABORTS, *READS])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    here = join(options.ranks)
    told = perform(here, options.name)
    (options.folder / f"told-{here.rank}.json").write_text(json.dumps(told))
    leave(here)


if __name__ == "__main__":
    main()
