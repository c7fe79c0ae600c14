"""CTC speech recognition in several languages; batches hold a fixed amount of audio."""

import random

import lightning as L
import torch
from buckets import DurationBatches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

LANGUAGES = ["de", "fi", "it", "pl"]
FRAMES = 10


def read_manifest(n: int = 2400, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    manifest = []
    for i in range(n):
        language = rng.choice(LANGUAGES)
        speaker = f"{language}-{rng.randrange(120):04d}"
        duration = min(18.0, max(1.0, rng.gauss(7.0, 4.0)))
        words = [rng.randrange(1, 32) for _ in range(max(1, int(duration)))]
        manifest.append({"id": f"utt{i:06d}", "speaker": speaker, "duration": duration, "text": words})
    return manifest


class Utterances(Dataset):
    def __init__(self, manifest: list[dict]) -> None:
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        utterance = self.manifest[i]
        frames = int(utterance["duration"] * FRAMES)
        g = torch.Generator().manual_seed(i)
        return torch.randn(frames, 20, generator=g), torch.tensor(utterance["text"])


def collate(items):
    features = nn.utils.rnn.pad_sequence([f for f, _ in items], batch_first=True)
    targets = torch.cat([t for _, t in items])
    return features, torch.tensor([len(f) for f, _ in items]), targets, torch.tensor([len(t) for _, t in items])


class Recognizer(L.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.GRU(20, 48, batch_first=True)
        self.head = nn.Linear(48, 32)

    def ctc(self, batch) -> torch.Tensor:
        features, lengths, targets, target_lengths = batch
        log_probs = self.head(self.encoder(features)[0]).log_softmax(-1)
        return F.ctc_loss(log_probs.transpose(0, 1), targets, lengths, target_lengths, zero_infinity=True)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        loss = self.ctc(batch)
        self.log("ctc", loss, prog_bar=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val_ctc", self.ctc(batch), sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Speech(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.manifest = read_manifest()
        self.held_out = read_manifest(n=64, seed=1)

    def train_dataloader(self) -> DataLoader:
        batches = DurationBatches(self.manifest, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(Utterances(self.manifest), batch_sampler=batches, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Utterances(self.held_out), batch_size=8, collate_fn=collate)


def main() -> None:
    L.seed_everything(17)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=3,
        use_distributed_sampler=False,
        gradient_clip_val=5.0,
    )
    trainer.fit(Recognizer(), datamodule=Speech())


if __name__ == "__main__":
    main()
