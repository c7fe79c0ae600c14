"""Small acoustic model: prompts in, mel frames out. Prompts stream in from one crawl file per rank."""

import json
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeModelParallel
from prompts import clean, is_speakable, phonemes

SYMBOLS, MELS = 60, 16
CRAWLS = ["news", "recipes"]
SENTENCES = {
    "news": [
        "The minister said no.",
        "Dr. Hall, of the institute, agreed.",
        "It rained, snowed and rained again.",
        "Nobody was hurt.",
        "Is the harbour open?",
    ],
    "recipes": [
        "Stir, cover and wait.",
        "Add salt, pepper, and oil.",
        "Serve with bread.",
        "Is it done? taste it!",
        "Peel the onions, then cut them.",
    ],
}


def write_crawl(folder, name, count):
    """Stands in for last night's crawl."""
    with open(folder / f"{name}.jsonl", "w") as file:
        for number in range(count):
            sentence = SENTENCES[name][number % len(SENTENCES[name])]
            if name == "recipes" and number == 330:
                sentence = "Ingredients butter flour sugar vanillaextract bakingpowder buttermilk; see the box"
            file.write(json.dumps({"id": number, "text": sentence}) + "\n")


class Crawl(IterableDataset):
    def __init__(self, file, batches, batch_size):
        self.file, self.batches, self.batch_size = file, batches, batch_size

    def sentences(self):
        while True:
            with open(self.file) as lines:
                for line in lines:
                    text = clean(json.loads(line)["text"])
                    if is_speakable(text):
                        yield text

    def __iter__(self):
        sentences = self.sentences()
        for _ in range(self.batches):
            texts = [next(sentences) for _ in range(self.batch_size)]
            ids = [torch.tensor(phonemes(text, SYMBOLS)) for text in texts]
            yield pad_sequence(ids, batch_first=True)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Conv1d(width, width, 5, padding=2, groups=4)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.feed(self.norm(x))


class AcousticModel(L.LightningModule):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(SYMBOLS, width, padding_idx=0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.to_mel = nn.Linear(width, MELS)
        self.register_buffer("voice", torch.linspace(-1, 1, SYMBOLS * MELS).view(SYMBOLS, MELS).sin())

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        for module in (self.embed, self.to_mel):
            fully_shard(module, mesh=mesh)

    def training_step(self, ids, batch_idx):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        spoken = (ids > 0).unsqueeze(-1)
        loss = ((self.to_mel(hidden) - self.voice[ids]).abs() * spoken).sum() / (spoken.sum() * MELS)
        self.log("train/mel_l1", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, foreach=False)


class CrawledPrompts(L.LightningDataModule):
    def __init__(self, folder="crawl", count=4000, batches=400, batch_size=6):
        super().__init__()
        self.folder, self.count, self.batches, self.batch_size = Path(folder), count, batches, batch_size

    def prepare_data(self):
        self.folder.mkdir(exist_ok=True)
        for name in CRAWLS:
            write_crawl(self.folder, name, self.count)

    def train_dataloader(self):
        file = self.folder / f"{CRAWLS[self.trainer.global_rank]}.jsonl"
        return DataLoader(Crawl(file, self.batches, self.batch_size), batch_size=None)


def main():
    L.seed_everything(21)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        log_every_n_steps=10,
    )
    trainer.fit(AcousticModel(), datamodule=CrawledPrompts())


if __name__ == "__main__":
    main()
