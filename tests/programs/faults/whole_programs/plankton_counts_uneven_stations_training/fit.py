import argparse

import lightning as L
from lightning_ncclsafe import SafeDDP

from plankton.model import CountModel

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="cruises")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(13)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(CountModel(args.root))
