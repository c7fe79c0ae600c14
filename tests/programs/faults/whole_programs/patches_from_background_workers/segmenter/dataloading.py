import lightning as L
import torch

from .augmenter import Augmenter


class AugmentedEpochs:
    """One Augmenter for each pass, with another seed."""

    def __init__(self, cases, batches, **kwargs):
        self.cases, self.batches, self.kwargs = cases, batches, kwargs
        self.passes = 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.passes += 1
        for image, label in Augmenter(self.cases, self.batches, seed=self.passes, **self.kwargs):
            yield torch.from_numpy(image)[:, None], torch.from_numpy(label).long()


class CaseDataModule(L.LightningDataModule):
    def __init__(self, train, val, num_processes=2, ram_gb=1.0, patch=(12, 32, 32), batch_size=2):
        super().__init__()
        self.cases = {"train": train, "val": val}
        self.kwargs = {"num_processes": num_processes, "ram_gb": ram_gb, "patch": patch, "batch_size": batch_size}

    def _epochs(self, which, batches):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return AugmentedEpochs(self.cases[which][rank::world], batches, **self.kwargs)

    def train_dataloader(self):
        return self._epochs("train", 50)

    def val_dataloader(self):
        return self._epochs("val", 6)
