import argparse

import lightning as L
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader

from adder import Adder
from curriculum import LengthCurriculum
from tasks import Problems, TokenBudgetSampler, pad


class AdditionData(L.LightningDataModule):
    def __init__(self, size, max_tokens):
        super().__init__()
        self.size, self.max_tokens = size, max_tokens
        self.level = 1

    def train_dataloader(self):
        problems = Problems(self.size, max_digits=6, seed=4)
        sampler = TokenBudgetSampler(problems, self.max_tokens, self.trainer.global_rank, self.trainer.world_size)
        sampler.level = self.level
        return DataLoader(problems, batch_sampler=sampler, collate_fn=pad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--size", type=int, default=3600)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--min-delta", type=float, default=0.1)
    args = parser.parse_args()
    L.seed_everything(23)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[LengthCurriculum(args.min_delta)],
        log_every_n_steps=5,
    )
    trainer.fit(Adder(), datamodule=AdditionData(args.size, args.max_tokens))
