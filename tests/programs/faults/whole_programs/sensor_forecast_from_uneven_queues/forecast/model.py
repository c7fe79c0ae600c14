import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from forecast.feed import PLANTS, Feed


class Forecaster(L.LightningModule):
    def __init__(self, width=64, depth=2):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(48, width), *blocks, nn.Linear(width, 24))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in list(self.net)[1:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = nn.functional.mse_loss(self.net(past), future)
        self.log("loss", loss, prog_bar=True)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Plants(L.LightningDataModule):
    def train_dataloader(self):
        rank = self.trainer.global_rank
        return DataLoader(Feed(rank, **PLANTS[rank]), batch_size=None)
