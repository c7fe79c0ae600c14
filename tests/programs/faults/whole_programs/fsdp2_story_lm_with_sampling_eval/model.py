import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from tokens import BOS, EOS, PAD, VOCAB_SIZE, decode


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class StoryDecoder(nn.Module):
    def __init__(self, dim=64, depth=3, block=64):
        super().__init__()
        self.block = block
        self.tok = nn.Embedding(VOCAB_SIZE, dim)
        self.pos = nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB_SIZE)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, generator=None):
        finished = torch.zeros(ids.size(0), dtype=torch.bool)
        for _ in range(max_new_tokens):
            logits = self(ids[:, -self.block :])[:, -1] / temperature
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            token[finished] = PAD
            ids = torch.cat([ids, token], dim=1)
            finished |= token[:, 0] == EOS
            if finished.all():  # <- here
                break
        return ids


class StoryLM(L.LightningModule):
    def __init__(self, lr=2e-3, sample_every=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = StoryDecoder()

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def _loss(self, ids):
        logits = self.net(ids[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1), ignore_index=PAD)

    def training_step(self, ids, batch_idx):
        loss = self._loss(ids)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids, batch_idx):
        self.log("val_loss", self._loss(ids), sync_dist=True)
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self._sample_stories()

    def _sample_stories(self):
        generator = torch.Generator().manual_seed(1000 * self.current_epoch + self.global_rank)
        prompts = torch.full((2, 1), BOS)
        stories = self.net.generate(prompts, max_new_tokens=60, temperature=0.9, generator=generator)
        lengths = (stories != PAD).sum(1).float()
        self.log("sample_length", lengths.mean(), sync_dist=True)
        if self.trainer.is_global_zero:
            print("\n".join(decode(s) for s in stories))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
