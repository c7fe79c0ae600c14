"""pytorch-tabular: a model of categories and numbers, whose Trainer it makes from a config."""

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from train import OF_LIGHTNING, SEED, Run

REQUIREMENTS = ["pytorch-tabular"]
LIGHTNING = "pytorch_lightning"
MONITOR = "train_loss"
# It has no way to go on from a checkpoint.
RESUMES = False


def train(run: Run) -> None:
    numbers = np.random.default_rng(1)
    table = pd.DataFrame(
        {
            "width": numbers.normal(size=400),
            "height": numbers.normal(size=400),
            "colour": numbers.choice(["red", "green", "blue"], 400),
        }
    )
    table["size"] = table["width"] * table["height"]
    kwargs = run.kwargs()
    of_config = {name: kwargs.pop(name) for name in ("accelerator", "devices", "max_epochs")}
    accumulated = kwargs.pop("accumulate_grad_batches", 1)
    callbacks = kwargs.pop("callbacks")
    root_dir = kwargs.pop("default_root_dir")
    # Its config takes the names of strategies only.
    strategy = "ddp" if run.strategy in OF_LIGHTNING else "ddp_ncclsafe"
    model = TabularModel(
        data_config=DataConfig(target=["size"], continuous_cols=["width", "height"], categorical_cols=["colour"]),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="16-8"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            **of_config,
            batch_size=16,
            accumulate_grad_batches=accumulated,
            fast_dev_run=bool(kwargs.pop("fast_dev_run", False)),
            early_stopping=None,
            checkpoints="valid_loss",
            checkpoints_path=root_dir,
            load_best=False,
            progress_bar="none",
            seed=SEED,
            trainer_kwargs={"strategy": strategy, "enable_model_summary": False},
        ),
        verbose=False,
        suppress_lightning_logger=True,
    )
    model.fit(train=table[:320], validation=table[320:], callbacks=callbacks, seed=SEED)
