import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

DECODER = """
import sys, time
import numpy as np
seed, target = int(sys.argv[1]), sys.argv[2]
time.sleep(0.25)
wave = np.random.default_rng(seed).normal(size=(16, 1024)).astype("float32")
np.save(target, np.abs(np.fft.rfft(wave))[:, :64].astype("float32"))
"""


class Clips(Dataset):
    """Clips come in packs of 16; a pack is decoded by a tool of its own when it is first needed."""

    def __init__(self, cache, packs=64):
        self.cache = Path(cache)
        self.packs = packs

    def __len__(self):
        return 16 * self.packs

    def pack(self, number):
        path = self.cache / f"{number:04d}.npy"
        if not path.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            scratch = self.cache / f"{number:04d}.{os.getpid()}.npy"
            subprocess.run(
                [sys.executable, "-c", DECODER, str(number), str(scratch)], check=True, stdout=subprocess.DEVNULL
            )
            os.replace(scratch, path)
        return np.load(path, mmap_mode="r")

    def __getitem__(self, index):
        row = self.pack(index // 16)[index % 16]
        return torch.tensor(np.log1p(row)), index % 6
