import copy

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from asr.batching import MELS


class Teacher(nn.Module):
    def __init__(self, student, decay):
        super().__init__()
        self.net, self.decay = copy.deepcopy(student).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, student):
        for slow, fast in zip(self.net.parameters(), student.parameters()):
            slow.lerp_(fast, 1 - self.decay)


class MaskedPredictor(L.LightningModule):
    def __init__(self, dim=48, mask=0.3, decay=0.99, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.student = nn.Sequential(
            nn.Linear(MELS, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)
        )
        self.teacher = Teacher(self.student, decay)

    def training_step(self, batch, batch_idx):
        opt, sched = self.optimizers(), self.lr_schedulers()
        with torch.no_grad():
            target = F.layer_norm(self.teacher.net(batch), (self.hparams.dim,))
        masked = batch * (torch.rand(batch.shape[:2]) > self.hparams.mask).unsqueeze(-1)
        loss = F.smooth_l1_loss(self.student(masked), target)
        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, gradient_clip_val=1.0)
        opt.step()
        sched.step()
        self.teacher.update(self.student)
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.student.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=50)]
