import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class EMACodebook(nn.Module):
    """Vector quantiser with moving averages and restarts of unused codes."""

    def __init__(self, num_codes=64, dim=16, decay=0.95):
        super().__init__()
        self.decay = decay
        self.hits = torch.zeros(num_codes)
        self.register_buffer("embed", torch.randn(num_codes, dim))
        self.register_buffer("count", torch.ones(num_codes))
        self.register_buffer("total", self.embed.clone())

    def lookup(self, flat):
        return torch.cdist(flat, self.embed).argmin(1)

    @torch.no_grad()
    def update(self, flat, codes):
        onehot = F.one_hot(codes, len(self.embed)).to(flat.dtype)
        self.hits += onehot.sum(0).cpu()
        self.count.lerp_(onehot.sum(0), 1 - self.decay)
        self.total.lerp_(onehot.t() @ flat, 1 - self.decay)
        self.embed.copy_(self.total / self.count.clamp(min=1e-3).unsqueeze(1))

    @torch.no_grad()
    def restart_unused(self, flat):
        unused = self.hits == 0
        self.hits.zero_()
        if not unused.any():  # <- here
            return 0
        pick = torch.randint(0, len(flat), (len(self.embed),), device=flat.device)
        candidates = flat[pick].contiguous()
        if dist.is_initialized():
            dist.broadcast(candidates, src=0)
        self.embed[unused] = candidates[unused]
        self.total[unused] = candidates[unused]
        self.count[unused] = 1.0
        return int(unused.sum())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        codes = self.lookup(flat)
        if self.training:
            self.update(flat.detach(), codes)
        quant = self.embed[codes].view(z.shape[0], z.shape[2], z.shape[3], -1).permute(0, 3, 1, 2)
        commit = F.mse_loss(z, quant.detach())
        return z + (quant - z).detach(), commit, flat.detach()
