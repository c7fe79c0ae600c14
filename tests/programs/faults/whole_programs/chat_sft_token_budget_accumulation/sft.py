"""Chat fine-tuning with FSDP2 and manual optimisation: gradients are accumulated up to a budget of target tokens."""

import random

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeModelParallel

WORLD = 2
VOCAB = 200
IGNORE = -100


class Conversations(Dataset):
    """Dialogues with several turns; only the assistant's turns are targets."""

    def __init__(self, n: int, seed: int) -> None:
        rng = random.Random(seed)
        self.dialogues = []
        for i in range(n):
            turns = []
            for _ in range(rng.randint(1, 3)):
                user = [rng.randrange(2, VOCAB) for _ in range(rng.randint(4, 10))]
                assistant = [rng.randrange(2, VOCAB) for _ in range(rng.randint(6, 22))]
                turns.append((user, assistant))
            self.dialogues.append(turns)

    def __len__(self) -> int:
        return len(self.dialogues)

    def __getitem__(self, i: int) -> tuple[list[int], list[int]]:
        tokens, labels = [], []
        for user, assistant in self.dialogues[i]:
            tokens += user + assistant
            labels += [IGNORE] * len(user) + assistant
        return tokens, labels


def collate(items):
    width = max(len(t) for t, _ in items)
    tokens = torch.zeros(len(items), width, dtype=torch.long)
    labels = torch.full((len(items), width), IGNORE)
    for row, (t, y) in enumerate(items):
        tokens[row, : len(t)] = torch.tensor(t)
        labels[row, : len(y)] = torch.tensor(y)
    return tokens, labels


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.ff = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.rnn(x)[0])


class ChatModel(nn.Module):
    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ChatTuning(L.LightningModule):
    def __init__(self, lr: float = 5e-4, token_budget: int = 480) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net = None
        self.pending_tokens = 0

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.net = ChatModel()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx: int) -> None:
        tokens, labels = batch
        targets = labels[:, 1:]
        self.pending_tokens += int((targets != IGNORE).sum())
        full = self.pending_tokens >= self.hparams.token_budget
        self.net.set_requires_gradient_sync(full)  # <- here

        logits = self.net(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        self.manual_backward(loss / self.hparams.token_budget)
        if full:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.pending_tokens = 0
        self.log("loss_per_token", loss.detach() / (targets != IGNORE).sum(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    L.seed_everything(2)
    loader = DataLoader(Conversations(2000, seed=4), batch_size=4, shuffle=True, collate_fn=collate, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=SafeModelParallel(data_parallel_size=WORLD, tensor_parallel_size=1),
        max_epochs=3,
        log_every_n_steps=20,
    )
    trainer.fit(ChatTuning(), loader)


if __name__ == "__main__":
    main()
