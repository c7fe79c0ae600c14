"""Workers prefetch batches until memory runs out (wenet#2511).

There, workers times ranks were far fewer than the cores, as advised. But each rank had two loaders with 4 persistent
workers each, and each worker prefetched 250 batches. Some batches come late, which is what such a long queue is for.

Here the program limits itself (RLIMIT_DATA): each rank, and each of its workers, may have 500 MB more than a rank has
before it trains. A container's memory limit does the same to all of them together, and ends them with SIGKILL. Batches
are of numpy arrays, which are in the memory of their worker until they are taken; those of tensors would be in
/dev/shm, which containers count as memory, and which ends with "Bus error" when it is full.

Stock, on rank 0:  RuntimeError: Caught MemoryError in DataLoader worker process 0.
                   numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 MiB for an array with shape ...
                   (some 120 batches after it happened, when that batch is due; in backward, on rank 1:
                   Connection closed by peer)
SafeDDP:           trains to the end; it prefetches only as many batches as fit into memory
--untuned:         failed-rank: rank 0 raised that, and rank 1 waits for it
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

import numpy as np
import psutil
import torch
from _run import DigitsClassifier, DigitsData, argument_parser, run
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_ncclsafe import LoaderTuner

SCALE = 64  # 8 x 8 pixels become 512 x 512, a batch of 8 takes 8 MiB
SLOW_EVERY = 320
Arrays = dict[str, np.ndarray[Any, Any]]


class Scans(Dataset[Any]):
    """Large images of the digits; one in 320 comes from slow storage, which takes a second."""

    def __init__(self, digits: Dataset[Any]) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)  # type: ignore[arg-type] # a Subset, or several

    def __getitem__(self, index: int) -> Arrays:
        if index % SLOW_EVERY == 0:
            time.sleep(1)
        image, label = self.digits[index]
        return {"image": image.numpy().repeat(SCALE, axis=1).repeat(SCALE, axis=2), "label": label.numpy()}


def collate(samples: list[Arrays]) -> Arrays:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class ScansData(DigitsData):
    """Two loaders as Wenet has them."""

    def __init__(self) -> None:
        super().__init__(batch_size=8, num_workers=4)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train, self.val = Scans(ConcatDataset([self.train] * 10)), Scans(self.val)  # type: ignore[assignment]

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.val, shuffle=False)

    def loader(self, dataset: Dataset[Any], *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle,
            drop_last=True,
            collate_fn=collate,
            num_workers=self.num_workers,
            prefetch_factor=250,  # <- up to 8 GB for each loader of each rank
            persistent_workers=True,
        )


class ScansClassifier(DigitsClassifier):
    """Takes 50 ms for a step, as a larger model would."""

    def training_step(self, batch: Arrays, batch_idx: int) -> Tensor:  # type: ignore[override] # not of tensors
        time.sleep(0.05)
        return super().training_step(tensors(batch), batch_idx)

    def validation_step(self, batch: Arrays, batch_idx: int) -> None:  # type: ignore[override]
        super().validation_step(tensors(batch), batch_idx)


def tensors(batch: Arrays) -> list[Tensor]:
    return [torch.from_numpy(batch["image"][..., ::SCALE, ::SCALE].copy()), torch.from_numpy(batch["label"])]


def limit_memory(more_bytes: int) -> None:
    """Limit this process, and those that it starts."""
    torch.set_num_threads(1)  # a stack for each core would count, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    limit = psutil.Process().memory_info().data + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main(options: argparse.Namespace) -> None:
    if options.limit:
        limit_memory(options.limit * 10**6)
    tunes = options.strategy == "safe" and not options.untuned
    callbacks = [LoaderTuner()] if tunes else []
    run(ScansClassifier(), ScansData(), options, max_epochs=1, limit_train_batches=options.steps, callbacks=callbacks)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--untuned", action="store_true", help="SafeDDP alone, without LoaderTuner")
    parser.add_argument("--limit", type=int, default=500, help="more MB for each process; 0: none (default: 500)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    main(parser.parse_args())
