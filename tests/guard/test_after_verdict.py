"""Once a run is being ended, Lightning's own callbacks and plugins can do nothing with checkpoints any more.

The run is ended by the test, from within a training; held is nothing here, so that the gate alone is seen.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from warm import Warm

SCRIPT = """
import copy, json, pickle, sys, threading
from pathlib import Path
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader
from lightning_ncclsafe import CollectiveTimeoutError, SafeDDP

where, folder = sys.argv[1], Path(sys.argv[2])

def make_error():
    return CollectiveTimeoutError("rank 1 is in a slow evaluation")

def contents():
    return {path.name: hash(path.read_bytes()) for path in folder.glob("checkpoints/*")}

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def validation_step(self, batch, batch_idx):
        self.log("loss", -float(self.global_step))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

class Ends(L.Callback):
    before = None
    def end(self, trainer, hook):
        if where == hook and trainer.global_step >= 4 and self.before is None:
            executor = getattr(io.get(sys.argv[3]), "_executor", None)
            if executor is not None:
                executor.submit(int).result()  # what it is writing is there before
            self.before = contents()
            trainer.strategy._ending.close(make_error)
    def on_train_batch_end(self, trainer, *_):
        self.end(trainer, "train-batch-end")
    def on_validation_end(self, trainer, *_):
        self.end(trainer, "validation-end")
    def on_train_epoch_end(self, trainer, *_):
        self.end(trainer, "train-epoch-end")
    def on_save_checkpoint(self, trainer, *_):
        self.end(trainer, "during-save")

class Slow(TorchCheckpointIO):
    pass

io = {"async": AsyncCheckpointIO(), "async-given": AsyncCheckpointIO(TorchCheckpointIO()), "own": Slow()}
ends, exception = Ends(), OnExceptionCheckpoint(folder / "checkpoints", "exception")
kinds = {
    "validation-end": dict(monitor="loss", save_top_k=1),
    "train-epoch-end": dict(save_on_train_epoch_end=True, save_last=True),
}
saves = ModelCheckpoint(
    folder / "checkpoints", filename="{step}", **kinds.get(where, dict(every_n_train_steps=1, save_last=True))
)
trainer = L.Trainer(
    accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
    enable_model_summary=False, default_root_dir=folder, callbacks=[ends, saves, exception], strategy=SafeDDP(),
    plugins=[io[sys.argv[3]]] if sys.argv[3] in io else None,
)
said = []
def attempt(act):
    try:
        act()
        said.append("nothing")
    except Exception as error:
        said.append(type(error).__name__)

data = DataLoader(torch.zeros(4, 4), batch_size=2)
attempt(lambda: trainer.fit(Net(), data, data))
attempt(lambda: trainer.save_checkpoint(folder / "checkpoints" / "mine.ckpt"))
attempt(lambda: trainer.strategy.remove_checkpoint(folder / "checkpoints" / "last.ckpt"))
attempt(lambda: trainer.strategy.checkpoint_io.save_checkpoint({}, folder / "checkpoints" / "io.ckpt"))
attempt(lambda: trainer.strategy.optimizer_step(None, None))
attempt(lambda: trainer.strategy.barrier())
attempt(lambda: trainer.fit(Net(), data, data))
other = pickle.loads(pickle.dumps(trainer.strategy._ending))
loaded = [torch.load(path, weights_only=False) for path in folder.glob("checkpoints/*.ckpt")]
print(json.dumps({
    "said": said, "before": ends.before, "after": contents(), "loaded": len(loaded), "copy": other.is_closed,
}))
sys.stdout.flush()
"""


FIRST: list[tuple[str, ...]] = []


def run_program(warm: Warm, folder: Path, where: str, plugin: str) -> dict[str, Any]:
    """One fit in a process of its own: a process group is global to it."""
    script = folder / "fit.py"
    script.write_text(SCRIPT)
    codes, output = warm.run([str(script), where, str(folder), plugin], folder, timeout_s=50)
    assert codes == [0], output
    told: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith('{"said"')))
    return told


CASES = [
    ("train-batch-end", ""),
    ("validation-end", ""),
    ("train-epoch-end", ""),
    ("during-save", ""),
    ("train-batch-end", "async"),
    ("during-save", "async-given"),
    ("train-batch-end", "own"),
]


@pytest.mark.parametrize(
    ("where", "plugin"), [pytest.param(*case, marks=pytest.mark.program(*case), id=" ".join(case)) for case in CASES]
)
def test_no_callback_or_plugin_changes_a_checkpoint(plugin: str, where: str, outcome: dict[str, Any]) -> None:
    told = outcome
    # A plugin of the user's own is left as it is: whoever calls it himself passes no gate.
    own = 1 if plugin == "own" else 0
    refused = ["CollectiveTimeoutError"] * 7
    # What an asynchronous plugin is given it refuses in its thread.
    expected = [said if number != 3 or not plugin else told["said"][3] for number, said in enumerate(refused)]
    assert told["said"] == expected
    after = {name: content for name, content in told["after"].items() if name != "io.ckpt"}
    assert after == told["before"]
    assert ("io.ckpt" in told["after"]) == bool(own)
    assert told["loaded"] == len(told["after"])
    assert told["before"]
    assert not told["copy"]
