import lightning as L
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class ResidualBlock(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.fc1 = nn.Linear(dim, dim * 2)
        self.fc2 = nn.Linear(dim * 2, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.fc2(self.drop(torch.relu(self.fc1(self.norm(x)))))


class TabularRegressor(L.LightningModule):
    def __init__(self, features=24, dim=64, depth=3, dropout=0.1, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Linear(features, dim)
        self.blocks = nn.ModuleList(ResidualBlock(dim, dropout) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mae", (self(x) - y).abs().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)}
