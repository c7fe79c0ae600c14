import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class PictureEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.out = nn.Linear(32, width)

    def forward(self, images):
        return self.out(self.conv(images).mean((2, 3)))


class TextEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.mix = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        return self.mix(self.embed(tokens)).mean(1)


class DocumentModel(L.LightningModule):
    def __init__(self, width: int = 48, classes: int = 6):
        super().__init__()
        self.pictures = PictureEncoder(width)
        self.text = TextEncoder(width)
        self.head = nn.Linear(width, classes)

    def forward(self, batch):
        document = self.text(batch["tokens"])
        if len(batch["images"]):  # <- here
            document = document.index_add(0, batch["owner"], self.pictures(batch["images"]))
        return self.head(document)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch), batch["label"])
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["label"]))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [schedule]
