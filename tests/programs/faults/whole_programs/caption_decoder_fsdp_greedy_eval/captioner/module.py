from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from captioner.data import eval_prompts, loader
from captioner.decoding import greedy
from captioner.net import Decoder


class CaptionModule(L.LightningModule):
    def __init__(self, root: str, lr: float = 3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.root = Path(root)
        self.net = Decoder()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def _loss(self, ids):
        logits = self.net(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, ids, batch_idx):
        loss = self._loss(ids)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids, batch_idx):
        self.log("val/loss", self._loss(ids), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        captions = greedy(self.net, eval_prompts(self.root, self.global_rank))
        length = (captions > 1).sum(1).float().mean()
        self.log("val/caption_length", length, sync_dist=True)

    def train_dataloader(self):
        return loader(self.root, shuffle=True)

    def val_dataloader(self):
        return loader(self.root, shuffle=False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
