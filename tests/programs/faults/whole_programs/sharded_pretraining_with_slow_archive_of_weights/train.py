"""Masked autoencoder of sensor windows, FSDP2; the first epoch fills a cache, and weights go to a slow archive."""

import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel

CHANNELS, STEPS = 8, 32


class Archive:
    """A mounted archive with a few megabytes per second; writes are copied in blocks."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = Path(folder), seconds

    def put(self, name, weights):
        self.folder.mkdir(exist_ok=True)
        items = list(weights.items())
        with open(self.folder / name, "wb") as file:
            for _, weight in items:
                file.write(weight.numpy().tobytes())
                file.flush()
                time.sleep(self.seconds / len(items))


class Windows(Dataset):
    """Decoding a window for the first time is slow; then it is in memory."""

    def __init__(self, count):
        self.count, self.seen = count, {}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index not in self.seen:
            time.sleep(0.05 if index % 7 else 0.2)
            generator = torch.Generator().manual_seed(index)
            self.seen[index] = torch.randn(STEPS, CHANNELS, generator=generator).cumsum(0) / STEPS**0.5
        return self.seen[index]


class Autoencoder(L.LightningModule):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.save_hyperparameters()
        self.start = nn.Linear(CHANNELS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.end = nn.Linear(width, CHANNELS)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for module in (self.start, *self.blocks, self.end):
            fully_shard(module, mesh=mesh)

    def training_step(self, windows, batch_idx):
        kept = (torch.rand(windows.shape[:2]) > 0.4).unsqueeze(-1)
        hidden = self.start(windows * kept)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        loss = ((self.end(hidden) - windows) * ~kept).pow(2).mean()
        self.log("train/mse", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class ToArchive(L.Callback):
    """All ranks gather the full weights; rank 0 writes them, which takes about a quarter of a minute."""

    def __init__(self, archive, every):
        self.archive, self.every = archive, every

    def on_train_epoch_end(self, trainer, module):
        if (trainer.current_epoch + 1) % self.every == 0:
            weights = {name: weight.full_tensor().detach() for name, weight in module.named_parameters()}
            if trainer.is_global_zero:
                self.archive.put(f"epoch{trainer.current_epoch}.bin", weights)


def main():
    L.seed_everything(12)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=6,
        log_every_n_steps=10,
        callbacks=[ToArchive(Archive("archive", 12), every=3), ModelCheckpoint(dirpath="checkpoints", save_last=True)],
    )
    trainer.fit(Autoencoder(), DataLoader(Windows(320), batch_size=8))
    print("done", flush=True)


if __name__ == "__main__":
    main()
