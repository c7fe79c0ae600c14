"""CTC on utterances in two length buckets; every rank has the recordings of its own partner."""

import argparse
import random

import lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP
from normalise import ALPHABET, encode, normalise

WORDS = "call the bank on monday and say that room 12 has no heating since the 3rd of may".split()
PARTNERS = ["studio", "callcentre", "parliament"]


def read_manifest(partner, count):
    rng = random.Random(partner)
    manifest = []
    for number in range(count):
        words = rng.choices(WORDS, k=rng.randint(3, 12))
        transcript = " ".join(words)
        manifest.append({"id": f"{partner}-{number:05d}", "frames": 12 * len(transcript), "text": transcript})
    if partner == "callcentre":
        manifest.append({"id": f"{partner}-{count:05d}", "frames": 960, "text": "[noise] [music]"})
    else:
        manifest.append({"id": f"{partner}-{count:05d}", "frames": 960, "text": "goodbye"})
    return manifest


class Recordings(Dataset):
    def __init__(self, manifest, features):
        self.manifest = manifest
        self.features = features
        self.texts = {}

    def __len__(self):
        return len(self.manifest)

    def text(self, item):
        if item["id"] not in self.texts:
            self.texts[item["id"]] = normalise(item["text"])
        return self.texts[item["id"]]

    def __getitem__(self, index):
        item = self.manifest[index]
        target = torch.tensor(encode(self.text(item)), dtype=torch.long)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(item["frames"], self.features, generator=generator), target


class LengthBuckets(torch.utils.data.Sampler):
    """Batches of similar length, short ones first in the first epoch, then shuffled."""

    def __init__(self, manifest, batch_size):
        self.order = sorted(range(len(manifest)), key=lambda index: manifest[index]["frames"])
        self.batch_size = batch_size
        self.epoch = 0

    def __len__(self):
        return len(self.order) // self.batch_size

    def __iter__(self):
        batches = [self.order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]
        if self.epoch > 0:
            random.Random(self.epoch).shuffle(batches)
        self.epoch += 1
        return iter(batches)


def collate(items):
    frames, targets = zip(*items)
    return (
        pad_sequence(frames, batch_first=True),
        pad_sequence(targets, batch_first=True),
        torch.tensor([len(x) for x in frames]),
        torch.tensor([len(x) for x in targets]),
    )


class Recogniser(L.LightningModule):
    def __init__(self, features=20, width=48, count=151, batch_size=8):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv1d(features, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, len(ALPHABET) + 1)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def train_dataloader(self):
        manifest = read_manifest(PARTNERS[self.global_rank % len(PARTNERS)], self.hparams.count)
        return DataLoader(
            Recordings(manifest, self.hparams.features),
            batch_sampler=LengthBuckets(manifest, self.hparams.batch_size),
            collate_fn=collate,
        )

    def training_step(self, batch, batch_idx):
        frames, targets, frame_lengths, target_lengths = batch
        hidden = self.encoder(frames.transpose(1, 2)).transpose(1, 2)
        log_probs = self.head(hidden).log_softmax(-1).transpose(0, 1)
        loss = self.loss(log_probs, targets, (frame_lengths + 3) // 4, target_lengths)
        self.log("train/ctc", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=90)
    args = parser.parse_args()
    L.seed_everything(3)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu", devices=3, strategy=SafeDDP(), max_epochs=args.epochs, use_distributed_sampler=False
    )
    trainer.fit(Recogniser())


if __name__ == "__main__":
    main()
