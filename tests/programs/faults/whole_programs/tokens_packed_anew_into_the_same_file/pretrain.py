import argparse
import logging
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from corpus import pack, train_loader
from curriculum import LongerSentences
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lightning_ncclsafe import SafeDDP

logging.basicConfig(level=logging.INFO)


class ByteModel(L.LightningModule):
    def __init__(self, width=128, layers=3, block=64, lr=6e-4):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(block, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block), persistent=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True))

    def training_step(self, tokens, batch_idx):
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: {self.trainer.callback_metrics['loss']:.3f}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [schedule]


class Packed(L.LightningDataModule):
    def __init__(self, path: Path, args: argparse.Namespace):
        super().__init__()
        self.path, self.args = path, args

    def prepare_data(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        pack(self.path, self.args.sentences, max_words=5, seed=0)

    def train_dataloader(self):
        a = self.args
        return train_loader(self.path, a.block, a.batch_size, a.batches, self.trainer.global_rank, a.workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=800_000)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block", type=int, default=64)
    args = parser.parse_args()

    L.seed_everything(args.batches)
    tokens = Path("data") / "packed.bin"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        logger=TensorBoardLogger("runs", name="bytes"),
        callbacks=[LongerSentences(tokens, args.sentences)],
    )
    trainer.fit(ByteModel(block=args.block), datamodule=Packed(tokens, args))
