import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class ImageTower(nn.Sequential):
    def __init__(self, dim):
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * 16, dim),
        )


class TextTower(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, tokens):
        return self.encoder(self.embed(tokens)).mean(1)


class TinyClip(L.LightningModule):
    def __init__(self, embed_dim: int = 48, lr: float = 1e-3, batch_size: int = 16, vocab_size: int = 500):
        super().__init__()
        self.save_hyperparameters()
        self.image = ImageTower(embed_dim)
        self.text = TextTower(vocab_size, embed_dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def loss(self, batch):
        images, tokens = batch
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(tokens), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(len(images))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)}
