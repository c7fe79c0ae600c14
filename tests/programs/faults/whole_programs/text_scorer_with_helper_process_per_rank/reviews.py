import random

import lightning as L
from torch.utils.data import DataLoader

WORDS = "good bad great light heavy fast slow bike lamp tent strap price again never sturdy".split()
MEASURES = ["12km", "3,5kg", "45min", "2h", "0.8kg"]


def write_reviews(number=1200, seed=8):
    rng = random.Random(seed)
    rows = []
    for i in range(number):
        words = rng.choices(WORDS, k=rng.randint(6, 14))
        words.insert(rng.randrange(len(words)), rng.choice(MEASURES))
        if i == 742:
            words.insert(2, "10-12km")
        rows.append((" ".join(words), float(words.count("good") + words.count("great") - words.count("bad"))))
    return rows


class Reviews(L.LightningDataModule):
    def __init__(self, batch_size=6):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        rows = write_reviews()
        self.train, self.test = rows[:1080], rows[1080:]

    @staticmethod
    def collate(rows):
        texts, stars = zip(*rows)
        return list(texts), list(stars)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.test, self.batch_size, collate_fn=self.collate)
