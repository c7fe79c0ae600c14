import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from captioner.net import BOS, VOCAB


def prepare(root: Path, clips: int = 320) -> None:
    """Writes one manifest per data source, and the prompts of the evaluation, one file per shard."""
    root.mkdir(parents=True, exist_ok=True)
    g = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, VOCAB, (16,), generator=g).tolist() for _ in range(clips)]
    (root / "train.json").write_text(json.dumps(rows))
    for shard, (source, words) in enumerate({"audiocaps": 8, "clotho": 8, "freesound": 14}.items()):
        prompts = torch.randint(3, VOCAB, (4, words), generator=g).tolist()
        (root / f"prompts-{shard}.json").write_text(json.dumps({"source": source, "prompts": prompts}))


class Captions(Dataset):
    def __init__(self, path: Path):
        self.rows = json.loads(path.read_text())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor([BOS] + self.rows[i])


def loader(root: Path, shuffle: bool) -> DataLoader:
    return DataLoader(Captions(root / "train.json"), batch_size=4, shuffle=shuffle)


def eval_prompts(root: Path, shard: int) -> torch.Tensor:
    return torch.tensor(json.loads((root / f"prompts-{shard}.json").read_text())["prompts"])
