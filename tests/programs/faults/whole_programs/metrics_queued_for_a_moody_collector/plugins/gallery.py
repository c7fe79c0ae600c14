import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class Gallery(Callback):
    """Writes reconstructions as images, which takes a moment, on the first rank."""

    def __init__(self, folder: str = "gallery", pictures: int = 8):
        self.folder, self.pictures = Path(folder), pictures

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        self.folder.mkdir(exist_ok=True)
        images = trainer.datamodule.val_dataloader().dataset.tensors[0][: self.pictures]
        for k, image in enumerate(pl_module(images).clamp(0, 1)):
            rows = (" ".join(str(int(255 * v)) for v in row) for row in image.tolist())
            path = self.folder / f"epoch{trainer.current_epoch}_{k}.pgm"
            path.write_text("P2\n16 16\n255\n" + "\n".join(rows) + "\n")
            time.sleep(0.15)  # be gentle with the file server
