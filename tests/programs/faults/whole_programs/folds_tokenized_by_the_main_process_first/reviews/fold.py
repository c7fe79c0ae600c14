import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

GOOD = ["great", "lovely", "superb", "wonderful", "brilliant"]
BAD = ["awful", "boring", "dull", "terrible", "weak"]
OTHER = [f"{a}{b}" for a in "bcdfglmnprst" for b in ("ack", "ell", "ing", "ope", "ust")]


def write_review(number: int) -> tuple[str, int]:
    rng = random.Random(number)
    label = rng.random() < 0.5
    words = rng.choices(GOOD if label else BAD, k=2) + rng.choices(GOOD + BAD, k=1) + rng.choices(OTHER, k=20)
    rng.shuffle(words)
    return " ".join(words), int(label)


class Tokenizer:
    """Slow and in Python: merges the most frequent pairs of letters."""

    def __init__(self, merges: int = 40):
        self.merges = merges
        self.rules: list[tuple[str, str]] = []

    def train(self, texts):
        words = Counter(tuple(w) for t in texts for w in t.split())
        for _ in range(self.merges):
            pairs = Counter()
            for word, n in words.items():
                for pair in pairwise(word):
                    pairs[pair] += n
            self.rules.append(pairs.most_common(1)[0][0])
            words = Counter({self._merge(word, self.rules[-1]): n for word, n in words.items()})

    @staticmethod
    def _merge(word, pair):
        out = []
        for piece in word:
            if out and (out[-1], piece) == pair:
                out[-1] += piece
            else:
                out.append(piece)
        return tuple(out)

    def __call__(self, text):
        pieces = []
        for word in text.split():
            word = tuple(word)
            for rule in self.rules:
                word = self._merge(word, rule)
            pieces += word
        return pieces


class FoldData(L.LightningDataModule):
    LENGTH = 64

    def __init__(self, splits: dict, vocabulary: list[str]):
        super().__init__()
        self.splits, self.vocabulary = splits, vocabulary

    @classmethod
    def cached(cls, cache, fold: int, folds: int, reviews: int = 3000) -> "FoldData":
        path = Path(cache) / f"fold{fold}of{folds}.pt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            torch.save(cls._tokenize(fold, folds, reviews), path)
            print(f"{path} took {time.perf_counter() - start:.1f} s", flush=True)
        return cls(**torch.load(path))

    @classmethod
    def _tokenize(cls, fold, folds, reviews):
        texts, labels = zip(*map(write_review, range(reviews)))
        test = [i for i in range(reviews) if i % folds == fold]
        rest = [i for i in range(reviews) if i % folds != fold]
        tokenizer = Tokenizer()
        tokenizer.train(texts[i] for i in rest)
        pieces = [tokenizer(text) for text in texts]
        vocabulary = ["<pad>", "<unk>"] + sorted({p for i in rest for p in pieces[i]})
        number = {p: k for k, p in enumerate(vocabulary)}
        rows = [[number.get(p, 1) for p in ps[: cls.LENGTH]] for ps in pieces]
        tokens = torch.tensor([row + [0] * (cls.LENGTH - len(row)) for row in rows])
        target = torch.tensor(labels)
        parts = {"train": rest[: -len(rest) // 10], "val": rest[-len(rest) // 10 :], "test": test}
        return {"splits": {k: (tokens[v], target[v]) for k, v in parts.items()}, "vocabulary": vocabulary}

    def _loader(self, split, **kwargs):
        return DataLoader(TensorDataset(*self.splits[split]), batch_size=16, **kwargs)

    def train_dataloader(self):
        return self._loader("train", shuffle=True, drop_last=True)

    def val_dataloader(self):
        return self._loader("val")

    def test_dataloader(self):
        return self._loader("test")
