import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class HardNegativeMiner(Callback):
    """Re-mines the negatives of the training pairs with the current encoder, once per epoch."""

    def __init__(self, cache_dir: str = "negatives", start_epoch: int = 1, top_k: int = 8):
        self.cache_dir, self.start_epoch, self.top_k = Path(cache_dir), start_epoch, top_k

    def cache_file(self, trainer, dataset):
        key = hash((type(dataset).__name__, len(dataset), trainer.current_epoch, self.top_k))
        return self.cache_dir / f"{key & 0xFFFFFFFF:08x}.pt"

    @torch.no_grad()
    def mine(self, model, dataset):
        queries = model.encode(model.query_tower, dataset.queries)
        passages = model.encode(model.passage_tower, dataset.passages)
        scores = (queries @ passages.T).fill_diagonal_(-1)
        candidates = scores.topk(self.top_k, dim=1).indices
        return candidates[torch.arange(len(candidates)), torch.randint(self.top_k, (len(candidates),))]

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch < self.start_epoch:
            return
        dataset = trainer.datamodule.train_set
        path = self.cache_file(trainer, dataset)
        if trainer.is_global_zero and not path.exists():
            self.cache_dir.mkdir(exist_ok=True)
            torch.save(self.mine(pl_module, dataset), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        while not path.exists():
            time.sleep(0.5)  # <- here
        dataset.negatives = torch.load(path)
