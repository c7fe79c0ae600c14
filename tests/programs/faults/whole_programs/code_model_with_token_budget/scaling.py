import argparse
import os

import lightning as L
from torch.utils.data import DataLoader

from budgeted.batching import SourceFiles, StridedBlocks, collate
from budgeted.callbacks import TokenBudget
from budgeted.model import TinyCodeLM
from lightning_ncclsafe import SafeDDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=150_000)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(6)
    rank = int(os.environ["RANK"])
    train, val = SourceFiles(6000, 128, seed=0), SourceFiles(360, 128, seed=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=20,
        use_distributed_sampler=False,
        callbacks=[TokenBudget(args.budget)],
    )
    trainer.fit(
        TinyCodeLM(dim=args.dim),
        DataLoader(train, batch_sampler=StridedBlocks(len(train), 10, rank, args.devices), collate_fn=collate),
        DataLoader(val, batch_sampler=StridedBlocks(len(val), 10, rank, args.devices), collate_fn=collate),
    )


if __name__ == "__main__":
    main()
