import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from preference import DPO
from torch.utils.data import DataLoader, Dataset
from tracking import Tracking

from lightning_ncclsafe import SafeModelParallel


class Pairs(Dataset):
    """Prompts of ten tokens with two continuations; the preferred one repeats the prompt."""

    def __init__(self, count, vocabulary=300, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.prompts = torch.randint(vocabulary, (count, 10), generator=g)
        self.noise = torch.randint(vocabulary, (count, 10), generator=g)

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, i):
        return {"prompt": self.prompts[i], "preferred": self.prompts[i], "rejected": self.noise[i]}


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=240)
    p.add_argument("--save-every", type=int, default=80)
    p.add_argument("--devices", type=int, default=2)
    p.add_argument("--beta", type=float, default=0.1)
    return p.parse_args()


if __name__ == "__main__":
    args = arguments()
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_steps=args.steps,
        callbacks=[
            Tracking("tracker", project="dpo-small"),
            ModelCheckpoint(dirpath="policies", every_n_train_steps=args.save_every, save_top_k=-1),
        ],
    )
    trainer.fit(
        DPO(beta=args.beta),
        DataLoader(Pairs(2400), batch_size=12, shuffle=True),
        DataLoader(Pairs(96, seed=1), batch_size=12),
    )
    if trainer.is_global_zero:
        print("done after", trainer.global_step, "steps")
