import lightning as L
import torch
import torch.nn.functional as F
from passages import DIM
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self, dim: int = DIM, out: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim))
        self.project = nn.Linear(dim, out)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.project(self.body(tokens).mean(dim=1)), dim=-1)


class BiEncoder(L.LightningModule):
    def __init__(self, temperature: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.questions, self.passages = Encoder(), Encoder()

    def scores(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        question, passage = batch
        return self.questions(question) @ self.passages(passage).T / self.hparams.temperature

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scores = self.scores(batch)
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        self.log("contrastive", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self.scores(batch)
        hit = (scores.argmax(1) == torch.arange(len(scores))).float().mean()
        self.log("recall_at_1", hit, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-4)
