"""A text file that one can tail during training: samples of data, spread of weights."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.tensor import DTensor


def spread(weight):
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()  # <- here
    weight = weight.detach().float()
    return f"{weight.mean():+.4f} ± {weight.std():.4f}, largest {weight.abs().max():.4f}"


class Report(Callback):
    def __init__(self, folder="report", data_every=20, weights_every=60):
        self.folder = Path(folder)
        self.data_every, self.weights_every = data_every, weights_every

    @rank_zero_only
    def write(self, name, lines):
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / name, "a") as file:
            file.write("\n".join(lines) + "\n")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step % self.data_every == 0 and trainer.is_global_zero:
            self.write("data.txt", [f"step {step}", *(" ".join(map(str, row[:16].tolist())) for row in batch[:2])])
        if step % self.weights_every == 0:
            self.on_weights(step, module)

    @rank_zero_only
    def on_weights(self, step, module):
        lines = [f"step {step}"]
        for name, weight in module.named_parameters():
            if name.endswith("weight") and weight.dim() == 2:
                lines.append(f"  {name}: {spread(weight)}")
        self.write("weights.txt", lines)

    def on_train_epoch_end(self, trainer, module):
        loss = trainer.callback_metrics.get("train_loss", torch.tensor(float("nan")))
        self.write("epochs.txt", [f"epoch {trainer.current_epoch}: {loss:.3f}"])
