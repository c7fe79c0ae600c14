import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ncclsafe import SafeDDP
from mixture.corpus import DOMAINS, Corpus
from mixture.weighting import DomainWeights


class LanguageModel(L.LightningModule):
    def __init__(self, vocabulary=100, width=32, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.weights, self.losses = {}, {}

    def training_step(self, batch, batch_idx):
        ids, domains = batch
        hidden, _ = self.recurrent(self.tokens(ids[:, :-1]))
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
        names = [DOMAINS[d] for d in domains.tolist()]
        self.losses = {}
        for name in names:
            if name not in self.losses:
                mine = torch.tensor([n == name for n in names])
                self.losses[name] = float(losses[mine].mean())
        loss = (losses * torch.tensor([self.weights[name] for name in names])).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=20,
        callbacks=[DomainWeights(DOMAINS, args.every)],
    )
    trainer.fit(LanguageModel(), datamodule=Corpus())
