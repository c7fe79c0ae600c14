import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from moe import MoEClassifier
from torch.utils.data import DataLoader, TensorDataset

from lightning_ncclsafe import SafeModelParallel

CFG = {"devices": 2, "batch_size": 2, "train": 88, "val": 16, "length": 6, "epochs": 1}


def topics(n: int, length: int, seed: int) -> TensorDataset:
    """Words of a topic come from a range of the vocabulary, so experts specialise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(8, (n,), generator=g)
    return TensorDataset(y[:, None] * 36 + torch.randint(48, (n, length), generator=g), y)


def main() -> None:
    L.seed_everything(3)
    train, val = topics(CFG["train"], CFG["length"], 0), topics(CFG["val"], CFG["length"], 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=CFG["devices"],
        strategy=SafeModelParallel(data_parallel_size=CFG["devices"], tensor_parallel_size=1),
        max_epochs=CFG["epochs"],
        log_every_n_steps=5,
        logger=CSVLogger("moe"),
        callbacks=[ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", patience=2)],
    )
    trainer.fit(
        MoEClassifier(),
        DataLoader(train, CFG["batch_size"], shuffle=True),
        DataLoader(val, CFG["batch_size"]),
    )
    trainer.print("best:", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
