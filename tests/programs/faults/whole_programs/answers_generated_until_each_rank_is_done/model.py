from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from tokenizer import END, VOCABULARY
from torch import nn
from torch.distributed.fsdp import fully_shard


class ChatModel(L.LightningModule):
    """A small decoder. Blocks are sharded one by one, the embedding and the head with the root."""

    def __init__(self, width: int = 96, depth: int = 3, heads: int = 4, context: int = 96, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "embed"):
            return
        h = self.hparams
        self.embed = nn.Embedding(VOCABULARY, h.width)
        self.positions = nn.Embedding(h.context, h.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(h.width, h.heads, 4 * h.width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(h.depth)
        )
        self.norm = nn.LayerNorm(h.width)
        self.head = nn.Linear(h.width, VOCABULARY)
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.size(1)
        x = self.embed(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))

    def loss_of(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self(batch["tokens"][:, :-1])
        targets = batch["tokens"][:, 1:].masked_fill(~batch["is_answer"][:, 1:], -100)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: list[int], max_new_tokens: int = 40, temperature: float = 0.9) -> list[int]:
        tokens = torch.tensor([prompt], device=self.device)
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.hparams.context :])[:, -1] / temperature
            chosen = torch.multinomial(logits.softmax(-1), 1)
            tokens = torch.cat([tokens, chosen], dim=1)
            if chosen.item() == END:  # <- here
                break
        return tokens[0, len(prompt) :].tolist()
