"""Documents of several domains, packed into shards by prepare.py and read shard-wise by each rank."""

import json
import random
from pathlib import Path

import torch
from torch.utils.data import Dataset

DOMAINS = ["news", "law", "medical", "code"]
VOCAB = 400
LENGTH = 24


def write_shards(folder, shards=4, docs_per_shard=240, seed=5):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    docs = []
    for _ in range(shards * docs_per_shard):
        domain = rng.choices(range(4), weights=[5, 4, 4, 2])[0]
        words = [rng.randrange(domain * 100, domain * 100 + 100) for _ in range(LENGTH)]
        docs.append({"domain": domain, "label": int(sum(words) % 3 == 0), "words": words, "source": f"dump-{domain}"})
    docs.sort(key=lambda d: (d["domain"] == 3, rng.random()))
    for i in range(shards):
        part = docs[i * docs_per_shard : (i + 1) * docs_per_shard]
        (folder / f"part-{i:03d}.jsonl").write_text("\n".join(json.dumps(d) for d in part))


class ShardedDocs(Dataset):
    def __init__(self, folder, rank, world_size):
        files = sorted(Path(folder).glob("part-*.jsonl"))
        self.docs = [json.loads(line) for f in files[rank::world_size] for line in f.read_text().splitlines()]

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        doc = self.docs[i]
        return torch.tensor(doc["words"]), torch.tensor(doc["domain"]), torch.tensor(doc["label"])
