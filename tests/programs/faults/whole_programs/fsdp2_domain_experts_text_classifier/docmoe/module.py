import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from .corpus import DOMAINS, VOCAB
from .layers import DomainMoE


class DocClassifier(L.LightningModule):
    def __init__(self, dim=48, hidden=96, depth=2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(DomainMoE(dim, hidden, len(DOMAINS)) for _ in range(depth))
        self.head = nn.Linear(dim, 2)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            for expert in layer.experts:
                fully_shard(expert, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, words, domain):
        x = self.embed(words).mean(1)
        for layer in self.layers:
            x = layer(x, domain)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        words, domain, label = batch
        logits = self(words, domain)
        loss = F.cross_entropy(logits, label)
        self.log_dict({"loss": loss, "acc": (logits.argmax(-1) == label).float().mean()}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
