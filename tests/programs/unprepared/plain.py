"""A training by hand: torch.distributed and DDP, no framework."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from hangs import HANGS, Here
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    here, hang = Here(Path(sys.argv[2])), HANGS[sys.argv[1]]()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    here.metrics, here.store = dist.new_group(), dist.distributed_c10d._get_default_store()
    hang.begin(here)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def train() -> None:
        for batch_idx, batch in enumerate(hang.loader(here)):
            hang.step(here, batch_idx)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        hang.end(here)

    hang.run(here, train)
    dist.barrier()


if __name__ == "__main__":
    main()
