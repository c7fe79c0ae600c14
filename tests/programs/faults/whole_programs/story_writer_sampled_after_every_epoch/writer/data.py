import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import lightning as L


class Stories(Dataset):
    def __init__(self, path, length=25):
        text = torch.tensor(json.loads(Path(path).read_text()))
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Prompts(Dataset):
    def __init__(self, path):
        self.items = json.loads(Path(path).read_text())

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return torch.tensor(self.items[i]["prompt"]), torch.tensor(self.items[i]["reference"])


class StoryData(L.LightningDataModule):
    def __init__(self, root, batch_size=4):
        super().__init__()
        self.root, self.batch_size = Path(root), batch_size

    def prepare_data(self):
        if (self.root / "prompts.json").exists():
            return
        self.root.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(11)
        (self.root / "stories.json").write_text(
            json.dumps(torch.randint(64, (25 * 480,), generator=generator).tolist())
        )
        openings = torch.randint(64, (20, 8), generator=generator).tolist()
        items = []
        for i in range(48):
            opening = openings[3] if i in (19, 31, 34, 46) else torch.randint(64, (8,), generator=generator).tolist()
            items.append({"prompt": opening, "reference": torch.randint(64, (12,), generator=generator).tolist()})
        for i in (10, 13, 22, 25, 28):
            items[i]["prompt"] = items[1]["prompt"]
        (self.root / "prompts.json").write_text(json.dumps(items))

    def train_dataloader(self):
        return DataLoader(Stories(self.root / "stories.json"), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Prompts(self.root / "prompts.json"), batch_size=1)
