import argparse
import os

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP
from ppo.agent import PPOAgent
from ppo.rollouts import TASKS, RolloutStream


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    L.seed_everything(11)
    task = list(TASKS)[rank % len(TASKS)]
    stream = RolloutStream(task, args.episodes, horizon=64, obs_dim=24, n_actions=6, seed=100 + rank)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[LearningRateMonitor()],
        log_every_n_steps=10,
    )
    trainer.fit(PPOAgent(lr=args.lr), DataLoader(stream, batch_size=4))


if __name__ == "__main__":
    main()
