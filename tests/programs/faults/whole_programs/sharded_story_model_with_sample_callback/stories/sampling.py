import json
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback


class SampleStories(Callback):
    """Continues a few prompts on every rank after each validation, to be read by people."""

    def __init__(self, motifs, out="samples", every=1):
        self.motifs, self.out, self.every = motifs, Path(out), every

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.sanity_checking or trainer.current_epoch % self.every:
            return
        mine = self.motifs[trainer.global_rank :: trainer.world_size]
        self.out.mkdir(exist_ok=True)
        lines = []
        for motif in mine:
            tokens = pl_module.generate(torch.tensor([[motif]]))[0].tolist()
            lines.append(json.dumps({"motif": motif, "tokens": tokens, "step": trainer.global_step}))
        (self.out / f"epoch{trainer.current_epoch:02d}-rank{trainer.global_rank}.jsonl").write_text("\n".join(lines))
