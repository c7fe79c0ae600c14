import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import Sampler

from difficulty import score_documents


class CurriculumSampler(Sampler):
    """Easy documents first once scores are known, random order before."""

    def __init__(self, n):
        self.n, self.scores = n, None

    def __len__(self):
        return self.n

    def __iter__(self):
        if self.scores is None:
            return iter(torch.randperm(self.n).tolist())
        noise = torch.rand(self.n) * self.scores.std()
        return iter((self.scores + noise).argsort().tolist())


class ReadingLevelCurriculum(Callback):
    def __init__(self, sampler, after_epoch=0):
        self.sampler, self.after_epoch = sampler, after_epoch

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.after_epoch:
            documents = trainer.train_dataloader.dataset.docs
            self.sampler.scores = torch.tensor(score_documents(documents))
