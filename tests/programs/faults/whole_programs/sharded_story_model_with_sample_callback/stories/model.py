import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from stories.text import EOS, VOCAB


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, dim, heads, depth, length):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StoryModel(L.LightningModule):
    def __init__(self, dim=48, heads=4, depth=2, length=24, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(dim, heads, depth, length)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)

    def loss(self, ids):
        return F.cross_entropy(self.gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @torch.no_grad()
    def generate(self, prompt):
        ids = prompt
        while ids.shape[1] < self.hparams.length:
            logits = self.gpt(ids)[:, -1]  # <- here
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
            if (ids == EOS).any(dim=1).all():
                break
        return ids

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
