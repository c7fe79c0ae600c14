import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Segmenter(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        torch.set_num_threads(1)
        self.recurrent = nn.GRU(20, width, batch_first=True)
        self.speaker = nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        frames, labels = batch
        hidden, _ = self.recurrent(frames)
        loss = F.cross_entropy(self.speaker(hidden).flatten(0, 1), labels.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        frames, labels = batch
        hidden, _ = self.recurrent(frames)
        right = (self.speaker(hidden).argmax(-1) == labels).float().mean()
        self.log("val_frames", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
