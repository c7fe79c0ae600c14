"""Exports for the service, which loads plain tensors and a list of labels."""

import json
import logging
import shutil
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

log = logging.getLogger(__name__)


class ExportForService(Callback):
    def __init__(self, folder, labels, every_n_epochs=1, keep=2):
        self.folder = Path(folder)
        self.labels = list(labels)
        self.every_n_epochs = every_n_epochs
        self.keep = keep

    def _is_due(self, trainer):
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_train_epoch_end(self, trainer, pl_module):
        if self._is_due(trainer) and trainer.is_global_zero:
            target = self.folder / f"epoch-{trainer.current_epoch:02d}"
            target.mkdir(parents=True, exist_ok=True)
            self.export(pl_module, target)
            self.clean_up()

    def export(self, pl_module, target):
        began = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(pl_module, options=options)  # <- here
        torch.save({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, target / "weights.pt")
        (target / "labels.json").write_text(json.dumps(self.labels))
        log.info("exported %d tensors to %s in %.1f s", len(weights), target, time.perf_counter() - began)

    def clean_up(self):
        for old in sorted(self.folder.glob("epoch-*"))[: -self.keep]:
            shutil.rmtree(old)
