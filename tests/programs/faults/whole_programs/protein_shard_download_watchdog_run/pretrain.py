import argparse

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning_ncclsafe import SafeDDP

from protlm.model import ProteinLM

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[LearningRateMonitor("step")],
        use_distributed_sampler=False,
    )
    trainer.fit(ProteinLM())
