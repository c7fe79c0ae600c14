import lightning as L
import torch
from torch import nn

from .data import ALPHABET


class LineReader(L.LightningModule):
    def __init__(self, channels: int = 48, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(16, channels, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 4, stride=4),
            nn.ReLU(),
            nn.Conv1d(channels, len(ALPHABET) + 1, 1),
        )
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def training_step(self, batch, batch_idx):
        images, targets, lengths = batch
        scores = self.net(images).permute(2, 0, 1).log_softmax(-1)
        loss = self.ctc(scores, targets, lengths * 2, lengths)
        self.log("train/ctc", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
