"""monai: a UNet that finds squares in small pictures, which are kept in memory and turned at random."""

import lightning.pytorch as pl
import torch
from monai.data import CacheDataset, DataLoader
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandRotate90d, ScaleIntensityd
from train import SEED, Run

REQUIREMENTS = ["monai"]
MONITOR = "train_loss"


def pictures(count: int) -> list[dict[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(count)
    made = []
    for _ in range(count):
        label = torch.zeros(1, 16, 16)
        top, left = torch.randint(12, (2,), generator=numbers).tolist()
        label[:, top : top + 4, left : left + 4] = 1
        made.append({"image": label + 0.3 * torch.rand(1, 16, 16, generator=numbers), "label": label})
    return made


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,))
        self.loss = DiceLoss(sigmoid=True)
        self.dice = DiceMetric()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.net(batch["image"]), batch["label"])
        self.log("train_loss", loss.as_tensor() if hasattr(loss, "as_tensor") else loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.dice((self.net(batch["image"]) > 0).float(), batch["label"])

    def on_validation_epoch_end(self) -> None:
        # Gathered from all ranks.
        self.log("dice", self.dice.aggregate().item())
        self.dice.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(run: Run) -> None:
    keys = ["image", "label"]
    steps = [ScaleIntensityd("image"), RandRotate90d(keys), RandFlipd(keys), RandGaussianNoised("image")]
    turned = Compose(steps).set_random_state(SEED)
    loaders = [
        DataLoader(CacheDataset(pictures(96), turned, progress=False), batch_size=6, shuffle=True),
        DataLoader(CacheDataset(pictures(24), steps[0], progress=False), batch_size=6),
    ]
    pl.Trainer(**run.kwargs()).fit(Model(), *loaders, ckpt_path=run.ckpt_path)
