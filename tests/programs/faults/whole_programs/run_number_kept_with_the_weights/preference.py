"""Direct preference optimisation of a small policy against a frozen reference."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Policy(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def shard(policy, mesh):
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(policy, mesh=mesh)


class DPO(L.LightningModule):
    def __init__(self, vocabulary=300, width=64, depth=3, beta=0.1, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.policy = self.reference = None

    def configure_model(self):
        if self.policy is not None:
            return
        h, mesh = self.hparams, self.device_mesh["data_parallel"]
        policy = Policy(h.vocabulary, h.width, h.depth)
        self.reference = shard(copy.deepcopy(policy).requires_grad_(False), mesh)
        self.policy = shard(policy, mesh)

    @staticmethod
    def log_probability(model, tokens, prompt):
        logits = model(tokens[:, :-1]).log_softmax(-1)
        chosen = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return chosen[:, prompt - 1 :].sum(-1)

    def margins(self, batch):
        prompt = batch["prompt"].size(1)
        both = torch.cat(
            [torch.cat([batch["prompt"], batch[kind]], 1) for kind in ("preferred", "rejected")],
        )
        better, worse = self.log_probability(self.policy, both, prompt).chunk(2)
        with torch.no_grad():
            better0, worse0 = self.log_probability(self.reference, both, prompt).chunk(2)
        return self.hparams.beta * ((better - better0) - (worse - worse0))

    def training_step(self, batch, batch_idx):
        margins = self.margins(batch)
        loss = -F.logsigmoid(margins).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("reward_accuracy", (margins > 0).float().mean(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_reward_accuracy", (self.margins(batch) > 0).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.policy.parameters(), lr=self.hparams.lr)
