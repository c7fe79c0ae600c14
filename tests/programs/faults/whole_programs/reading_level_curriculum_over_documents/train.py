import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from corpus import VOCAB, Documents, write_corpus
from curriculum import CurriculumSampler, ReadingLevelCurriculum
from lightning_ncclsafe import SafeDDP


class TopicClassifier(L.LightningModule):
    def __init__(self, dim=48, classes=5, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.EmbeddingBag(VOCAB, dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, classes))

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        loss = nn.functional.cross_entropy(self.head(self.embed(tokens)), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", default="data/corpus.jsonl")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    rank, world = int(os.environ.get("LOCAL_RANK", 0)), 2
    L.seed_everything(4)
    if rank == 0 and not os.path.exists(args.corpus):
        write_corpus(args.corpus)
    train = Documents(args.corpus, rank, world)
    sampler = CurriculumSampler(len(train))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        log_every_n_steps=10,
        callbacks=[ReadingLevelCurriculum(sampler)],
    )
    trainer.fit(TopicClassifier(), DataLoader(train, batch_size=12, sampler=sampler))


if __name__ == "__main__":
    main()
