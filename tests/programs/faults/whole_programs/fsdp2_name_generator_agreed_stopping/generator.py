import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from names import END, VOCAB, spell


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.out(self.rnn(self.norm(x))[0])


class NameModel(L.LightningModule):
    def __init__(self, dim=48, depth=2, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mixers = nn.ModuleList(Mixer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for mixer in self.mixers:
            fully_shard(mixer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, ids):
        x = self.embed(ids)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(x)

    def training_step(self, ids, batch_idx):
        logits = self(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids, batch_idx):
        g = torch.Generator().manual_seed(100 * self.global_rank + batch_idx)
        names, steps = self.generate(4, max_new=40, generator=g)
        self.log("steps", float(steps), sync_dist=True)
        if self.global_rank == 0 and batch_idx == 0:
            self.print([spell(n) for n in names.tolist()])

    @torch.no_grad()
    def generate(self, count, max_new, generator):
        ids = torch.full((count, 1), END)
        done = torch.zeros(count, dtype=torch.bool)
        for step in range(max_new):
            probs = self(ids)[:, -1].softmax(-1)
            token = torch.multinomial(probs, 1, generator=generator)
            token[done] = END
            ids = torch.cat([ids, token], 1)
            done |= token[:, 0] == END
            unfinished = (~done).any().long()
            dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
            if unfinished.item() == 0:
                break
        return ids, step + 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
