import lightning as L
import torch
import torch.distributed as dist
from gather import gather_rows
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from passages import VOCABULARY, Pairs, loader
from torch import nn
from tqdm import tqdm

from lightning_ncclsafe import SafeDDP


class HardNegatives(Callback):
    """The main process scores all passages against each other; the others are told what it found."""

    def __init__(self, data: Pairs, rounds: int = 40) -> None:
        self.data = data
        self.rounds = rounds

    @torch.no_grad()
    def mine(self, encoder: nn.Module) -> torch.Tensor:
        encoder.eval()
        found = []
        for chunk in tqdm(self.data.passages.split(30), desc="mining", leave=False):
            mean = sum(encoder(self.data.passages) for _ in range(self.rounds // 20)) / (self.rounds // 20)
            scores = encoder(chunk) @ mean.T
            scores[scores > 0.999] = -1
            found.append(scores.argmax(1))
        encoder.train()
        return torch.cat(found)

    def on_train_epoch_end(self, trainer, pl_module):
        negatives = torch.zeros(len(self.data), dtype=torch.long)
        if trainer.is_global_zero:
            negatives = self.mine(pl_module.encoder)
        dist.broadcast(negatives, src=0)
        self.data.negatives = negatives


class Encoder(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, width, mode="mean")
        self.project = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens):
        return nn.functional.normalize(self.project(self.words(tokens)), dim=-1)


class Retriever(L.LightningModule):
    def __init__(self, temperature=0.05, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder()

    def scores(self, batch):
        queries, owner, passages, hard = batch
        sizes = [len(queries), len(passages), len(hard)]
        q, p, n = self.encoder(torch.cat([self.pad(queries), passages, hard])).split(sizes)
        every_passage, first = gather_rows(p)
        every_negative, _ = gather_rows(n)
        every_query, mine = gather_rows(q)
        logits = q @ torch.cat([every_passage, every_negative]).T / self.hparams.temperature
        # the passage, too, shall know its query among those of all ranks
        backwards = p @ every_query.T / self.hparams.temperature
        targets = torch.full((len(p),), -100)
        targets[owner] = mine + torch.arange(len(owner))
        return logits, owner + first, backwards, targets

    @staticmethod
    def pad(queries, length=30):
        repeats = length // queries.size(1)
        return queries.repeat(1, repeats)

    def training_step(self, batch, batch_idx):
        logits, targets, backwards, back_targets = self.scores(batch)
        loss = nn.functional.cross_entropy(logits, targets)
        loss = loss + 0.5 * nn.functional.cross_entropy(backwards, back_targets, ignore_index=-100)
        self.log("loss", loss, prog_bar=True, batch_size=len(targets))
        self.log("queries", float(len(targets)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, targets, *_ = self.scores(batch)
        accuracy = (logits.argmax(1) == targets).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True, batch_size=len(targets), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    L.seed_everything(0)
    train, val = Pairs(), Pairs(300, seed=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=3,
        callbacks=[HardNegatives(train), ModelCheckpoint(monitor="val_accuracy", mode="max"), RichProgressBar()],
        log_every_n_steps=10,
    )
    trainer.fit(Retriever(), loader(train, shuffle=True), loader(val))


if __name__ == "__main__":
    main()
