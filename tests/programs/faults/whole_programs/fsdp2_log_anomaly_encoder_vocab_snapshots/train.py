import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_ncclsafe import SafeModelParallel

from anomaly.data import LogData
from anomaly.encoder import LogEncoder

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    L.seed_everything(19)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=args.save_every, save_last=True)],
        log_every_n_steps=10,
    )
    trainer.fit(LogEncoder(), datamodule=LogData())
