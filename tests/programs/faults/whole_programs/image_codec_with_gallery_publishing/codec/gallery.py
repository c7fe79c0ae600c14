"""Publishes reconstructions for the group's web page without holding up the training."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only


def write_ppm(path, image):
    pixels = (image.clamp(0, 1) * 255).byte().permute(1, 2, 0).contiguous()
    path.write_bytes(b"P6 %d %d 255\n" % (image.shape[2], image.shape[1]) + pixels.numpy().tobytes())
    return path


class Gallery(Callback):
    def __init__(self, out: str = "gallery", n_images: int = 6, writers: int = 2, keep: int = 3):
        self.out, self.n_images, self.keep = Path(out), n_images, keep
        self.pool = ThreadPoolExecutor(writers, thread_name_prefix="gallery")
        self.pending = []

    def publish(self, folder, images):
        folder.mkdir(parents=True, exist_ok=True)
        writes = [self.pool.submit(write_ppm, folder / f"{i:02d}.ppm", im) for i, im in enumerate(images)]
        names = [w.result().name for w in writes]
        (folder / "index.html").write_text("".join(f"<img src='{n}'>" for n in names))
        return folder

    @rank_zero_only
    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        batch = next(iter(trainer.val_dataloaders))[: self.n_images]
        with torch.no_grad():
            recon, _ = pl_module(batch)
        step = self.out / f"step{trainer.global_step:06d}"
        self.pending = [
            self.pool.submit(self.publish, step / kind, images.cpu())
            for kind, images in (("input", batch), ("recon", recon))
        ]

    @rank_zero_only
    def on_train_epoch_end(self, trainer, pl_module):
        done = [f.result() for f in self.pending]  # <- here
        if done:
            with (self.out / "latest.txt").open("a") as f:
                f.write(f"{done[-1]}\n")
        self.pending = []

    @rank_zero_only
    def on_fit_end(self, trainer, pl_module):
        self.pool.shutdown(wait=True)
