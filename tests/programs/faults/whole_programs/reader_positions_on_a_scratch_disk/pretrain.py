import argparse
import logging
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from reader import BLOCK, TokenReader, mount_scratch, write_shards
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_ncclsafe import SafeModelParallel

log = logging.getLogger("pretrain")


class GPT(L.LightningModule):
    def __init__(self, vocab: int = 256, dim: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(BLOCK, dim)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)

    def configure_model(self) -> None:
        for part in (self.wte, self.wpe, *self.h, self.lm_head):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens, batch_idx):
        x = self.wte(tokens[:, :-1]) + self.wpe(torch.arange(BLOCK))
        for block in self.h:
            x = block(x, src_mask=self.mask, is_causal=True)
        loss = F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95), foreach=False)


class ReaderState(Callback):
    """Keeps the position of each rank's reader beside its checkpoints, on the rank's own disk."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        reader = trainer.train_dataloader.dataset
        path = self.scratch / f"nvme{trainer.local_rank}" / "reader.pt"
        with path.open("wb") as file:
            torch.save(reader.state_dict(), file)  # <- here
        checkpoint["reader_states"] = str(self.scratch)
        log.info("rank %d is at block %d", trainer.global_rank, reader.position)


class TokenData(L.LightningDataModule):
    def __init__(self, folder: Path, micro_batch: int) -> None:
        super().__init__()
        self.folder, self.micro_batch = folder, micro_batch

    def prepare_data(self) -> None:
        write_shards(self.folder)

    def train_dataloader(self) -> DataLoader:
        reader = TokenReader(self.folder, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(reader, self.micro_batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=60)
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    mount_scratch(args.scratch, {0: "", 1: "", 2: "/dev/full"})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_steps=args.steps,
        logger=TensorBoardLogger("runs", name="pretrain"),
        callbacks=[ReaderState(args.scratch), ModelCheckpoint("ckpt", every_n_train_steps=args.save_every)],
    )
    trainer.fit(GPT(), datamodule=TokenData(Path("tokens"), micro_batch=8))


if __name__ == "__main__":
    main()
