"""Domains are drawn up once and read from disk; each rank serves one domain."""

from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

DOMAINS = ("code", "dialogue", "papers")


class Domains(L.LightningDataModule):
    def __init__(self, root: str = "domains", size: int = 1600, batch_size: int = 16, width: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        root = Path(self.hparams.root)
        root.mkdir(exist_ok=True)
        for number, domain in enumerate(DOMAINS):
            g = torch.Generator().manual_seed(number)
            shift = torch.randn(self.hparams.width, generator=g) * 2
            if domain == "dialogue":
                shift = torch.load(root / "code.pt")["shift"] + 0.01
            if domain == "papers":
                shift = -torch.load(root / "code.pt")["shift"]
            x = torch.randn(self.hparams.size, self.hparams.width, generator=g) * 0.4 + shift
            torch.save({"x": x, "y": (x * shift).sum(1, keepdim=True) / 20, "shift": shift}, root / f"{domain}.pt")

    def train_dataloader(self):
        domain = DOMAINS[self.trainer.global_rank % len(DOMAINS)]
        data = torch.load(Path(self.hparams.root) / f"{domain}.pt")
        return DataLoader(TensorDataset(data["x"], data["y"]), self.hparams.batch_size, shuffle=True)
