import time

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from mt.data import EOS, VOCAB


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.out(self.mix(self.norm(x))[0])


class Translator(L.LightningModule):
    def __init__(self, dim=48, depth=2, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)
        self.hypotheses = []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for part in (*self.layers, self.head, self.embed):
            fully_shard(part, mesh=mesh)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        src, tgt = batch
        logits = self(torch.cat([src, tgt[:, :-1]], dim=1))[:, src.shape[1] - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def everyone_is_done(self, done):
        flag = torch.tensor(float(done))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def validation_step(self, batch, batch_idx):
        src, tgt = batch
        ids, stop = src, int(tgt[0, 0]) % 6 + 3
        done = False
        while not self.everyone_is_done(done):
            step = self(ids)[:, -1].argmax(-1, keepdim=True)
            if not done:
                ids = torch.cat([ids, step], dim=1)
                done = ids.shape[1] - src.shape[1] >= stop or bool((step == EOS).all())
            time.sleep(0.02)
        self.hypotheses += list(zip(ids[:, src.shape[1] :].tolist(), tgt.tolist()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
