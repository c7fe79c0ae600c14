"""python pretrain.py --config config.yaml"""

import argparse
import math
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import yaml
from decoder import Decoder
from lightning.pytorch.callbacks import ModelCheckpoint
from packing import loader
from torch.distributed.fsdp import fully_shard

from lightning_ncclsafe import SafeModelParallel


class Pretraining(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.net = None

    def configure_model(self):
        if self.net is not None:
            return
        self.net = Decoder(**self.config["model"])
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def _loss(self, block):
        logits = self.net(block[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), block[:, 1:].reshape(-1))

    def training_step(self, block, _):
        loss = self._loss(block)
        self.log_dict({"train/loss": loss, "train/perplexity": loss.detach().exp()}, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.nll, self.blocks = 0.0, 0

    def validation_step(self, block, _):
        self.nll += self._loss(block) * len(block)
        self.blocks += len(block)

    def on_validation_epoch_end(self):
        # ranks may differ in how many blocks they saw: average over all blocks
        totals = self.all_gather(torch.stack([self.nll, torch.tensor(float(self.blocks))])).sum(0)
        mean = totals[0] / totals[1]
        self.log("val/loss", mean, rank_zero_only=False)
        self.log("val/perplexity", math.exp(min(20.0, mean.item())), prog_bar=True)

    def configure_optimizers(self):
        o = self.config["optimizer"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=o["lr"], weight_decay=o["weight_decay"])
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / o["warmup"]))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]

    def _loader(self, train):
        m = self.config["model"]
        return loader(
            self.config["data"],
            m["block_size"],
            m["vocabulary"],
            self.global_rank,
            self.trainer.world_size,
            train=train,
        )

    def train_dataloader(self):
        return self._loader(train=True)

    def val_dataloader(self):
        return self._loader(train=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    path = parser.parse_args().config
    config = yaml.safe_load((path if path.exists() else Path(__file__).parent / path).read_text())
    pl.seed_everything(config["seed"])
    t = config["trainer"]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=t["devices"],
        strategy=SafeModelParallel(data_parallel_size=t["devices"], tensor_parallel_size=1),
        max_steps=t["max_steps"],
        val_check_interval=t["val_check_interval"],
        check_val_every_n_epoch=None,
        callbacks=[ModelCheckpoint(every_n_train_steps=100)],
        log_every_n_steps=5,
    )
    trainer.fit(Pretraining(config))


if __name__ == "__main__":
    main()
