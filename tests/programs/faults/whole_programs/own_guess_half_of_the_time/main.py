import lightning as L
import torch
from bits import BitDiffusion
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeModelParallel

CONFIG = {
    "devices": 2,
    "epochs": 3,
    "batch_size": 16,
    "pictures": 1920,
    "seed": 100,
}


def pictures(n, size=16, bits=4):
    """Discs of random grey levels, as bits."""
    g = torch.Generator().manual_seed(3)
    yx = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    centre, radius = torch.randint(3, size - 3, (n, 2, 1, 1), generator=g), torch.randint(2, 6, (n, 1, 1), generator=g)
    level = torch.randint(1, 2**bits, (n, 1, 1), generator=g)
    grey = ((yx - centre).square().sum(1) < radius**2).long() * level
    return torch.stack([(grey >> b & 1) for b in range(bits)], dim=1).float() * 2 - 1


def main(cfg):
    L.seed_everything(cfg["seed"])
    model = BitDiffusion()

    data = pictures(cfg["pictures"])
    train, val = data[:-128], data[-128:]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=cfg["devices"],
        strategy=SafeModelParallel(data_parallel_size=cfg["devices"], tensor_parallel_size=1),
        max_epochs=cfg["epochs"],
        logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint(monitor="val_mse", save_top_k=1), ModelSummary(max_depth=2)],
    )
    trainer.fit(model, DataLoader(train, cfg["batch_size"], shuffle=True), DataLoader(val, cfg["batch_size"]))


if __name__ == "__main__":
    main(CONFIG)
