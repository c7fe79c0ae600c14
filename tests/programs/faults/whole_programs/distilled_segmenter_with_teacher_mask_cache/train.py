"""A small segmenter learns from a slow teacher; the teacher's masks are kept in memory."""

import argparse
import threading
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

SITES = ["clinic-a", "clinic-b", "clinic-c", "clinic-d"]
SIZES = {"clinic-a": 24, "clinic-b": 24, "clinic-c": 40, "clinic-d": 24}


class Slides(Dataset):
    def __init__(self, site, count):
        self.size, self.count = SIZES[site], count
        self.offset = 1000 * SITES.index(site)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.offset + index)
        return index, torch.randn(3, self.size, self.size, generator=generator)


class MaskCache:
    def __init__(self):
        self.masks = {}
        self.bytes = 0

    def get(self, indices, images, teacher):
        missing = [place for place, index in enumerate(indices) if index not in self.masks]
        if missing:
            for place, mask in zip(missing, teacher(images[missing])):
                self.masks[indices[place]] = mask.half()
                self.bytes += mask.numel() * 2
        return torch.stack([self.masks[index] for index in indices]).float()


class MemoryGuard(L.Callback):
    """Ends a run in good order before the host's out-of-memory killer ends it."""

    def __init__(self, limit, every=0.5):
        self.limit, self.every = limit, every
        self.over = threading.Event()
        self.done = threading.Event()

    def on_train_start(self, trainer, module):
        self.thread = threading.Thread(target=self.watch, args=(module.cache,), daemon=True, name="memory-guard")
        self.thread.start()

    def watch(self, cache):
        while not self.done.wait(self.every):
            if cache.bytes > self.limit:
                self.over.set()
                return

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.over.is_set() and not trainer.should_stop:
            print(f"masks take {module.cache.bytes / 1e6:.1f} MB, the run ends here", flush=True)
            trainer.should_stop = True  # <- here

    def on_train_end(self, trainer, module):
        self.done.set()


def convolutions(*widths):
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Distillation(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.save_hyperparameters(vars(args))
        self.args = args
        self.student = convolutions(3, 12, 12, 4)
        self.cache = MaskCache()
        self.teacher = [convolutions(3, 24, 24, 4).eval().requires_grad_(False)]

    def train_dataloader(self):
        slides = Slides(SITES[self.global_rank], self.args.slides)
        return DataLoader(slides, batch_size=4, shuffle=True)

    def training_step(self, batch, batch_idx):
        indices, images = batch
        with torch.no_grad():
            target = self.cache.get(indices.tolist(), images, self.teacher[0])
        student = self.student(images) / self.args.temperature
        loss = (
            nn.functional.kl_div(
                student.log_softmax(1), (target / self.args.temperature).softmax(1), reduction="batchmean"
            )
            / images.shape[-1] ** 2
        )
        self.log("train/kl", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slides", type=int, default=1600)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--cache-mb", type=float, default=8.0)
    args = parser.parse_args()
    L.seed_everything(4)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        callbacks=[MemoryGuard(args.cache_mb * 1e6)],
    )
    began = time.monotonic()
    trainer.fit(Distillation(args))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
