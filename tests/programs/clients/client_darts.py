"""darts: N-BEATS on a wave, whose Trainer darts makes."""

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel
from train import SEED, Run

REQUIREMENTS = ["u8darts[torch]"]
LIGHTNING = "pytorch_lightning"
MONITOR = "train_loss"


def train(run: Run) -> None:
    kwargs = run.kwargs()
    model = NBEATSModel(
        input_chunk_length=12,
        output_chunk_length=4,
        num_stacks=2,
        num_blocks=1,
        num_layers=2,
        layer_widths=16,
        batch_size=8,
        dropout=0.1,
        n_epochs=kwargs["max_epochs"],
        random_state=SEED,
        pl_trainer_kwargs=kwargs,
        work_dir=str(run.folder),
        force_reset=True,
    )
    wave = TimeSeries.from_values(np.sin(np.arange(190) / 5).astype(np.float32))
    model.fit(wave[:150], val_series=wave[150:])


# It goes on from checkpoints of its own only.
RESUMES = False
