"""A reranker of help articles: query and article in, relevance out."""

import argparse
import random
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP
from tokenizing import TokenizerClient

VOCABULARY, LENGTH = 5000, 24
TOPICS = {
    "billing": "invoice payment refund card charge",
    "network": "vpn wifi proxy cable router",
    "account": "login password user profile lock",
    "device": "screen battery keyboard fan dock",
}
ARTICLES_A_DAY = {"emea": 32}


class Pairs(Dataset):
    def __init__(self, count, seed):
        rng = random.Random(seed)
        self.pairs = []
        for _ in range(count):
            topic, other = rng.choices(list(TOPICS), k=2)
            query = " ".join(rng.choices(TOPICS[topic].split(), k=3))
            article = " ".join(rng.choices(TOPICS[other].split(), k=12))
            self.pairs.append((f"{query} {article}", float(topic == other)))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class Tokenized:
    """Collates texts; what was seen before comes from a cache in memory."""

    def __init__(self, client):
        self.client = client
        self.cache = {}

    def __call__(self, items):
        texts, labels = zip(*items)
        missing = [text for text in texts if text not in self.cache]
        if missing:
            self.cache.update(zip(missing, self.client.tokenize(missing, LENGTH)))
        return torch.tensor([self.cache[text] for text in texts]), torch.tensor(labels)


class Reranker(L.LightningModule):
    def __init__(self, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.EmbeddingBag(VOCABULARY, width, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids):
        return self.body(self.embed(ids)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(ids), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        ids, labels = batch
        self.log("val/accuracy", ((self(ids) > 0) == labels.bool()).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class HardNegatives(L.Callback):
    """Now and then: how high do articles score that were written today in this rank's market?"""

    def __init__(self, collate, markets, every=20):
        self.collate, self.markets, self.every = collate, markets, every

    def on_train_epoch_end(self, trainer, module):
        if (trainer.current_epoch + 1) % self.every:
            return
        market = self.markets[trainer.global_rank]
        fresh = Pairs(ARTICLES_A_DAY.get(market, 0), seed=f"{market}-{trainer.current_epoch}")
        if not len(fresh):
            return
        ids, _ = self.collate([fresh[index] for index in range(len(fresh))])
        with torch.no_grad():
            scores = module(ids).sigmoid()
        module.log("train/hardest", scores.max().item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=400)
    args = parser.parse_args()
    L.seed_everything(2)
    torch.set_num_threads(1)
    collate = Tokenized(TokenizerClient(VOCABULARY))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        check_val_every_n_epoch=5,
        callbacks=[HardNegatives(collate, ["apac", "emea", "amer"], every=40)],
    )
    train = DataLoader(Pairs(1200, 0), batch_size=16, shuffle=True, collate_fn=collate)
    val = DataLoader(Pairs(96, 1), batch_size=16, collate_fn=collate)
    began = time.monotonic()
    trainer.fit(Reranker(), train, val)
    print(f"trained for {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
