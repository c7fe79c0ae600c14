import lightning as L
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from tasks import CHARS, STOI


class Adder(L.LightningModule):
    def __init__(self, dim=48, depth=2, heads=4, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.tok = nn.Embedding(len(CHARS), dim)
        self.pos = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, len(CHARS))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, ids):
        n = ids.size(1)
        x = self.tok(ids) + self.pos(torch.arange(n))
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def training_step(self, ids, batch_idx):
        logits = self(ids[:, :-1])
        target = ids[:, 1:]
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1))
        self.log("loss", loss, prog_bar=True, batch_size=len(ids))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
