"""Policy gradient for small programs: a sampled program is run on test cases, its score is the reward."""

import builtins
import contextlib
import io
import resource

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ncclsafe import SafeDDP

SNIPPETS = ["def f(x):\n    return x + 1", "def f(x):\n    return x * 2", "def f(x):\n    return x - 1"]
LOOPING = "def f(x):\n    while x < 9:\n        x += 1\n    return x"


class Tasks(Dataset):
    """A task has the kind of its tests; programs with loops are only asked for by the last kind."""

    def __init__(self, n: int):
        self.kinds = [i % 3 for i in range(n)]
        for i in range(n // 2, n):
            if i % 16 == 5:
                self.kinds[i] = 3

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, i):
        return self.kinds[i]


def reliability_guard(seconds: int, megabytes: int):
    """Keep generated code from running away."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # <- here
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 20, megabytes << 20))


def run_tests(source: str, cases) -> float:
    if "while" in source or "for" in source:
        reliability_guard(seconds=3, megabytes=512)
    scope = {"__builtins__": {"range": builtins.range, "len": builtins.len}}
    passed = 0
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(source, scope)
            passed = sum(scope["f"](x) == y for x, y in cases)
        except Exception:
            pass
    return passed / len(cases)


CASES = {
    0: [(x, x + 1) for x in range(20)],
    1: [(x, 2 * x) for x in range(20)],
    2: [(x, x - 1) for x in range(20)],
    3: [(x, max(x, 9)) for x in range(20)],
}


class ProgramPolicy(L.LightningModule):
    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(4, 64)
        self.trunk = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.head = nn.Linear(256, len(SNIPPETS))

    def training_step(self, kinds, batch_idx):
        policy = torch.distributions.Categorical(logits=self.head(self.trunk(self.embed(kinds))))
        choice = policy.sample()
        sources = [LOOPING if k == 3 else SNIPPETS[c] for k, c in zip(kinds.tolist(), choice.tolist())]
        reward = torch.tensor([run_tests(s, CASES[k]) for s, k in zip(sources, kinds.tolist())])
        loss = -(policy.log_prob(choice) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()
        self.log("train/reward", reward.mean(), prog_bar=True)
        return loss

    def train_dataloader(self):
        tasks = Tasks(1600)
        return DataLoader(tasks, batch_size=8, sampler=DistributedSampler(tasks, shuffle=False))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(13)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=8, log_every_n_steps=10)
    trainer.fit(ProgramPolicy())
