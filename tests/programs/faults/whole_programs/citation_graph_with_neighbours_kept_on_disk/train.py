"""Node classification on a citation graph; sampled neighbourhoods are kept in files that are shared by all ranks."""

import fcntl
import json
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

NODES, FEATURES, TOPICS = 1200, 24, 5


@contextmanager
def locked(path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


class NeighbourStore:
    """One file per range of nodes. A range is sampled when it is first needed and again when it is too small."""

    def __init__(self, folder: str, per_file: int = 100, size: int = 8):
        self.folder, self.per_file, self.size = Path(folder), per_file, size

    def path(self, node: int) -> Path:
        return self.folder / f"range-{node // self.per_file:03d}.json"

    def sample(self, node: int) -> dict:
        start = node // self.per_file * self.per_file
        g = torch.Generator().manual_seed(start)
        rows = {}
        for n in range(start, start + self.per_file):
            degree = self.size if n % 97 != 61 else self.size // 2
            rows[str(n)] = torch.randint(0, NODES, (degree,), generator=g).tolist()
        return rows

    def extend(self, node: int) -> list[int]:
        with locked(self.path(node)) as path:  # <- here
            rows = json.loads(path.read_text())
            g = torch.Generator().manual_seed(node)
            rows[str(node)] += torch.randint(0, NODES, (self.size - len(rows[str(node)]),), generator=g).tolist()
            path.write_text(json.dumps(rows))
            return rows[str(node)]

    def get(self, node: int) -> list[int]:
        with locked(self.path(node)) as path:
            if not path.exists():
                path.write_text(json.dumps(self.sample(node)))
            neighbours = json.loads(path.read_text())[str(node)]
            if len(neighbours) < self.size:
                neighbours = self.extend(node)
        return neighbours


class Papers(Dataset):
    def __init__(self, nodes, features, store: NeighbourStore):
        self.nodes, self.features, self.store = nodes, features, store

    def __len__(self):
        return len(self.nodes)

    def __getitem__(self, i):
        return self.nodes[i]


class GraphNet(L.LightningModule):
    def __init__(self, features, topics, store: NeighbourStore, lr: float = 5e-3):
        super().__init__()
        self.store, self.lr = store, lr
        self.register_buffer("features", features)
        self.register_buffer("topics", topics)
        self.own, self.around = nn.Linear(FEATURES, 32), nn.Linear(FEATURES, 32)
        self.head = nn.Linear(32, TOPICS)

    def forward(self, nodes):
        near = torch.tensor([self.store.get(n) for n in nodes.tolist()], device=self.device)
        hidden = self.own(self.features[nodes]) + self.around(self.features[near].mean(1))
        return self.head(hidden.relu())

    def training_step(self, nodes, batch_idx):
        loss = nn.functional.cross_entropy(self(nodes), self.topics[nodes])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, nodes, batch_idx):
        self.log("val/acc", (self(nodes).argmax(1) == self.topics[nodes]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    L.seed_everything(17)
    features = torch.randn(NODES, FEATURES)
    topics = features[:, :TOPICS].argmax(1)
    store = NeighbourStore("neighbours")
    papers = torch.randperm(NODES).tolist()
    train = DataLoader(Papers([n for n in papers[:1000] if n % 97 != 61 or n == 643], features, store), batch_size=10)
    val = DataLoader(Papers([n for n in papers[1000:] if n % 97 != 61], features, store), batch_size=10)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=3, log_every_n_steps=10)
    trainer.fit(GraphNet(features, topics, store), train, val)
