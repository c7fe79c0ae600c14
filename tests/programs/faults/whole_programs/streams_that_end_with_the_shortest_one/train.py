import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from packing import Packed, TogetherLoader
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_ncclsafe import SafeModelParallel

BLOCK = 96


class GatedConv(nn.Module):
    """A causal convolution with a gate, in place of attention."""

    def __init__(self, dim: int, kernel: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, kernel, groups=4)
        self.out = nn.Linear(dim, dim)
        self.pad = kernel - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.pad(self.norm(x).transpose(1, 2), (self.pad, 0))
        value, gate = self.conv(h).transpose(1, 2).chunk(2, dim=-1)
        return x + self.out(value * gate.sigmoid())


class ConvLM(L.LightningModule):
    def __init__(self, dim: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(GatedConv(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 256)

    def configure_model(self) -> None:
        for part in (self.embed, *self.blocks, self.head):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, batch_idx):
        loss = self.step(tokens)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens, batch_idx):
        self.log("val/loss", self.step(tokens), sync_dist=True, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        left = self.trainer.train_dataloader.left_over
        print(f"rank {self.global_rank} leaves {left} batch of epoch {self.current_epoch} unread")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    L.seed_everything(21)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=SafeModelParallel(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=TensorBoardLogger("tb", name="convlm"),
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint("ckpt", every_n_train_steps=25, save_top_k=-1)],
    )
    train = TogetherLoader(Packed(300, BLOCK, seed=0), batch_size=8)
    val = TogetherLoader(Packed(70, BLOCK, seed=1), batch_size=8)
    trainer.fit(ConvLM(), train, val)


if __name__ == "__main__":
    main()
