import lightning as L
import torch
from torch import nn

from .network import Network


class Tagger(L.LightningModule):
    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.network = Network()

    def training_step(self, batch, batch_idx):
        ids, tags = batch
        loss = nn.functional.cross_entropy(self.network(ids).flatten(0, 1), tags.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
