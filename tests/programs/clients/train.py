"""Trains one client on one rank and notes what came of it: ``python train.py CLIENT STRATEGY VARIANT FOLDER``.

Run by the environment of the client. Whatever another strategy might change goes to ``FOLDER/found-<rank>.json``.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 7
EPOCHS = 2
# The batch, counted from the start, that something happens to.
AT_BATCH = 5
# That a metric never improves by.
TOO_MUCH = 1e9

STRATEGIES = ("stock", "SafeDDP", "safe_callbacks", "run")
# Those that train with a strategy of Lightning's own. The last is started with NCCLSAFE=1 in its environment.
OF_LIGHTNING = ("stock", "run")
# One more, for the time of its steps.
TIMED = "timed"
VARIANTS = {
    "plain": "two epochs",
    "fast_dev_run": "fast_dev_run=3",
    "script": "ranks started by Lightning's launcher",
    "spawn": 'start_method="spawn"',
    "one_device": "devices=1",
    "early_stopping": "EarlyStopping",
    "accumulation": "accumulate_grad_batches=2",
    "resume": "one epoch, and one more from its checkpoint",
    "sigint": "SIGINT to both ranks",
    "sigterm": "SIGTERM to rank 0",
    "raises_on_one": "an exception on rank 1",
    "raises_on_all": "an exception on both ranks",
}


@dataclass
class Run:
    """What a client is trained with.

    Attributes:
        name: Of the client. Its module says ``REQUIREMENTS``, what pip installs, and ``MONITOR``, a metric that it
            logs; it may say ``LIGHTNING``, the package that it uses (``lightning.pytorch``), ``STRATEGY``, arguments
            of the strategy, ``EPOCHS``, how many of its epochs count as one here, and that it never ``RESUMES``.
        strategy: One of ``STRATEGIES``.
        variant: One of ``VARIANTS``.
        folder: Where everything goes.
        ckpt_path: What training goes on from.
        part: What a client that trains several times trains now.
    """

    name: str
    strategy: str
    variant: str
    folder: Path
    ckpt_path: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    epochs: int = EPOCHS
    part: str = ""

    @property
    def client(self) -> ModuleType:
        return import_module(f"client_{self.name}")

    @property
    def lightning(self) -> ModuleType:
        return import_module(getattr(self.client, "LIGHTNING", "lightning.pytorch"))

    @property
    def ours(self) -> ModuleType:
        """This package, for the Lightning that the client uses."""
        return import_module(f"lightning_ncclsafe.{self.lightning.__name__.partition('.')[0]}")

    def kwargs(self) -> dict[str, Any]:
        """The arguments of the Trainer that the client makes."""
        made = {
            "accelerator": "cpu",
            "devices": 1 if self.variant == "one_device" else 2,
            "max_epochs": self.epochs * getattr(self.client, "EPOCHS", 1),
            "strategy": self._strategy(),
            "callbacks": self._callbacks(),
            "logger": self.lightning.loggers.CSVLogger(self.folder, "logs", self.part or 0),
            "log_every_n_steps": 1,
            "default_root_dir": str(self.folder),
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        if self.variant == "fast_dev_run":
            made["fast_dev_run"] = 3
        if self.variant == "accumulation":
            made["accumulate_grad_batches"] = 2
        return made

    @property
    def unpickling(self) -> dict[str, bool]:
        """For ``fit``, where a client's checkpoints hold more than weights, and Lightning has to be told."""
        return {"weights_only": False} if self.ckpt_path else {}

    def _strategy(self) -> Any:
        given = dict(getattr(self.client, "STRATEGY", {}))
        if self.variant == "spawn":
            given["start_method"] = "spawn"
        if self.strategy in OF_LIGHTNING:
            return self.lightning.strategies.DDPStrategy(**given)
        return self.ours.SafeDDP(**given)

    def _callbacks(self) -> list[Any]:
        made = [recorder(self)]
        if self.variant == "early_stopping":
            stopping = self.lightning.callbacks.EarlyStopping(self.client.MONITOR, min_delta=TOO_MUCH, patience=1)
            made.append(stopping)
        if self.strategy != "safe_callbacks":
            return made
        return self.ours.safe_callbacks(*made)


class Recorder:
    """Notes what was trained, and lets go wrong what the variant says; a callback of the Lightning that is used."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[str] = []
        self.states: list[str] = []
        self.steps_s: list[float] = []
        self.began_s: float | None = None
        self.fit_began_s = 0.0

    def on_fit_start(self, *_: Any) -> None:
        self.fit_began_s = time.perf_counter()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.began_s = None

    def on_train_batch_start(self, *_: Any) -> None:
        now_s = time.perf_counter()
        if self.began_s is not None:
            self.steps_s.append(now_s - self.began_s)
        self.began_s = now_s

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses.append("none" if loss is None else float(loss).hex())
        if len(self.losses) == AT_BATCH:
            go_wrong(self.run.variant, trainer.global_rank)

    def on_train_epoch_end(self, *_: Any) -> None:
        self.states.append(random_states())

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        note = {
            "part": self.run.part,
            "losses": self.losses,
            "random states": [*self.states, random_states()],
            # Buffers that no checkpoint keeps may never have been written: lightly has such.
            "weights": digest(*map(as_bytes, filter(is_tensor, module.state_dict().values()))),
            "steps": trainer.global_step,
            "metrics": {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())},
            "guarded": hasattr(trainer.strategy, "watch"),
            "steps_s": self.steps_s,
            "fit_s": time.perf_counter() - self.fit_began_s,
        }
        self.run.found.setdefault("fits", []).append(note)
        if self.run.variant == "spawn":
            write(self.run, trainer.global_rank)

    def __reduce__(self) -> Any:
        return recorder, (self.run,)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def recorder(run: Run) -> Any:
    return type("Recorder", (Recorder, run.lightning.Callback), {})(run)


def go_wrong(variant: str, rank: int) -> None:
    if variant == "sigint" or (variant == "sigterm" and rank == 0):
        os.kill(os.getpid(), signal.SIGINT if variant == "sigint" else signal.SIGTERM)
    if variant == "raises_on_all" or (variant == "raises_on_one" and rank == 1):
        raise ValueError(f"rank {rank} has a bad batch")


def random_states() -> str:
    import numpy as np
    import torch

    return digest(torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), np.random.get_state()[1].tobytes())


def is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def as_bytes(tensor: Any) -> bytes:
    made: bytes = tensor.detach().cpu().numpy().tobytes()
    return made


def digest(*parts: bytes | str) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(part.encode() if isinstance(part, str) else part)
    return made.hexdigest()[:16]


def write(run: Run, rank: int) -> None:
    (run.folder / f"found-{rank}.json").write_text(json.dumps(run.found))


def train(run: Run) -> None:
    if run.variant == "resume":
        run.epochs = 1
        run.client.train(run)
        run.ckpt_path = next(run.folder.rglob("*.ckpt"))
        run.epochs = EPOCHS
    if run.variant == TIMED:
        run.epochs *= 5
    run.client.train(run)


def main() -> None:
    name, strategy, variant, folder = sys.argv[1:]
    run = Run(name, strategy, variant, Path(folder))
    run.lightning.seed_everything(SEED, workers=True, verbose=False)
    try:
        train(run)
    except BaseException as error:
        run.found["raised"] = type(error).__name__
        raise
    finally:
        if variant != "spawn":
            write(run, int(os.environ.get("LOCAL_RANK", "0")))


if __name__ == "__main__":
    main()
