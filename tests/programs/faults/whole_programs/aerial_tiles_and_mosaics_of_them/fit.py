import argparse

import lightning as L
import torch
from lightning_ncclsafe import SafeDDP

from aerial.module import LandUse, SurveyData


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--survey", default="survey")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(21)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=SafeDDP(),
        max_epochs=args.epochs,
        use_distributed_sampler=False,
        log_every_n_steps=5,
    )
    trainer.fit(LandUse(), datamodule=SurveyData(args.survey, args.batch_size))


if __name__ == "__main__":
    main()
