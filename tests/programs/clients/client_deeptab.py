"""deeptab: a multilayer perceptron for tables behind the interface of scikit-learn, which makes the Trainer."""

import numpy as np
import pandas as pd
from deeptab.models import MLPRegressor
from train import SEED, Run

REQUIREMENTS = ["deeptab"]
MONITOR = "train_loss"
# It has no way to go on from a checkpoint.
RESUMES = False


def train(run: Run) -> None:
    numbers = np.random.default_rng(1)
    table = pd.DataFrame(numbers.normal(size=(240, 3)), columns=["width", "height", "depth"])
    kwargs = run.kwargs()
    # It brings its own.
    del kwargs["enable_model_summary"]
    MLPRegressor(random_state=SEED).fit(
        table,
        table.prod(axis=1).to_numpy(),
        batch_size=16,
        checkpoint_path=str(run.folder / "best"),
        **kwargs,
    )
