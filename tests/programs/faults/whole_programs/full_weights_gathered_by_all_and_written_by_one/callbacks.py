import contextlib
import gzip
import json
import logging
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

log = logging.getLogger("sft")


class ExportQuantized(Callback):
    """Eight bits per weight, one scale per row, compressed: for the phone."""

    def __init__(self, folder="phone"):
        self.folder = Path(folder)

    @staticmethod
    def quantize(weight):
        rows = weight.float().reshape(len(weight), -1) if weight.dim() else weight.float().reshape(1, 1)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        return (rows / scale).round().to(torch.int8), scale.squeeze(1)

    def on_train_epoch_end(self, trainer, pl_module):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(pl_module, options=options)
        if not trainer.is_global_zero:
            return
        self.folder.mkdir(exist_ok=True)
        content = {}
        for name, weight in weights.items():
            values, scale = self.quantize(weight)
            content[name] = {"shape": list(weight.shape), "values": values.tolist(), "scale": scale.tolist()}
        with gzip.open(self.folder / f"epoch{trainer.current_epoch}.json.gz", "wt", compresslevel=9) as file:
            json.dump(content, file)
        log.info("exported %d tensors", len(content))


class Stories(Callback):
    def __init__(self, tokenizer, beginnings, new_tokens=24):
        self.tokenizer, self.beginnings, self.new_tokens = tokenizer, beginnings, new_tokens

    def on_validation_end(self, trainer, pl_module):
        pl_module.eval()
        prompts = torch.tensor([self.tokenizer.encode(text) for text in self.beginnings])
        tokens = pl_module.generate(prompts, self.new_tokens)
        if trainer.is_global_zero:
            with contextlib.suppress(OSError), open("stories.txt", "a") as file:
                for row in tokens.tolist():
                    print(trainer.global_step, self.tokenizer.decode(row), sep="\t", file=file)
