import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeModelParallel
from torch.utils.data import DataLoader

from data import Prompts
from policy import EOS, PAD, Policy, rollout


class Reinforce(L.LightningModule):
    """Rewards continuations that reuse the prompt's tokens."""

    def __init__(self, max_new_tokens=32, seed=3, lr=5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.policy = Policy()
        self.baseline = 0.0

    def configure_model(self):
        self.policy.shard(self.device_mesh["data_parallel"])

    def on_fit_start(self):
        torch.manual_seed(self.hparams.seed + self.global_rank)

    def reward(self, prompts, continuation):
        hits = (continuation[:, :, None] == prompts[:, None, :]).any(-1).float()
        alive = (continuation != PAD) & (continuation != EOS)
        return (hits * alive).sum(1) / alive.sum(1).clamp(min=1)

    def training_step(self, prompts, batch_idx):
        self.policy.eval()
        ids = rollout(self.policy, prompts, self.hparams.max_new_tokens)
        self.policy.train()
        start = prompts.shape[1]
        continuation = ids[:, start:]
        reward = self.reward(prompts, continuation)
        logp = self.policy(ids[:, :-1]).log_softmax(-1)[:, start - 1 :]
        logp = logp.gather(-1, continuation[..., None]).squeeze(-1) * (continuation != PAD)
        loss = -((reward - self.baseline)[:, None] * logp).sum(1).mean()
        self.baseline = 0.95 * self.baseline + 0.05 * reward.mean().item()
        self.log("reward", reward.mean(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    L.seed_everything(args.seed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        log_every_n_steps=5,
    )
    loader = DataLoader(Prompts(), batch_size=args.rollouts, shuffle=True)
    trainer.fit(Reinforce(args.max_new_tokens, args.seed), loader)


if __name__ == "__main__":
    main()
