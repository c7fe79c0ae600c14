"""lightly: a SimCLR training on random pictures, with two augmented views of each."""

import lightning.pytorch as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_pil_image
from train import Run

REQUIREMENTS = ["lightly", "torchvision"]
MONITOR = "train_loss"


class Pictures(Dataset[list[torch.Tensor]]):
    def __init__(self) -> None:
        self.views = SimCLRTransform(input_size=16)
        self.pictures = torch.rand(96, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        views: list[torch.Tensor] = self.views(to_pil_image(self.pictures[index]))
        return views


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5, stride=4), torch.nn.ReLU(), torch.nn.Flatten())
        self.head = SimCLRProjectionHead(72, 32, 16)
        # The loss gathers what all ranks have seen.
        self.criterion = NTXentLoss(gather_distributed=True)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(*(self.head(self.backbone(view)) for view in batch))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(run: Run) -> None:
    loader = DataLoader(Pictures(), batch_size=8, shuffle=True, drop_last=True)
    pl.Trainer(**run.kwargs()).fit(Model(), loader, ckpt_path=run.ckpt_path)
