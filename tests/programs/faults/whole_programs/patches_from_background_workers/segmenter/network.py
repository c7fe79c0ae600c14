import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv3d(i, o, 3, stride, 1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU())


class TinyUNet(nn.Module):
    def __init__(self, width=6, classes=2):
        super().__init__()
        self.down0, self.down1 = conv(1, width), conv(width, 2 * width, 2)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.head = nn.Sequential(conv(2 * width, width), nn.Conv3d(width, classes, 1))

    def forward(self, x):
        skip = self.down0(x)
        return self.head(torch.cat([skip, self.up(self.down1(skip))], 1))


class SegmentationModule(L.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.net, self.lr = TinyUNet(), lr

    def training_step(self, batch, batch_idx):
        image, label = batch
        loss = F.cross_entropy(self.net(image), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        image, label = batch
        predicted = self.net(image).argmax(1)
        dice = 2 * (predicted * label).sum() / (predicted.sum() + label.sum()).clamp(min=1)
        self.log("dice", dice, sync_dist=True, prog_bar=True, batch_size=len(image))

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), self.lr, momentum=0.99, nesterov=True)
        return [opt], [torch.optim.lr_scheduler.PolynomialLR(opt, 3, 0.9)]
