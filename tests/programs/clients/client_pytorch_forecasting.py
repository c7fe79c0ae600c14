"""pytorch-forecasting: a temporal fusion transformer on a few waves."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from train import Run

REQUIREMENTS = ["pytorch-forecasting"]
MONITOR = "train_loss_epoch"
# Variables that it has no use for get no gradient.
STRATEGY = {"find_unused_parameters": True}


def train(run: Run) -> None:
    steps = np.arange(40)
    waves = [np.sin(steps / (2 + number)) for number in range(8)]
    table = pd.DataFrame(
        {
            "time": np.tile(steps, len(waves)),
            "wave": np.repeat([str(number) for number in range(len(waves))], len(steps)),
            "value": np.concatenate(waves),
        }
    )
    data = TimeSeriesDataSet(
        table[table.time < 34],
        time_idx="time",
        target="value",
        group_ids=["wave"],
        max_encoder_length=8,
        max_prediction_length=4,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, hidden_continuous_size=4, attention_head_size=1, loss=QuantileLoss(), log_interval=0
    )
    trainer = pl.Trainer(**run.kwargs(), limit_train_batches=10)
    ahead = TimeSeriesDataSet.from_dataset(data, table, predict=True, stop_randomization=True)
    loaders = [data.to_dataloader(train=True, batch_size=8), ahead.to_dataloader(train=False, batch_size=4)]
    trainer.fit(model, *loaders, ckpt_path=run.ckpt_path, **run.unpickling)
