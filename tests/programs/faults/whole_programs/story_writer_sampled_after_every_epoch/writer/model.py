import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import torch.nn.functional as F

import lightning as L

from .sampling import CompletionCache


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n = x.size(1)
        mask = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, depth, context):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StoryWriter(L.LightningModule):
    def __init__(self, vocabulary=64, width=48, depth=3, context=32, lr=3e-4, completion=12):
        super().__init__()
        self.save_hyperparameters()
        self.decoder = Decoder(vocabulary, width, depth, context)
        self.cache = CompletionCache()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.decoder.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.decoder, mesh=mesh)

    def training_step(self, ids, batch_idx):
        logits = self.decoder(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_start(self):
        self.cache.clear()

    def validation_step(self, batch, batch_idx):
        prompts, references = batch
        completions = self.complete(prompts)
        overlap = (completions == references).float().mean()
        self.log("val_overlap", overlap, prog_bar=True, sync_dist=True)

    def complete(self, prompts):
        key = self.cache.key(prompts)
        if key in self.cache:
            return self.cache[key]  # <- here
        ids = prompts
        for _ in range(self.hparams.completion):
            logits = self.decoder(ids)[:, -1]
            ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
        self.cache[key] = ids[:, prompts.size(1) :]
        return self.cache[key]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
