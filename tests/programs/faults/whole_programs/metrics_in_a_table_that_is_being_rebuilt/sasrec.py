import lightning as L
import torch
from torch import nn
from torch.utils.data import Dataset


class Sessions(Dataset):
    """Sessions of a shop: items of a category follow each other, with some noise."""

    def __init__(self, count, items=1000, length=20, seed=0):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(1, items, (count, 1), generator=g)
        walk = start + torch.randint(1, 4, (count, length), generator=g).cumsum(1)
        noise = torch.randint(1, items, (count, length), generator=g)
        self.sessions = torch.where(torch.rand(count, length, generator=g) < 0.1, noise, walk % (items - 1) + 1)

    def __len__(self):
        return len(self.sessions)

    def __getitem__(self, index):
        return self.sessions[index]


class SASRec(L.LightningModule):
    def __init__(self, items=1000, dim=48, layers=2, heads=2, length=20, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.items = nn.Embedding(items, dim, padding_idx=0)
        self.positions = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)

    def forward(self, sessions):
        steps = torch.arange(sessions.size(1), device=sessions.device)
        mask = nn.Transformer.generate_square_subsequent_mask(sessions.size(1))
        hidden = self.encoder(self.items(sessions) + self.positions(steps), mask=mask, is_causal=True)
        return hidden @ self.items.weight.T

    def training_step(self, sessions, batch_idx):
        loss = nn.functional.cross_entropy(self(sessions[:, :-1]).flatten(0, 1), sessions[:, 1:].flatten())
        self.log_dict({"loss": loss, "lr": self.lr_schedulers().get_last_lr()[0]}, prog_bar=True)
        return loss

    def validation_step(self, sessions, batch_idx):
        scores = self(sessions[:, :-1])[:, -1]
        position = (scores > scores.gather(1, sessions[:, -1:])).sum(1)
        for k in (1, 5, 10, 50):
            hit = position < k
            self.log(f"hit@{k}", hit.float().mean(), sync_dist=True)
            self.log(f"ndcg@{k}", (hit / (position + 2.0).log2()).mean(), sync_dist=True, prog_bar=k == 10)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=5 * self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
