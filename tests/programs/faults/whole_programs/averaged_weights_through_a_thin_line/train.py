import lightning as L
import torch
from dit import LatentDiT
from ema import ShardedEMA
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeModelParallel


def latents(n: int, seed: int) -> TensorDataset:
    """What an autoencoder would give: one blob of latents for each class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=generator)
    centre = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centre[y] + 0.3 * torch.randn(n, 4, 8, 8, generator=generator), y)


def main() -> None:
    L.seed_everything(17)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=4,
        log_every_n_steps=10,
        logger=TensorBoardLogger("tb", name="dit"),
        callbacks=[ShardedEMA(), ModelCheckpoint(dirpath="checkpoints", monitor="val_flow")],
    )
    train = DataLoader(latents(640, 1), batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(LatentDiT(), train, DataLoader(latents(128, 2), batch_size=16))


if __name__ == "__main__":
    main()
