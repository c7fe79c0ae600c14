"""Round 20 after public threads: what users of sharded models do that looks odd, and is as it should be."""

import time

import lightning as L
import torch
from from_threads.round_13_sharded import SPLIT
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from training import Here
from truths import Moment, healthy


class Behind(L.Callback):
    """All ranks gather the weights and meet, and only then the first one writes them, while the others go on."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        trainer.strategy.barrier("gathered")
        if not trainer.is_global_zero:
            return
        for name, weight in weights.items():
            time.sleep(0.4)
            torch.save(weight, self.here.folder / f"{name}-{trainer.current_epoch}.pt")


@healthy({Moment.CHECKPOINT: (4,)}, source="https://github.com/TRI-ML/prismatic-vlms/pull/38", strategies=SPLIT)
def weights_written_behind_a_barrier(here: Here) -> None:
    """The first rank writes for a second or two while the others are in the next epoch, where they wait for it."""
    here.fit(callbacks=[Behind(here)])
