import lightning as L
import torch
from torch import nn
from torchmetrics.classification import BinaryAccuracy


class BagOfTokens(L.LightningModule):
    def __init__(self, vocabulary: int, dim: int = 48, lr: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.EmbeddingBag(vocabulary, dim, padding_idx=0)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        self.accuracy = BinaryAccuracy()

    def forward(self, tokens):
        return self.head(self.embed(tokens)).squeeze(-1)

    def training_step(self, batch, _):
        tokens, label = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(tokens), label.float())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        tokens, label = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(tokens), label.float())
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)

    def test_step(self, batch, _):
        tokens, label = batch
        self.accuracy(self(tokens), label)
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
