import lightning as L
import torch
from torch import nn
from torchmetrics.classification import BinaryF1Score


class LandCover(L.LightningModule):
    def __init__(self, channels: int = 8, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, channels), (channels, 2 * channels), (2 * channels, 2 * channels)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(1, outputs), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * channels, 1))
        self.f1 = BinaryF1Score()

    def forward(self, scenes: torch.Tensor) -> torch.Tensor:
        return self.net(scenes).squeeze(1)

    def training_step(self, batch, batch_idx):
        scenes, town = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(scenes), town.float())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        scenes, town = batch
        self.f1.update(self(scenes), town)
        self.log("val_f1", self.f1, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
