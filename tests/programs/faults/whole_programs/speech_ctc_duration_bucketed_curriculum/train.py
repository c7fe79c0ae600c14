import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from asr.data import SpeechData
from asr.model import CTCModel

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--budget", type=int, default=1200)
    args = parser.parse_args()
    L.seed_everything(40)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
    )
    trainer.fit(CTCModel(), datamodule=SpeechData(budget=args.budget))
