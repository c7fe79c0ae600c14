import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """IoU of boxes given by their corners."""
    corner = torch.maximum(one[:, :2], other[:, :2])
    opposite = torch.minimum(one[:, 2:], other[:, 2:])
    shared = (opposite - corner).clamp(min=0).prod(dim=1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1) for boxes in (one, other)]
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-6)


class Detector(L.LightningModule):
    def __init__(self, lr: float = 3e-3, box_weight: float = 5.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
        )
        self.box = nn.Linear(16 * 8 * 8, 4)
        self.kind = nn.Linear(16 * 8 * 8, 1)
        self.iou = nn.ModuleDict({stage: MeanMetric() for stage in ("val", "test")})
        self.accuracy = nn.ModuleDict({stage: BinaryAccuracy() for stage in ("val", "test")})

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)
        return self.box(features).sigmoid(), self.kind(features).squeeze(1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        images, boxes, labels = batch
        found, logits = self(images)
        loss = self.hparams.box_weight * F.smooth_l1_loss(found, boxes)
        loss = loss + F.binary_cross_entropy_with_logits(logits, labels.float())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def _evaluate(self, batch: tuple[Tensor, Tensor, Tensor], stage: str) -> None:
        images, boxes, labels = batch
        found, logits = self(images)
        self.iou[stage].update(overlap(found, boxes))
        self.accuracy[stage].update(logits, labels)
        self.log(f"{stage}_iou", self.iou[stage], prog_bar=True)
        self.log(f"{stage}_accuracy", self.accuracy[stage])

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
