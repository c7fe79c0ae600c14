"""neuralforecast: NHITS on a few waves, whose Trainer it makes."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from train import SEED, Run

REQUIREMENTS = ["neuralforecast"]
LIGHTNING = "pytorch_lightning"
MONITOR = "train_loss"
# It has no way to go on from a checkpoint.
RESUMES = False


def train(run: Run) -> None:
    kwargs = run.kwargs()
    steps = kwargs.pop("max_epochs") * 10
    times = pd.date_range("2020-01-01", periods=60, freq="h")
    table = pd.concat(
        pd.DataFrame({"unique_id": str(number), "ds": times, "y": np.sin(np.arange(60) / (2 + number))})
        for number in range(16)
    )
    model = NHITS(
        h=6,
        input_size=12,
        max_steps=steps,
        batch_size=4,
        random_seed=SEED,
        mlp_units=3 * [[16, 16]],
        val_check_steps=10,
        **kwargs,
    )
    NeuralForecast([model], freq="h").fit(table, val_size=6)
