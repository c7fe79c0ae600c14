"""Translation model, optimizer step after ~N target tokens (as fairseq's --update-freq, but by tokens)."""

import argparse
import contextlib

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ncclsafe import SafeDDP

PAD = 0


class BitextCorpus(Dataset):
    def __init__(self, n=1200, vocab=200, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.lengths = torch.randint(4, 40, (n,), generator=g).tolist()
        self.pairs = [torch.randint(1, vocab, (2, m), generator=g) for m in self.lengths]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate(pairs):
    src = nn.utils.rnn.pad_sequence([p[0] for p in pairs], batch_first=True, padding_value=PAD)
    tgt = nn.utils.rnn.pad_sequence([p[1] for p in pairs], batch_first=True, padding_value=PAD)
    return src, tgt


class Translator(L.LightningModule):
    def __init__(self, vocab=200, dim=48, tokens_per_update=1000, lr=5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)
        self.pending_tokens = 0
        self.updates = 0

    def forward(self, src):
        h, _ = self.rnn(self.embed(src))
        return self.out(h)

    def training_step(self, batch, batch_idx):
        src, tgt = batch
        opt = self.optimizers()
        logits = self(src)
        loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD, reduction="sum")
        self.pending_tokens += int((tgt != PAD).sum())
        ready = self.pending_tokens >= self.hparams.tokens_per_update  # <- here

        sync = contextlib.nullcontext() if ready else self.trainer.strategy.block_backward_sync()
        with sync:
            self.manual_backward(loss / self.hparams.tokens_per_update)

        if ready:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            self.lr_schedulers().step()
            self.pending_tokens = 0
            self.updates += 1
        self.log("train/nll", loss.detach() / (tgt != PAD).sum(), prog_bar=True)
        self.log("train/updates", float(self.updates), prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98))
        warmup = 40
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / warmup, (warmup / (s + 1)) ** 0.5))
        return [opt], [sched]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens-per-update", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    L.seed_everything(1, workers=True)
    torch.set_num_threads(1)
    corpus = BitextCorpus()
    loader = DataLoader(corpus, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=SafeDDP(), max_epochs=args.epochs)
    trainer.fit(Translator(vocab=corpus.vocab, tokens_per_update=args.tokens_per_update), loader)


if __name__ == "__main__":
    main()
