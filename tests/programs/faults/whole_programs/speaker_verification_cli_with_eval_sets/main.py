"""Speaker embeddings, configured by LightningCLI: python main.py fit --config config.yaml"""

from collections import defaultdict

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CONDITIONS = ["clean", "phone", "far_field", "babble", "reverb"]


class Segments(Dataset):
    """Segments with a speaker and, for evaluation, the recording condition."""

    def __init__(self, n: int, speakers: int, seed: int, conditions: list[str]) -> None:
        g = torch.Generator().manual_seed(seed)
        self.speaker = torch.randint(speakers, (n,), generator=g)
        voices = torch.randn(speakers, 24, generator=torch.Generator().manual_seed(99))
        self.features = voices[self.speaker][:, None, :] + torch.randn(n, 20, 24, generator=g)
        self.conditions = [conditions[(i // 6) % len(conditions)] for i in range(n)]

    def __len__(self) -> int:
        return len(self.speaker)

    def __getitem__(self, i: int):
        return {"features": self.features[i], "speaker": self.speaker[i], "condition": self.conditions[i]}


class SpeakerData(L.LightningDataModule):
    def __init__(self, speakers: int = 40, batch_size: int = 16, babble_trials: list[int] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        speakers = self.hparams.speakers
        self.train = Segments(800, speakers, 0, ["clean"])
        self.evaluation = Segments(192, speakers, 1, ["clean", "phone", "far_field", "reverb"])
        for trial in self.hparams.babble_trials or []:
            self.evaluation.conditions[trial] = "babble"

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.evaluation, batch_size=self.hparams.batch_size)


class SpeakerNet(L.LightningModule):
    def __init__(self, speakers: int = 40, width: int = 64, lr: float = 2e-3, min_trials: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.frames = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width))
        self.classify = nn.Linear(width, speakers)
        self.correct: dict[str, list[float]] = defaultdict(list)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.frames(features).mean(1))

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["features"]), batch["speaker"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.correct.clear()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        logits = self(batch["features"])
        hits = (logits.argmax(-1) == batch["speaker"]).float()
        self.log("val_accuracy", hits.mean(), sync_dist=True, prog_bar=True)
        for condition, hit in zip(batch["condition"], hits.tolist(), strict=True):
            self.correct[condition].append(hit)

    def on_validation_epoch_end(self) -> None:
        for condition in CONDITIONS:
            hits = self.correct[condition]
            if len(hits) >= self.hparams.min_trials:
                accuracy = sum(hits) / len(hits)
                self.log(f"val_accuracy_{condition}", accuracy, sync_dist=True)  # <- here

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    LightningCLI(SpeakerNet, SpeakerData, seed_everything_default=15)


if __name__ == "__main__":
    main()
