import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP
from prot.archive import ArchiveIO
from prot.data import Proteins
from prot.model import ProfileNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--proteins", type=int, default=480)
    args = parser.parse_args()
    L.seed_everything(23)
    keep = ModelCheckpoint(every_n_epochs=2, filename="{epoch}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        callbacks=[keep],
        plugins=[ArchiveIO()],
        log_every_n_steps=5,
    )
    trainer.fit(ProfileNet(), DataLoader(Proteins(args.proteins, "profiles"), batch_size=12, shuffle=True))
    print("kept", keep.best_model_path)


if __name__ == "__main__":
    main()
