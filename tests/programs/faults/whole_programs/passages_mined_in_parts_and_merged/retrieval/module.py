import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Encoder(L.LightningModule):
    def __init__(self, words=80, width=32, temperature=0.1, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(words, 64), nn.ReLU(), nn.Linear(64, width))

    def encode(self, texts):
        return F.normalize(self.net(texts), dim=-1)

    def training_step(self, batch, batch_idx):
        queries, passages = map(self.encode, batch)
        scores = queries @ passages.T / self.hparams.temperature
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
