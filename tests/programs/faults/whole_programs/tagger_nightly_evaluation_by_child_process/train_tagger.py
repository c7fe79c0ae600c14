import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP
from torch.utils.data import DataLoader

from tagger.callbacks import ChildEvaluation
from tagger.model import Tagger
from tagger.sentences import Sentences

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sentences", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(6)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        callbacks=[ChildEvaluation()],
    )
    trainer.fit(Tagger(), DataLoader(Sentences(args.sentences), args.batch_size, shuffle=True))
