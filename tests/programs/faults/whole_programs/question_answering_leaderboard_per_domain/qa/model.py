import lightning as L
import torch
import torch.nn as nn


class AnswerScorer(L.LightningModule):
    def __init__(self, dim: int = 32, hidden: int = 64, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.tower = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.score = nn.Bilinear(hidden, hidden, 1)
        self.val_hits = []

    def forward(self, q, a):
        return self.score(self.tower(q), self.tower(a)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        q, a, y, _ = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(q, a), y.float())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.val_hits.clear()

    def validation_step(self, batch, batch_idx):
        q, a, y, domain = batch
        hit = ((self(q, a) > 0).long() == y).float()
        self.val_hits.append(torch.stack([domain.float(), hit], 1))
        self.log("val_acc", hit.mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
