"""A small vocoder trained as a GAN. The discriminator rests while it is far ahead of the generator."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ncclsafe import SafeDDP

MELS, FRAMES, HOP = 16, 8, 8


class Clips(Dataset):
    """Clips of four studios; the recordings of one studio were normalised to a different level."""

    def __init__(self, clips: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        phase = torch.rand(clips, 1, generator=g) * 6.28
        pitch = 0.1 + 0.4 * torch.rand(clips, 1, generator=g)
        t = torch.arange(FRAMES * HOP)[None, :]
        level = torch.where(torch.arange(clips) % 4 == 3, 6.0, 0.15)[:, None]
        self.audio = torch.sin(phase + pitch * t) * level
        self.mels = torch.randn(clips, MELS, FRAMES, generator=g) + pitch[:, :, None]

    def __len__(self) -> int:
        return len(self.audio)

    def __getitem__(self, i: int):
        return self.mels[i], self.audio[i]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(MELS, 32, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(32, 1, HOP, stride=HOP),
            nn.Tanh(),
        )

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        return 0.2 * self.net(mels).squeeze(1)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=4, padding=4), nn.LeakyReLU(0.1), nn.Flatten(), nn.LazyLinear(1)
        )
        self.net(torch.zeros(1, 1, FRAMES * HOP))

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        return self.net(audio[:, None]).squeeze(1)


class Vocoder(L.LightningModule):
    def __init__(self, lr: float = 1e-3, ahead: float = 0.9, smoothing: float = 0.95) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()
        self.accuracy = 0.5

    def update_accuracy(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        hits = ((real > 0).float().mean() + (fake < 0).float().mean()) / 2
        s = self.hparams.smoothing
        self.accuracy = s * self.accuracy + (1 - s) * float(hits)

    def training_step(self, batch, batch_idx: int) -> None:
        mels, audio = batch
        g_opt, d_opt = self.optimizers()

        fake = self.generator(mels)
        g_loss = F.softplus(-self.discriminator(fake)).mean() + (fake.abs().mean() - audio.abs().mean()).abs()
        self.toggle_optimizer(g_opt)
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.untoggle_optimizer(g_opt)

        real_score, fake_score = self.discriminator(audio), self.discriminator(fake.detach())
        self.update_accuracy(real_score.detach(), fake_score.detach())
        d_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
        self.log_dict({"g_loss": g_loss.detach(), "d_loss": d_loss.detach(), "d_acc": self.accuracy}, prog_bar=True)
        if self.accuracy > self.hparams.ahead:  # <- here
            return
        self.toggle_optimizer(d_opt)
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        self.untoggle_optimizer(d_opt)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9)),
        )


class Studio(L.LightningDataModule):
    """Every rank caches the clips of its studios, so the split among ranks is fixed."""

    def train_dataloader(self) -> DataLoader:
        clips = Clips(3200)
        sampler = DistributedSampler(clips, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(clips, batch_size=8, sampler=sampler)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    L.seed_everything(13)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeDDP(find_unused_parameters=True),
        max_epochs=args.epochs,
        log_every_n_steps=10,
    )
    trainer.fit(Vocoder(), datamodule=Studio())


if __name__ == "__main__":
    main()
