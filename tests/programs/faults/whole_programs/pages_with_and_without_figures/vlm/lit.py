import lightning as L
import torch
from torch.distributed.fsdp import fully_shard

from .model import DocumentModel


class LitDocumentModel(L.LightningModule):
    def __init__(self, dim, blocks, lr, warmup):
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if hasattr(self, "model"):
            return
        self.model = DocumentModel(self.hparams.dim, self.hparams.blocks)
        mesh = self.device_mesh["data_parallel"]
        for part in [self.model.vision, *self.model.blocks]:
            fully_shard(part, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _loss(self, batch):
        logits = self.model(**batch)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=self.hparams.warmup)
        return [opt], [{"scheduler": warmup, "interval": "step"}]
