import lightning as L
import torch
from torch import nn


class CTCModel(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.conv = nn.Conv1d(20, width, 5, padding=2)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 30)

    def training_step(self, batch, batch_idx):
        frames, words, n_frames, n_words = batch
        h = self.rnn(self.conv(frames.transpose(1, 2)).relu().transpose(1, 2))[0]
        logp = self.out(h).log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(logp, words, n_frames, n_words, zero_infinity=True)
        self.log("ctc", loss, prog_bar=True, batch_size=len(n_frames))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)
