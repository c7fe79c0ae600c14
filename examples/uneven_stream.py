"""Train on a stream whose shares have a different length on each rank.

The digits come in seven files, which are dealt to the ranks in turn. With two ranks, the first has four files (822
digits, 26 batches) and the second has three (616 digits, 20 batches). A stream has no length that could be compared
in advance. The second rank reaches its end and waits in the validation, the first waits in its 21st backward.
With SafeDDP, ranks agree before each batch that all of them have one; `--on-uneven` chooses what happens if not.

python examples/uneven_stream.py --strategy ddp             # Application timeout caused pair closure
python examples/uneven_stream.py --on-uneven raise          # UnevenDataError on both ranks, which names the second
python examples/uneven_stream.py --on-uneven stop_together  # 20 steps: the first rank leaves 182 digits out
python examples/uneven_stream.py --on-uneven repeat         # 26 steps: the second rank sees 192 digits again
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from digits import Batch, DigitsClassifier, DigitsData
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ncclsafe import SafeDDP

FILES = 7


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The files of one rank, one after another. It has no `__len__`."""

    def __init__(self, files: list[tuple[Tensor, Tensor]]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.files:
            yield from zip(images, labels, strict=True)


class DigitsStream(DigitsData):
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        images, labels = self.digits.tensors
        training = self.train.indices  # type: ignore[attr-defined]
        files = list(zip(images[training].tensor_split(FILES), labels[training].tensor_split(FILES), strict=True))
        mine = files[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(Stream(mine), self.batch_size)


class Count(L.Callback):
    """Prints on every rank how much it has trained."""

    def __init__(self) -> None:
        self.samples = 0

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.samples += len(batch[0])

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        print(f"rank {trainer.global_rank}: {trainer.global_step} optimizer steps, {self.samples} samples", flush=True)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if self.samples:  # spawned or forked ranks end silently, and this is the process that started them
            self.on_train_end(trainer, module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["safe", "ddp"], default="safe", help="ddp: stock Lightning")
    parser.add_argument("--on-uneven", choices=["raise", "stop_together", "repeat"], default="raise")
    parser.add_argument("--start-method", choices=["popen", "spawn", "fork"], default="popen")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=12, help="hard limit, seconds (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=1)
    parser.add_argument("--root-dir", type=Path, default=Path("runs/uneven_stream"))
    args = parser.parse_args()

    callbacks: list[L.Callback] = [Count()]
    limits: dict[str, Any] = {"timeout": timedelta(seconds=args.timeout), "start_method": args.start_method}
    strategy: DDPStrategy
    if args.strategy == "ddp":
        strategy = DDPStrategy(**limits)
    else:
        from lightning_ncclsafe import DatasetAgreement

        strategy = SafeDDP(**limits, report_dir=args.root_dir / "ncclsafe")
        callbacks.append(DatasetAgreement(on_uneven=args.on_uneven))

    L.seed_everything(42, workers=True)
    trainer = L.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=args.max_epochs,
        default_root_dir=args.root_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsClassifier(), DigitsStream())


if __name__ == "__main__":
    main()
