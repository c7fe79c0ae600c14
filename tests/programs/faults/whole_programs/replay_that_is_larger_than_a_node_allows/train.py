import argparse
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from environments import SIDE, make
from lightning.pytorch.callbacks import ModelCheckpoint
from replay import Experience, Replay
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class Agent(L.LightningModule):
    def __init__(
        self, replay: Replay, batch_size: int, batches: int, epsilon: float = 0.3, gamma: float = 0.97
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["replay"])
        self.replay = replay
        self.q = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * (SIDE // 8) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, 4),
        )

    @torch.no_grad()
    def act(self, frame: torch.Tensor) -> int:
        if torch.rand(()) < self.hparams.epsilon:
            return int(torch.randint(4, ()))
        return int(self.q(frame).argmax())

    def train_dataloader(self) -> DataLoader:
        world = make(self.trainer.global_rank)
        experience = Experience(world, self.act, self.replay, self.hparams.batch_size, self.hparams.batches)
        return DataLoader(experience, batch_size=None)

    def training_step(self, batch, batch_idx):
        frames, actions, rewards, following, done = batch
        with torch.no_grad():
            target = rewards + self.hparams.gamma * self.q(following).max(dim=1).values * ~done
        value = self.q(frames).gather(1, actions[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, target.float())
        self.log_dict({"td_loss": loss, "remembered": float(len(self.replay))}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--node-memory", type=int, default=900, help="MB for each process")
    args = parser.parse_args()

    if "LOCAL_RANK" not in os.environ:
        guard = Path(__file__).with_name("memory_guard.py")
        subprocess.Popen([sys.executable, str(guard), str(os.getpid()), "--megabytes", str(args.node_memory)])

    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(every_n_train_steps=200, save_top_k=-1)],
    )
    trainer.fit(Agent(Replay(), args.batch_size, args.steps))


if __name__ == "__main__":
    main()
