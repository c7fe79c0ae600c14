import random

import torch

NAMES = ["anna", "ben", "clara", "david"]
VERBS = ["found", "lost", "sold", "drew"]
THINGS = ["a key", "a ball", "a map", "some bread", "a kite"]
PLACES = ["in the forest", "at home", "near the lake"]


class WordTokenizer:
    def __init__(self):
        words = {w for part in (NAMES, VERBS, THINGS, PLACES) for text in part for w in text.split()}
        self.words = ["<pad>", "<end>", "and", *sorted(words)]
        self.number = {word: i for i, word in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, text):
        return [self.number[word] for word in text.split()]

    def decode(self, tokens):
        words = [self.words[t] for t in tokens]
        return " ".join(words[: words.index("<end>")] if "<end>" in words else words)


def stories(tokenizer, count, length=33, seed=0):
    rng = random.Random(seed)
    rows = torch.zeros(count, length, dtype=torch.long)
    for row in rows:
        parts = [
            f"{rng.choice(NAMES)} {rng.choice(VERBS)} {rng.choice(THINGS)} {rng.choice(PLACES)}"
            for _ in range(rng.randint(1, 4))
        ]
        tokens = tokenizer.encode(" and ".join(parts) + " <end>")[:length]
        row[: len(tokens)] = torch.tensor(tokens)
    return rows
