"""Whether stock Lightning, stopped and resumed from an ordinary checkpoint, comes to the same weights, bit for bit.

torchrun --standalone --nproc-per-node=3 tests/programs/restarts/stock_resume.py

Nothing of this package is in it, and nothing is random but the order of samples, which seed and epoch decide.
"""

import hashlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

EPOCHS, STOPS_AFTER = 4, 2
ROWS = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(epochs: int, path: Path | None = None, *, resumes: bool = False, finds_unused: bool) -> str:
    """Trains; returns a digest of the weights, and saves them to a path unless it resumes from there."""
    L.seed_everything(1, verbose=False)
    model = Model()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo", find_unused_parameters=finds_unused),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(ROWS, batch_size=4, shuffle=True), ckpt_path=path if resumes else None)
    if path is not None and not resumes:
        trainer.save_checkpoint(path)
    weights = torch.cat([part.flatten() for part in model.state_dict().values()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    warnings.simplefilter("ignore")
    path = Path(tempfile.gettempdir()) / f"stock-{os.environ['TORCHELASTIC_RUN_ID']}.ckpt"
    for finds_unused in (False, True):
        whole = fit(EPOCHS, finds_unused=finds_unused)
        again = fit(EPOCHS, finds_unused=finds_unused)
        fit(STOPS_AFTER, path, finds_unused=finds_unused)
        resumed = fit(EPOCHS, path, resumes=True, finds_unused=finds_unused)
        if os.environ["RANK"] == "0":
            told = "the same" if resumed == whole else "other"
            repeats = "the same" if again == whole else "other"
            print(
                f"{os.environ['WORLD_SIZE']} ranks, find_unused_parameters={finds_unused}: trained twice, {repeats} "
                f"weights; stopped and resumed, {told} weights ({whole}, {resumed})",
                flush=True,
            )


if __name__ == "__main__":
    main()
