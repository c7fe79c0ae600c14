"""A draft head that learns to guess the next tokens from hidden states of a frozen target."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Target(nn.Module):
    """Stands for the large model: embeddings, and one mixing layer that never changes."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(self.embed(tokens))[0]


class DraftLayer(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = x + self.attn(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(x)


class DraftTrainer(L.LightningModule):
    def __init__(
        self, vocab: int = 400, dim: int = 64, layers: int = 2, min_loss_tokens: int = 8, accumulate: int = 2
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.target = Target(vocab, dim)
        self.layers = nn.ModuleList(DraftLayer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)
        self.skipped = 0
        self.automatic_optimization = False

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (*self.layers, self.head):
            fully_shard(part, mesh=mesh)

    def usable(self, batch: dict[str, Tensor]) -> bool:
        return int(batch["loss_mask"].sum()) >= self.hparams.min_loss_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.target(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["tokens"][:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        mask = batch["loss_mask"][:, 1:].flatten().float()
        return (each * mask).sum() / mask.sum().clamp(min=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        if self.usable(batch):  # <- here
            loss = self.loss(batch)
            self.manual_backward(loss / self.hparams.accumulate)
            self.log("train/loss", loss, prog_bar=True)
        else:
            self.skipped += 1
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def on_train_end(self) -> None:
        print(f"rank {self.global_rank} has passed over {self.skipped} batches")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        wanted = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(wanted, lr=5e-4, weight_decay=0.01)
