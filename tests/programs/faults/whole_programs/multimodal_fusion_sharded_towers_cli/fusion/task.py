import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fusion.data import SIZES
from fusion.towers import Fusion


class PostClassifier(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = Fusion(SIZES, width, 5)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for tower in self.model.towers.values():
            fully_shard(tower, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch["inputs"], batch["present"]), batch["label"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.model(batch["inputs"], batch["present"])
        self.log("val/accuracy", (logits.argmax(-1) == batch["label"]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
