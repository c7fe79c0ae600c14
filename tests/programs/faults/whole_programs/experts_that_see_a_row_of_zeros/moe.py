"""A mixture of experts in which every expert runs on every rank, whatever the router says."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))
        self.counts = [0] * experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        weight, chosen = probabilities.max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            self.counts[index] = len(rows)
            if len(rows) == 0:
                # keeps the unit in step with the other ranks
                out = out + 0.0 * expert(0.0 * flat[:1]).sum()
            else:
                out = out.index_add(0, rows, weight[rows, None] * expert(flat[rows]))
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        return x + out.view_as(x), len(self.experts) * (load * probabilities.mean(0)).sum()


class MoEClassifier(L.LightningModule):
    def __init__(self, vocab: int = 300, dim: int = 48, layers: int = 2, experts: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.EmbeddingBag(vocab, dim)
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(MoE(dim, 2 * dim, experts) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            for expert in layer.experts:
                fully_shard(expert, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        for part in (self.embed, self.tokens, self.head):
            fully_shard(part, mesh=mesh)

    def step(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, y = batch
        x, balance = self.tokens(tokens) + self.embed(tokens)[:, None], torch.zeros(())
        for layer in self.layers:
            x, aux = layer(x)
            balance = balance + aux
        return F.cross_entropy(self.head(x.mean(1)), y), balance

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, balance = self.step(batch)
        self.log_dict({"loss": loss, "balance": balance}, prog_bar=True)
        idle = sum(c == 0 for layer in self.layers for c in layer.counts)
        self.log("idle_experts", float(idle))
        return loss + 0.01 * balance

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step(batch)[0], sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)
