from pathlib import Path

import lightning as L
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from glyphgan.fonts import glyph_loader, rasterise
from glyphgan.nets import Critic, Generator


class GlyphGAN(L.LightningModule):
    def __init__(
        self, root: str, latent: int = 16, batch_size: int = 16, critic_ceiling: float = 0.9, lr: float = 2e-3
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.critic = Generator(latent), Critic()

    def prepare_data(self):
        rasterise(Path(self.hparams.root))

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.generator, mesh=mesh)
        fully_shard(self.critic, mesh=mesh)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_c = self.optimizers()
        fake = self.generator(torch.randn(len(real), self.hparams.latent))

        score_real, score_fake = self.critic(real), self.critic(fake.detach())
        accuracy = ((score_real > 0).float().mean() + (score_fake < 0).float().mean()) / 2
        critic_loss = bce(score_real, torch.ones_like(score_real)) + bce(score_fake, torch.zeros_like(score_fake))
        if accuracy < self.hparams.critic_ceiling:  # <- here
            opt_c.zero_grad()
            self.manual_backward(critic_loss)
            opt_c.step()

        score = self.critic(fake)
        generator_loss = bce(score, torch.ones_like(score))
        opt_g.zero_grad()
        self.manual_backward(generator_loss)
        opt_g.step()
        self.log_dict({"g": generator_loss, "c": critic_loss, "acc": accuracy}, prog_bar=True)

    def train_dataloader(self):
        return glyph_loader(Path(self.hparams.root), self.global_rank, self.hparams.batch_size)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), self.hparams.lr, betas=(0.5, 0.99))
        c = torch.optim.Adam(self.critic.parameters(), self.hparams.lr, betas=(0.5, 0.99))
        return g, c
