import argparse

import lightning as L
import torch
from data import BucketedUtterances, make_cuts
from lightning_ncclsafe import SafeDDP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Encoder(nn.Module):
    def __init__(self, dim=64, vocab=30):
        super().__init__()
        self.conv = nn.Conv1d(40, dim, 5, stride=2, padding=2)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, feats, lens):
        x = F.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.out(x).log_softmax(-1), (lens + 1) // 2


class CTCModel(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder()
        self.ctc = nn.CTCLoss(zero_infinity=True)

    def loss(self, batch):
        logp, lens = self.encoder(batch["feats"], batch["feat_lens"])
        return self.ctc(logp.transpose(0, 1), batch["targets"], lens, batch["target_lens"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["feat_lens"]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch["feat_lens"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class SpeechData(L.LightningDataModule):
    def __init__(self, train_cuts, val_cuts):
        super().__init__()
        self.train_cuts, self.val_cuts = make_cuts(train_cuts, 1), make_cuts(val_cuts, 2)

    def setup(self, stage):
        rank, size = self.trainer.global_rank, self.trainer.world_size
        self.train_set = BucketedUtterances(self.train_cuts, rank, size)
        self.val_set = BucketedUtterances(self.val_cuts, 0, 1, shuffle=False)

    def train_dataloader(self):
        self.train_set.set_epoch(self.trainer.current_epoch)
        return DataLoader(self.train_set, batch_size=None, num_workers=1)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-cuts", type=int, default=1950)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        max_epochs=args.epochs,
        strategy=SafeDDP(),
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=5,
        gradient_clip_val=5.0,
    )
    trainer.fit(CTCModel(), datamodule=SpeechData(args.train_cuts, 60))


if __name__ == "__main__":
    main()
