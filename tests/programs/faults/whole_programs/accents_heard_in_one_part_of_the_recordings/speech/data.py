import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

FRAMES, BANDS = 40, 20


class Recordings(Dataset):
    """Filter banks of keywords. Each corpus comes speaker by speaker, in the order of its index file."""

    def __init__(self, speakers: list[tuple[int, int]], classes: int, seed: int):
        # speakers: (accent, number of utterances)
        self.accents = [accent for accent, count in speakers for _ in range(count)]
        self.classes = classes
        self.seed = seed

    def __len__(self):
        return len(self.accents)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        word = index % self.classes
        banks = torch.randn(FRAMES, BANDS, generator=generator)
        banks[:, word % BANDS] += 1.5 + 0.1 * self.accents[index]
        return banks, word, self.accents[index]


class Part(Sampler):
    """The consecutive part of the index that belongs to a rank; keeps a speaker's files together on one disk."""

    def __init__(self, count, rank, ranks, shuffle=False):
        size = count // ranks
        self.first, self.size, self.shuffle = rank * size, size, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        return iter((self.first + order).tolist())


def corpus(utterances):
    """Speakers of a corpus, a few utterances each."""
    per_speaker = 6
    common = [(number % 3, per_speaker) for number in range(utterances // per_speaker - 4)]
    return common + [(3, per_speaker)] * 4


class RecordingsModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 18, utterances: int = 2400, classes: int = 8):
        super().__init__()
        self.save_hyperparameters()

    def loader(self, utterances, seed, shuffle):
        dataset = Recordings(corpus(utterances), self.hparams.classes, seed)
        sampler = Part(len(dataset), self.trainer.global_rank, self.trainer.world_size, shuffle)
        return DataLoader(dataset, self.hparams.batch_size, sampler=sampler)

    def train_dataloader(self):
        return self.loader(self.hparams.utterances, 0, True)

    def val_dataloader(self):
        return self.loader(self.hparams.utterances // 5, 10**6, False)
