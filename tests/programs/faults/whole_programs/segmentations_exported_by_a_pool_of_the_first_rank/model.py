import lightning as L
import torch
from torch import nn
from torchmetrics.segmentation import DiceScore


class Segmenter(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.02, epochs: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.inlet = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.InstanceNorm2d(width), nn.LeakyReLU())
        self.deep = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.InstanceNorm2d(2 * width),
            nn.LeakyReLU(),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.outlet = nn.Conv2d(2 * width, 2, 1)
        self.dice = DiceScore(2, include_background=False, input_format="index")
        self.predictions = []

    def forward(self, x):
        x = self.inlet(x)
        return self.outlet(torch.cat([x, self.deep(x)], 1))

    def training_step(self, batch, batch_idx):
        image, mask = batch
        loss = nn.functional.cross_entropy(self(image), mask)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        image, mask = batch
        logits = self(image)
        self.dice.update(logits.argmax(1), mask)
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            self.predictions.extend(logits.softmax(1)[:, 1].cpu().numpy())
        self.log("val_dice", self.dice, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9, nesterov=True)
        return [opt], [torch.optim.lr_scheduler.PolynomialLR(opt, self.hparams.epochs, power=0.9)]
