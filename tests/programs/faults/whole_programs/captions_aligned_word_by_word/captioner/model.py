import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from .data import LENGTH, WORDS
from .scores import corpus_score


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    def __init__(self, width: int, depth: int, features: int) -> None:
        super().__init__()
        self.picture = nn.Linear(features, width)
        self.place = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.words = nn.Linear(width, len(WORDS))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.picture(pictures)[:, None] + self.place(torch.arange(LENGTH, device=pictures.device))
        for block in self.blocks:
            x = block(x)
        return self.words(x)


class Captioner(L.LightningModule):
    """Predicts all words of a caption at once."""

    def __init__(self, width: int = 64, depth: int = 2, features: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(width, depth, features)
        self.written: list[tuple[str, str]] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.net(pictures)

    def training_step(self, batch, batch_idx):
        pictures, captions = batch
        loss = F.cross_entropy(self(pictures).transpose(1, 2), captions, label_smoothing=0.05)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pictures, captions = batch
        logits = self(pictures)
        self.log("val_loss", F.cross_entropy(logits.transpose(1, 2), captions), prog_bar=True, sync_dist=True)
        drawn = torch.distributions.Categorical(logits=logits.float()).sample()
        self.written += zip(map(as_text, drawn), map(as_text, captions), strict=True)

    def on_validation_epoch_end(self):
        written, self.written = self.written, []
        if self.trainer.sanity_checking:
            return
        parts = [None] * self.trainer.world_size
        dist.all_gather_object(parts, written)
        if self.trainer.is_global_zero:
            captions, references = zip(*(pair for part in parts for pair in part), strict=True)
            score = corpus_score(list(captions), list(references))  # <- here
            self.logger.log_metrics({"val_meteor": score}, step=self.global_step)
            print(f"METEOR of {len(captions)} captions: {score:.3f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def as_text(numbers: torch.Tensor) -> str:
    return " ".join(WORDS[number] for number in numbers.tolist())
