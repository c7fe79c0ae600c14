"""Supervised fine-tuning on dialogues, with some answers to read after every epoch."""

import argparse
import json
from pathlib import Path

import lightning as L
from data import DialogueData
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from model import ChatModel
from tokenizer import START, decode, encode

from lightning_ncclsafe import SafeModelParallel


class AnswersToRead(Callback):
    """Answers some questions of the validation set of this rank, and keeps the share of exact matches."""

    def __init__(self, questions: int = 4) -> None:
        self.questions = questions

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: ChatModel) -> None:
        if trainer.sanity_checking:
            return
        rows = trainer.datamodule.val.rows[trainer.global_rank :: trainer.world_size][: self.questions]
        answers = [decode(pl_module.generate([START, *encode(question)])) for question, _ in rows]
        exact = sum(answer == wanted for answer, (_, wanted) in zip(answers, rows)) / len(rows)
        pl_module.log("val_exact_match", exact, sync_dist=True)
        path = Path("answers") / f"epoch{trainer.current_epoch}-rank{trainer.global_rank}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([{"question": q, "answer": a} for (q, _), a in zip(rows, answers)], indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    L.seed_everything(7, workers=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=SafeModelParallel(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_epochs=args.epochs,
        logger=CSVLogger("logs", name="chat"),
        log_every_n_steps=10,
        callbacks=[
            AnswersToRead(),
            LearningRateMonitor("step"),
            ModelCheckpoint("checkpoints", monitor="val_loss", filename="chat-{epoch}"),
        ],
    )
    trainer.fit(ChatModel(), datamodule=DialogueData(args.batch_size))


if __name__ == "__main__":
    main()
