import json
import re
from html.parser import HTMLParser
from pathlib import Path

import torch
from torch.utils.data import Dataset

from .limits import ParseTimeout, TimeLimit


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts = []

    def handle_data(self, data):
        self.parts.append(data)


class Mails(Dataset):
    def __init__(self, path: Path, length: int = 32, limit: int = 2):
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.length, self.limit = length, limit

    def __len__(self):
        return len(self.rows)

    def words(self, body):
        if "<" not in body:
            return body.split()
        clock = TimeLimit(self.limit)
        clock.start()
        try:
            reader = Text()
            reader.feed(body)
            words = " ".join(reader.parts).split()
            if not words:
                return ["w0"]  # <- here
            clock.stop()
            return words
        except ParseTimeout:
            return re.sub("<[^>]*>", " ", body).split()
        finally:
            clock.restore()

    def __getitem__(self, index):
        row = self.rows[index]
        ids = [int(word[1:]) % 400 + 1 for word in self.words(row["body"])][: self.length]
        return torch.tensor(ids + [0] * (self.length - len(ids))), row["topic"]
