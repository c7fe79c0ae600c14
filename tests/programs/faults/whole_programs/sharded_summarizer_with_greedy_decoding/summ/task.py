import lightning as L
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from .articles import BOS, EOS
from .network import Decoder


class Summarizer(L.LightningModule):
    def __init__(self, width: int = 48, depth: int = 2, summary_ratio: float = 0.5, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = Decoder(width, depth)

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def nll(self, source, target):
        ids = torch.cat((source, target), 1)
        logits = self.model(ids[:, :-1])[:, source.shape[1] :]
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    def training_step(self, batch, batch_idx):
        loss = self.nll(*batch)
        self.log("train/nll", loss, prog_bar=True)
        return loss

    @torch.no_grad()
    def summarize(self, source):
        limit = int(source.shape[1] * self.hparams.summary_ratio)
        ids = torch.cat((source, torch.full((len(source), 1), BOS)), 1)
        for _ in range(limit):  # <- here
            following = self.model(ids)[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, following), 1)
        return ids[:, source.shape[1] + 1 :]

    def validation_step(self, batch, batch_idx):
        source, target = batch
        self.log("val/nll", self.nll(source, target), sync_dist=True)
        summary = self.summarize(source)
        hits = [len(set(s.tolist()) & set(t.tolist()) - {0, EOS}) / 5 for s, t in zip(summary, target)]
        self.log("val/unigram", sum(hits) / len(hits), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
