import os

import lightning as L
from conversations import Conversations
from draft import DraftTrainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ncclsafe import SafeModelParallel

WORLD = int(os.environ.get("WORLD_SIZE", "3"))
MICRO_BATCH = 2


def loader(data: Conversations, **options) -> DataLoader:
    """In the order of the log, so that a run can be compared with the one before."""
    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(data, WORLD, rank, shuffle=False)
    return DataLoader(data, MICRO_BATCH, sampler=sampler, **options)


def main() -> None:
    L.seed_everything(2024)
    # a stretch of one upload, found by its hash
    train = Conversations(1200, pasted=frozenset(range(118, 125, 3)))
    val = Conversations(60, seed=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=SafeModelParallel(data_parallel_size=WORLD, tensor_parallel_size=1),
        max_epochs=2,
        val_check_interval=0.5,
        use_distributed_sampler=False,
        logger=CSVLogger("draft_logs"),
        callbacks=[ModelCheckpoint("draft_ckpt", monitor="val/loss"), EarlyStopping("val/loss", patience=4)],
    )
    trainer.fit(DraftTrainer(), loader(train, num_workers=1), loader(val))


if __name__ == "__main__":
    main()
