import json
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from .vocab import CodeVocab


class LogEncoder(L.LightningModule):
    """Predicts the next event of a host; the vocabulary of each rank is kept beside the checkpoints."""

    def __init__(self, vocab_size=64, dim=48, lr=2e-3, snapshots="vocab"):
        super().__init__()
        self.save_hyperparameters()
        self.vocab = CodeVocab(vocab_size)
        self.embed = nn.Embedding(vocab_size, dim)
        self.time = nn.Linear(1, dim)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 96, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(dim, vocab_size)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, ids, ms):
        x = self.embed(ids) + self.time(ms[..., None])
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def training_step(self, windows, batch_idx):
        ids = torch.tensor([[self.vocab(r["template"], r["code"]) for r in rows] for rows in windows])
        ms = torch.tensor([[r["ms"] for r in rows] for rows in windows]).log1p()
        logits = self(ids[:, :-1], ms[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, batch_size=len(windows))
        return loss

    def on_save_checkpoint(self, checkpoint):
        folder = Path(self.trainer.default_root_dir, self.hparams.snapshots)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step{self.global_step:06d}-rank{self.global_rank}.json"
        path.write_text(json.dumps(self.vocab.snapshot(), indent=1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
