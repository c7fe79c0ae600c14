import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
        self.ada = nn.Linear(dim, 6 * dim)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1[:, None] * self.attn(h, h, h, need_weights=False)[0]
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class LatentDiT(L.LightningModule):
    """Rectified flow on latents of 4x8x8, conditioned on a class."""

    def __init__(self, dim=128, depth=4, heads=4, classes=10):
        super().__init__()
        self.save_hyperparameters()
        self.patch = nn.Linear(4 * 2 * 2, dim)
        self.position = nn.Embedding(16, dim)
        self.label = nn.Embedding(classes + 1, dim)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))
        self.final = nn.Linear(dim, 4 * 2 * 2)

    def configure_model(self):
        for part in (self.patch, self.position, self.label, self.time, *self.blocks, self.final):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, patches, t, y):
        c = self.time(t[:, None]) + self.label(y)
        x = self.patch(patches) + self.position(torch.arange(16, device=t.device))
        for block in self.blocks:
            x = block(x, c)
        return self.final(x)

    def flow_loss(self, latents, y):
        patches = F.unfold(latents, 2, stride=2).transpose(1, 2)
        noise, t = torch.randn_like(patches), torch.rand(len(patches), device=self.device)
        mixed = torch.lerp(patches, noise, t[:, None, None])
        return F.mse_loss(self(mixed, t, y), noise - patches)

    def training_step(self, batch, batch_idx):
        latents, y = batch
        y = torch.where(torch.rand(len(y), device=y.device) < 0.1, self.hparams.classes, y)
        loss = self.flow_loss(latents, y)
        self.log("flow", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_flow", self.flow_loss(*batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.0, foreach=False)
