"""Recipe retrieval: image and ingredient encoders, trained with the fused classifier loss."""

import random
from pathlib import Path

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCAB, CUISINES = 500, 12


def write_manifest(path, n=1536, seed=5):
    """image id, cuisine, ingredient ids (crawled pages sometimes have none)."""
    rng = random.Random(seed)
    lines = []
    for i in range(n):
        has_text = not 400 <= i < 462
        words = [str(rng.randrange(VOCAB)) for _ in range(rng.randint(3, 9))] if has_text else []
        lines.append("\t".join([str(i), str(rng.randrange(CUISINES)), " ".join(words)]))
    path.write_text("\n".join(lines))


class Recipes(Dataset):
    def __init__(self, manifest):
        self.rows = [line.split("\t") for line in Path(manifest).read_text().split("\n")]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        image_id, cuisine, words = self.rows[i]
        gen = torch.Generator().manual_seed(int(image_id))
        image = torch.randn(3, 32, 32, generator=gen)
        return image, torch.tensor([int(w) for w in words.split()], dtype=torch.long), int(cuisine)


def collate(samples):
    images, tokens, labels = zip(*samples)
    rows = [i for i, t in enumerate(tokens) if len(t)]
    kept = [tokens[i] for i in rows]
    offsets = torch.tensor([0] + [len(t) for t in kept[:-1]]).cumsum(0) if kept else torch.zeros(0, dtype=torch.long)
    flat = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.long)
    return {
        "image": torch.stack(images),
        "rows": torch.tensor(rows, dtype=torch.long),
        "tokens": flat,
        "offsets": offsets,
        "label": torch.tensor(labels),
    }


class ImageEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, dim),
        )

    def forward(self, x):
        return self.net(x)


class IngredientEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim)
        self.proj = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, tokens, offsets):
        return self.proj(self.bag(tokens, offsets))


class RecipeModel(L.LightningModule):
    def __init__(self, dim=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.image = ImageEncoder(dim)
        self.ingredients = IngredientEncoder(dim)
        self.head = nn.Linear(dim, CUISINES)

    def embed(self, batch):
        fused = self.image(batch["image"])
        if batch["rows"].numel():  # <- here
            text = self.ingredients(batch["tokens"], batch["offsets"])
            fused = fused.index_add(0, batch["rows"], text)
        return fused

    def training_step(self, batch, batch_idx):
        logits = self.head(self.embed(batch))
        loss = F.cross_entropy(logits, batch["label"])
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/with_text", batch["rows"].numel() / len(batch["label"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class ContiguousShards(torch.utils.data.Sampler):
    """Every rank reads one contiguous range, so that the image archive is read in order."""

    def __init__(self, data, rank, world_size):
        per_rank = len(data) // world_size
        self.indices = range(rank * per_rank, (rank + 1) * per_rank)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class RecipeData(L.LightningDataModule):
    def __init__(self, root="data", batch_size=16):
        super().__init__()
        self.manifest = Path(root) / "recipes.tsv"
        self.batch_size = batch_size

    def prepare_data(self):
        self.manifest.parent.mkdir(exist_ok=True)
        write_manifest(self.manifest)

    def train_dataloader(self):
        data = Recipes(self.manifest)
        sampler = ContiguousShards(data, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(data, self.batch_size, sampler=sampler, collate_fn=collate)


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        max_epochs=10,
        strategy=SafeDDP(),
        use_distributed_sampler=False,
        log_every_n_steps=10,
    )
    trainer.fit(RecipeModel(), RecipeData())
