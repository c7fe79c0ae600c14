import lightning as L
import torch
from data import Mels, collate
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from scoring import Scorer
from torch import nn
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeDDP


class Vocoder(nn.Module):
    """Predicts mel frames from the frames before them."""

    def __init__(self, n_mels=20, hidden=64):
        super().__init__()
        self.gru = nn.GRU(n_mels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, n_mels)

    def forward(self, mels):
        h, _ = self.gru(mels)
        return self.out(h)


class Lit(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = Vocoder()
        self.scorer = Scorer(processes=2)
        self.pairs = []

    def loss(self, mels, mask):
        pred = self.model(mels[:, :-1])
        err = (pred - mels[:, 1:]).abs().mean(-1)
        return (err * mask[:, 1:]).sum() / mask[:, 1:].sum(), pred

    def training_step(self, batch, batch_idx):
        mels, mask, _ = batch
        loss, _ = self.loss(mels, mask)
        self.log("train_l1", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        self.pairs.clear()

    def validation_step(self, batch, batch_idx):
        mels, mask, lengths = batch
        loss, pred = self.loss(mels, mask)
        self.log("val_l1", loss, sync_dist=True, batch_size=len(mels))
        for ref, hyp, n in zip(mels[:, 1:], pred, lengths.tolist()):
            self.pairs.append((ref[: n - 1].numpy(), hyp[: n - 1].numpy()))

    def on_validation_epoch_end(self):
        mcd = self.scorer(self.pairs)
        self.log("val_mcd", mcd, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)]


def main():
    L.seed_everything(11)
    train = DataLoader(Mels("train", 1500), batch_size=8, shuffle=True, collate_fn=collate, num_workers=1)
    val = DataLoader(Mels("dev", 120), batch_size=8, collate_fn=collate, num_workers=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=5,
        callbacks=[
            ModelCheckpoint(monitor="val_mcd", filename="{epoch}-{val_mcd:.2f}", save_last=True),
            EarlyStopping("val_mcd", patience=3),
        ],
        log_every_n_steps=10,
    )
    trainer.fit(Lit(), train, val)


if __name__ == "__main__":
    main()
