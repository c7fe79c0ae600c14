import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeModelParallel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset

from clips import Clips


class Tagger(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 6))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in list(self.net)[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", default="cache")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    L.seed_everything(6)
    clips = Clips(args.cache, packs=52)
    train, val = Subset(clips, range(0, 640)), Subset(clips, range(640, 832))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=args.epochs,
        log_every_n_steps=5,
    )
    trainer.fit(Tagger(), DataLoader(train, batch_size=16, shuffle=False), DataLoader(val, batch_size=32))


if __name__ == "__main__":
    main()
