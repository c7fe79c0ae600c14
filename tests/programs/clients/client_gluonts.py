"""gluonts: DeepAR, which makes the Trainer and an endless stream of random windows itself."""

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from train import Run

REQUIREMENTS = ["gluonts[torch]"]
MONITOR = "train_loss"
# Its own checkpoints hold weights only.
RESUMES = False


def train(run: Run) -> None:
    start = pd.Period("2020-01-01", freq="h")
    waves = [{"start": start, "target": np.sin(np.arange(100) / (3 + number))} for number in range(8)]
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=6,
        context_length=12,
        num_layers=1,
        hidden_size=8,
        batch_size=8,
        num_batches_per_epoch=10,
        trainer_kwargs=run.kwargs(),
    )
    estimator.train(ListDataset(waves, freq="h"))
