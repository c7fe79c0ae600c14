from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from .generation import complete
from .tasks import TASKS, Task


def distinct(tokens: list[int], n: int = 2) -> float:
    """Share of n-grams that occur once: low for a model that repeats itself."""
    grams = Counter(zip(*(tokens[i:] for i in range(n)), strict=False))
    return sum(count == 1 for count in grams.values()) / max(1, sum(grams.values()))


class Harness(Callback):
    """Ranks share the tasks; the first one collects all answers and writes them to a file per epoch."""

    def __init__(self, folder: str = "answers") -> None:
        self.folder = Path(folder)
        self.group: dist.ProcessGroup | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # objects travel over the CPU, in a group of their own
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=15))  # <- here

    def answer(self, task: Task, pl_module: L.LightningModule) -> dict:
        generator = torch.Generator().manual_seed(len(task.name))
        began = time.perf_counter()
        answers = []
        for _ in range(task.prompts):
            prompt = torch.randint(pl_module.vocabulary, (task.prompt_tokens,), generator=generator)
            answers.append(complete(pl_module, prompt, task.answer_tokens).tolist())
        return {"task": task.name, "answers": answers, "seconds": time.perf_counter() - began}

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        mine = [self.answer(task, pl_module) for task in TASKS[trainer.global_rank :: trainer.world_size]]
        collected = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(mine, collected, dst=0, group=self.group)
        if trainer.is_global_zero:
            self.write([result for results in collected for result in results], trainer.current_epoch)

    def write(self, results: list[dict], epoch: int) -> None:
        self.folder.mkdir(exist_ok=True)
        for result in results:
            result["distinct"] = sum(map(distinct, result["answers"])) / len(result["answers"])
            print(f"{result['task']:>12}: {result['distinct']:.3f} distinct in {result['seconds']:.1f} s")
        (self.folder / f"epoch{epoch}.json").write_text(json.dumps(results))
