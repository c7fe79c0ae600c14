import lightning as L
import torch
from torch import nn


class TopicClassifier(L.LightningModule):
    def __init__(self, width: int = 64, topics: int = 4, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.EmbeddingBag(401, width, padding_idx=0, mode="mean")
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, topics))

    def training_step(self, batch, batch_idx):
        ids, topic = batch
        loss = nn.functional.cross_entropy(self.head(self.embed(ids)), topic)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
