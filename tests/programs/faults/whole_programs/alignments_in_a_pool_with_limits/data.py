import numpy as np
import torch
from torch.utils.data import Dataset

# seconds; from the statistics of our corpus: mostly short commands, a few interviews
DEV_INTERVIEWS = {95: 40}
HOP = 100


class Mels(Dataset):
    def __init__(self, split, n, n_mels=20):
        self.split, self.n, self.n_mels = split, n, n_mels

    def __len__(self):
        return self.n

    def frames(self, i):
        if self.split == "dev" and i in DEV_INTERVIEWS:
            return DEV_INTERVIEWS[i] * HOP
        return 40 + (i * 29) % 50

    def __getitem__(self, i):
        rng = np.random.default_rng((i, len(self.split)))
        t = np.arange(self.frames(i))[:, None] / HOP
        freq = rng.uniform(0.5, 4, (1, self.n_mels))
        mel = np.sin(2 * np.pi * freq * t) + 0.05 * rng.standard_normal((len(t), self.n_mels))
        return torch.from_numpy(mel.astype(np.float32))


def collate(mels):
    lengths = torch.tensor([len(m) for m in mels])
    padded = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True)
    mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
    return padded, mask.float(), lengths
