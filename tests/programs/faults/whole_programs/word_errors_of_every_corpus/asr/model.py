from collections import defaultdict

import lightning as L
import torch
from torch import nn

from .data import SYMBOLS


class GruEncoder(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, SYMBOLS)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def edit_distance(a: list[int], b: list[int]) -> int:
    row = list(range(len(b) + 1))
    for i, s in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, t in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (s != t))
    return row[-1]


class ErrorRates:
    """Errors and words of each corpus, as they come along."""

    def __init__(self):
        self.errors, self.words = defaultdict(int), defaultdict(int)

    def add(self, corpus, hypothesis, reference):
        self.errors[corpus] += edit_distance(hypothesis, reference)
        self.words[corpus] += len(reference)

    def items(self):
        for corpus, words in sorted(self.words.items()):
            yield corpus, self.errors[corpus] / words


class Recognizer(L.LightningModule):
    def __init__(self, encoder: nn.Module, lr: float = 1e-3):
        super().__init__()
        self.encoder = encoder
        self.lr = lr
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def shared_step(self, batch):
        scores = self.encoder(batch["x"])
        loss = self.ctc(scores.transpose(0, 1), batch["y"], batch["x_len"], batch["y_len"])
        return scores, loss

    def training_step(self, batch, _):
        _, loss = self.shared_step(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["x"]))
        return loss

    def on_validation_epoch_start(self):
        self.rates = ErrorRates()

    def validation_step(self, batch, _):
        scores, loss = self.shared_step(batch)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch["x"]))
        for k, path in enumerate(scores.argmax(-1)):
            decoded = torch.unique_consecutive(path[: batch["x_len"][k]])
            self.rates.add(
                batch["corpus"][k], decoded[decoded > 0].tolist(), batch["y"][k, : batch["y_len"][k]].tolist()
            )

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        for corpus, rate in self.rates.items():
            self.log(f"val/wer_{corpus}", rate, sync_dist=True)  # <- here

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)
