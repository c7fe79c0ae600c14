import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from nmt.module import Translator

if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, default=3)
    p.add_argument("--max_epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-3)
    a = p.parse_args()
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu", devices=a.devices, strategy=SafeDDP(), max_epochs=a.max_epochs, use_distributed_sampler=False
    )
    trainer.fit(Translator(lr=a.lr), ckpt_path=None)
