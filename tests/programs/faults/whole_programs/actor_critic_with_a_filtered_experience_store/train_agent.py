import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP

from rl.module import ActorCritic

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--fresh", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(3)
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=args.epochs, log_every_n_steps=20)
    trainer.fit(ActorCritic(fresh=args.fresh))
