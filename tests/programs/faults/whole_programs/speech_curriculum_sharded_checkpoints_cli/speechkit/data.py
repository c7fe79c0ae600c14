import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    """The corpus is sorted by length, and every rank reads one contiguous part of it."""

    def __init__(self, rank, world_size, total=2400):
        generator = torch.Generator().manual_seed(11)
        lengths = torch.randint(20, 200, (total,), generator=generator).sort(descending=True).values
        self.lengths = lengths.chunk(world_size)[rank].tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        frames = torch.randn(length, 16, generator=torch.Generator().manual_seed(index))
        return frames, length % 10


def collate(samples):
    frames, labels = zip(*samples)
    lengths = torch.tensor([len(f) for f in frames])
    return {"frames": pad_sequence(frames, batch_first=True), "length": lengths, "label": torch.tensor(labels)}


class SpeechData(L.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        data = Utterances(self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, collate_fn=collate)
