import lightning as L
import torch
from torch import nn

MASK, VOCAB = 21, 22


class MaskedModel(L.LightningModule):
    def __init__(self, width: int = 48, lr: float = 1e-3, masked: float = 0.15):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.convs = nn.Sequential(
            nn.Conv1d(width, width, 7, padding=3), nn.GELU(), nn.Conv1d(width, width, 7, padding=3), nn.GELU()
        )
        self.out = nn.Linear(width, VOCAB)

    def training_step(self, ids, batch_idx):
        hidden = (torch.rand(ids.shape) < self.hparams.masked) & (ids != 0)
        hidden[:, 0] = True
        x = self.embed(ids.masked_fill(hidden, MASK))
        logits = self.out(self.convs(x.mT).mT)[hidden]
        loss = nn.functional.cross_entropy(logits, ids[hidden])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
