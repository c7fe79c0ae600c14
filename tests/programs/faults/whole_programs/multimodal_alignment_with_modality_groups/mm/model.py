import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mm.groups import ModalityGroups


class SharedEncoder(L.LightningModule):
    """One trunk for all modalities; running means of the embeddings are kept per modality."""

    def __init__(self, assignment, modalities=("audio", "depth", "image", "text", "video"), dim=32, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.trunk = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, width))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        for m in modalities:
            self.register_buffer(f"center_{m}", torch.zeros(width))
        self.modality_groups = ModalityGroups(assignment)

    def on_fit_start(self):
        self.modality_groups.build()

    def embed(self, modality, x):
        z = F.normalize(self.trunk(x), dim=-1)
        center = self.modality_groups.mean(modality, z.detach().mean(0))
        getattr(self, f"center_{modality}").lerp_(center, 0.05)
        return z - getattr(self, f"center_{modality}")

    def training_step(self, batch, batch_idx):
        views = [self.embed(m, x) for m, x in batch.items()]
        target = torch.arange(len(views[0]))
        losses = [F.cross_entropy(a @ b.T * self.temperature.exp(), target) for a in views for b in views if a is not b]
        loss = torch.stack(losses).mean()
        self.log("contrastive", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
