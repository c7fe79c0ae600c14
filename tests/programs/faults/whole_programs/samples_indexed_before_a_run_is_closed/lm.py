import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards quietly box a puzzled judge. "
ALPHABET = sorted(set(TEXT))
STOI = {c: i for i, c in enumerate(ALPHABET)}


def encode(text: str) -> torch.Tensor:
    return torch.tensor([STOI[c] for c in text])


class Lines(Dataset):
    def __init__(self, n: int, length: int = 48) -> None:
        self.n, self.length, self.text = n, length, encode(TEXT * 3)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        begin = (i * 31) % len(TEXT)
        return self.text[begin : begin + self.length + 1]


class CharLM(L.LightningModule):
    PROMPTS = ("the quick ", "seven wiz", "judge. the ", "lazy dog w")

    def __init__(self, dim=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(len(ALPHABET), dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, len(ALPHABET))

    def forward(self, x, state=None):
        h, state = self.rnn(self.embed(x), state)
        return self.head(h), state

    def step(self, batch):
        logits, _ = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train/nll", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/nll", self.step(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/nll", self.step(batch), sync_dist=True)

    @torch.no_grad()
    def complete(self, prompt, n=24):
        x, state, out = encode(prompt)[None].to(self.device), None, prompt
        for _ in range(n):
            logits, state = self(x, state)
            x = logits[:, -1:].argmax(-1)
            out += ALPHABET[int(x)]
        return out

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        for prompt in self.PROMPTS:
            self.logger.log_sample(self.global_step, prompt, self.complete(prompt))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}


def loader(n, batch_size=16, shuffle=False):
    return DataLoader(Lines(n), batch_size, shuffle=shuffle)
