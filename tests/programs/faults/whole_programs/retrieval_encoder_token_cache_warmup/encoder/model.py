import lightning as L
import torch
from torch import nn

from encoder.cache import TokenCache
from encoder.parts import part_loader, part_of, tokenise


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.EmbeddingBag(500, width)
        self.proj = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, tokens):
        return nn.functional.normalize(self.proj(self.embed(tokens)))


class ContrastiveEncoder(L.LightningModule):
    def __init__(self, width: int = 64, temperature: float = 0.05, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(width)
        self.cache = TokenCache()

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        both = self.encoder(torch.cat([tokens, tokens]))
        a, b = both.chunk(2)
        scores = a @ b.T / self.hparams.temperature
        loss = nn.functional.cross_entropy(scores, torch.arange(len(a)))
        self.log("infonce", loss, prog_bar=True)
        return loss

    def train_dataloader(self):
        part = part_of(self.current_epoch, self.global_rank, self.trainer.world_size)
        return part_loader(self.cache.get(part, tokenise), batch_size=8)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)
