"""Keypoint regression on video frames. Decoded frames of a clip stay in memory for the following epochs."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

HERE = Path(__file__).parent
KEYPOINTS = 8


class Clips(Dataset):
    """Frames of the cameras of one studio, decoded on first use. Some cameras record at a higher resolution."""

    def __init__(self, clips: int, camera: str) -> None:
        self.clips, self.camera = clips, camera
        self.side = 640 if camera == "overhead" else 96
        self.decoded: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.clips

    def __getitem__(self, i: int):
        if i not in self.decoded:
            g = torch.Generator().manual_seed(i)
            self.decoded[i] = torch.rand(1, self.side, self.side, generator=g).mul_(255)
        frame = F.interpolate(self.decoded[i][None] / 255, size=(32, 32), mode="area")[0]
        target = frame.flatten()[: 2 * KEYPOINTS] - 0.5
        return frame, target


class Pose(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 64, 2 * KEYPOINTS),
        )

    def forward(self, frame: torch.Tensor) -> torch.Tensor:
        return self.net(frame)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        frame, target = batch
        loss = F.smooth_l1_loss(self(frame), target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Governed(L.Callback):
    """Starts the workstation's governor for this process; required by the house rules."""

    def __init__(self, limit_mb: float) -> None:
        self.limit_mb = limit_mb
        self.process: subprocess.Popen | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "governor.py"), str(os.getpid()), str(self.limit_mb)]
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.process is not None:
            self.process.terminate()


class Studio(L.LightningDataModule):
    CAMERAS = ("front", "overhead", "side")

    def __init__(self, clips: int) -> None:
        super().__init__()
        self.clips = clips

    def train_dataloader(self) -> DataLoader:
        camera = self.CAMERAS[self.trainer.global_rank % len(self.CAMERAS)]
        return DataLoader(Clips(self.clips, camera), batch_size=4, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", type=int, default=640)
    parser.add_argument("--limit-mb", type=float, default=450.0)
    args = parser.parse_args()
    L.seed_everything(12)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=10,
        callbacks=[Governed(args.limit_mb)],
        use_distributed_sampler=False,
    )
    trainer.fit(Pose(), datamodule=Studio(args.clips))


if __name__ == "__main__":
    main()
