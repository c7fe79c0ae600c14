"""A training with Hugging Face's Accelerate."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from hangs import HANGS, Here
from torch import nn


def main() -> None:
    here, hang = Here(Path(sys.argv[2])), HANGS[sys.argv[1]]()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=20))])
    here.metrics, here.store = dist.new_group(), dist.distributed_c10d._get_default_store()
    hang.begin(here)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    # Every rank has a part of its own, which is not to be divided once more.
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = hang.loader(here)

    def train() -> None:
        for batch_idx, batch in enumerate(loader):
            hang.step(here, batch_idx)
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        hang.end(here)

    hang.run(here, train)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
