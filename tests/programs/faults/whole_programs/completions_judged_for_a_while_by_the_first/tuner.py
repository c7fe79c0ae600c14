import json
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

DIGITS = "0123456789+=. "
STOI = {c: i for i, c in enumerate(DIGITS)}
JUDGE = """
import sys, json, time
right = 0
for line in sys.stdin:
    question, answer = json.loads(line)
    time.sleep(0.2)
    right += answer.split(".")[0] == str(sum(map(int, question.rstrip("=").split("+"))))
print(right)
"""


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        h, n = self.norm(x), x.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=x.device), 1)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ff(x)


class Adder(L.LightningModule):
    def __init__(self, dim=48, depth=2, new_tokens=4):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(len(DIGITS), dim)
        self.position = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, len(DIGITS))

    def configure_model(self):
        for part in (self.embed, self.position, *self.layers, self.head):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, ids, batch_idx):
        loss = F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def generate(self, question):
        """As many tokens for everyone; what follows the full stop is cut off later."""
        ids = torch.tensor([[STOI[c] for c in question]], device=self.device)
        for _ in range(self.hparams.new_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        return "".join(DIGITS[i] for i in ids[0, len(question) :])

    def validation_step(self, batch, batch_idx):
        # questions differ in length between ranks, the number of new tokens does not
        self.answers += [(q, self.generate(q)) for q in batch]

    def on_validation_epoch_start(self):
        self.answers = []

    def on_validation_epoch_end(self):
        everything = [None] * self.trainer.world_size
        dist.all_gather_object(everything, self.answers)
        score = torch.zeros(1)
        if self.trainer.is_global_zero:
            rows = [row for share in everything for row in share]
            score += self.judge(rows) / len(rows)
            table = Path("answers") / f"step_{self.global_step}.json"
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text(json.dumps(rows, indent=1))
        dist.broadcast(score, 0)
        self.log("solved", score.item(), prog_bar=True)

    @staticmethod
    def judge(rows):
        lines = "\n".join(json.dumps(row) for row in rows)
        done = subprocess.run([sys.executable, "-c", JUDGE], input=lines, capture_output=True, text=True, check=True)
        return int(done.stdout)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)
