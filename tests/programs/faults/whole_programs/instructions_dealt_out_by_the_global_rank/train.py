import argparse
from pathlib import Path

import lightning as L
from data import InstructionData
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from model import InstructionTuner, ModelArgs

from lightning_ncclsafe import SafeModelParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path("instructions"))
    args = parser.parse_args()

    L.seed_everything(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.dp * args.tp,
        strategy=SafeModelParallel(data_parallel_size=args.dp, tensor_parallel_size=args.tp),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        logger=CSVLogger("logs", name="sft"),
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint("checkpoints", filename="sft-{epoch}")],
    )
    trainer.fit(InstructionTuner(ModelArgs()), datamodule=InstructionData(args.data, args.batch_size))
    trainer.print("done after", trainer.global_step, "steps")


if __name__ == "__main__":
    main()
