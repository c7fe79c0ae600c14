"""Video captioning head; clips may come without an audio track."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelSummary
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP


class Clips(Dataset):
    """Pre-extracted features. About one clip in five has no audio (muted uploads, screen recordings)."""

    def __init__(self, n=2400, silent=0.2, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.video = torch.randn(n, 8, 32, generator=g)
        self.audio = torch.randn(n, 16, 20, generator=g)
        self.has_audio = torch.rand(n, generator=g) > silent
        self.words = torch.randint(0, 64, (n, 10), generator=g)

    def __len__(self):
        return len(self.video)

    def __getitem__(self, i):
        sample = {"video": self.video[i], "words": self.words[i]}
        if self.has_audio[i]:
            sample["audio"] = self.audio[i]
        return sample


def collate(samples):
    batch = {k: torch.stack([s[k] for s in samples]) for k in ("video", "words")}
    rows = [i for i, s in enumerate(samples) if "audio" in s]
    batch["audio_rows"] = torch.tensor(rows, dtype=torch.long)
    if rows:
        batch["audio"] = torch.stack([samples[i]["audio"] for i in rows])
    return batch


class Captioner(L.LightningModule):
    def __init__(self, dim=48, vocab=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.video_encoder = nn.GRU(32, dim, batch_first=True)
        self.audio_encoder = nn.GRU(20, dim, batch_first=True)
        self.fuse = nn.Linear(2 * dim, dim)
        self.embed = nn.Embedding(vocab, dim)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def encode(self, batch):
        _, v = self.video_encoder(batch["video"])
        v = v[0]
        a = torch.zeros_like(v)
        if len(batch["audio_rows"]) > 0:  # <- here
            _, h = self.audio_encoder(batch["audio"])
            a = a.index_copy(0, batch["audio_rows"], h[0])
        return self.fuse(torch.cat([v, a], -1)).tanh()

    def forward(self, batch):
        state = self.encode(batch)
        h, _ = self.decoder(self.embed(batch["words"][:, :-1]), state[None])
        return self.out(h)

    def training_step(self, batch, batch_idx):
        logits = self(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["words"][:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/audio_share", len(batch["audio_rows"]) / len(logits))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-device-batch", type=int, default=3)
    parser.add_argument("--max-epochs", type=int, default=5)
    args = parser.parse_args()
    L.seed_everything(21, workers=True)
    torch.set_num_threads(1)
    loader = DataLoader(Clips(), batch_size=args.per_device_batch, shuffle=True, collate_fn=collate)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.max_epochs,
        callbacks=[ModelSummary(max_depth=2)],
        gradient_clip_val=1.0,
    )
    trainer.fit(Captioner(), loader)


if __name__ == "__main__":
    main()
