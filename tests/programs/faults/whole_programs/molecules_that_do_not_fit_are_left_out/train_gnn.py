import argparse
import warnings

import lightning as L
import torch
from graphs import GraphData
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from model import DistanceGNN
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_ncclsafe import SafeDDP


class PropertyRegression(L.LightningModule):
    """Predicts a property of a molecule; keeps an average of the weights."""

    def __init__(self, hidden=32, layers=3, lr=5e-4, clip=1.0, decay=0.99):
        super().__init__()
        self.save_hyperparameters()
        # we clip by hand and step the average right after the optimizer
        self.automatic_optimization = False
        self.net = DistanceGNN(hidden, layers)
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.average_fn = get_ema_avg_fn(decay)

    def update_average(self):
        with torch.no_grad():
            for a, p in zip(self.average, self.net.parameters()):
                a.copy_(self.average_fn(a, p, None))

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        try:
            pred = self.net(batch.x, batch.pos, batch.edges)
            loss = F.smooth_l1_loss(pred, batch.y)
        except RuntimeError as e:
            if "memory" not in str(e):
                raise
            warnings.warn(f"skipping a graph with {len(batch.x)} atoms", stacklevel=2)
            opt.zero_grad(set_to_none=True)
            return  # <- here
        opt.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt, self.hparams.clip, "norm")
        opt.step()
        self.update_average()
        self.log("train/loss", loss, prog_bar=True, batch_size=1)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def validation_step(self, batch, batch_idx):
        pred = self.net(batch.x, batch.pos, batch.edges)
        self.log("val/mae", (pred - batch.y).abs().mean(), batch_size=1, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]


def parse():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--molecules", type=int, default=500)
    return parser.parse_args()


def main():
    args = parse()
    L.seed_everything(17)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.max_epochs,
        logger=TensorBoardLogger("lightning_logs", default_hp_metric=False),
        callbacks=[ModelCheckpoint(monitor="val/mae", save_top_k=1), TQDMProgressBar(refresh_rate=5)],
        log_every_n_steps=10,
    )
    trainer.fit(PropertyRegression(args.hidden), datamodule=GraphData(args.molecules))


if __name__ == "__main__":
    main()
