import argparse
import os

import lightning as L
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP
from mm.model import SharedEncoder
from mm.sources import CORPORA, Corpus


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA), help="one per rank")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=960)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    L.seed_everything(17)
    corpus = Corpus(args.corpora[rank], args.samples, dim=32)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=len(args.corpora),
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
    )
    trainer.fit(SharedEncoder(args.corpora), DataLoader(corpus, batch_size=16, shuffle=True, drop_last=True))


if __name__ == "__main__":
    main()
