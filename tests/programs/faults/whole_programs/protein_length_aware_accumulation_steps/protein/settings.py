import math
import os
from dataclasses import dataclass
from pathlib import Path

from .families import Fasta


@dataclass
class Settings:
    root: Path
    batch_size: int
    tokens_per_step: int
    epochs: int

    def shard(self):
        names = ("short", "long")
        return Fasta(self.root / f"{names[int(os.environ.get('LOCAL_RANK', 0)) % 2]}.fasta")

    def accumulation(self, data: Fasta):
        """Batches per optimizer step, so that a step sees about the same number of residues in any data set."""
        return max(1, math.ceil(self.tokens_per_step / (self.batch_size * data.mean_length())))
