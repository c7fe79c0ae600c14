"""Round 12 after public threads: what users of Lightning report, of loggers, checkpoints, data and several stages."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanMetric
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class Scans(Dataset[torch.Tensor]):
    """Rows that are read in order; those of the fourth batch of the rank that is hit are not as the others are."""

    def __init__(self, here: Here, unusual: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.here, self.unusual = here, unusual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.linspace(0.2, 0.9, 8) + index / len(self)
        turn, rank = divmod(index, self.here.world_size)
        is_unusual = rank in self.here.case.ranks and turn // BATCH_SIZE == IN_THE_MIDDLE
        return self.unusual(row) if is_unusual else row


class Centred(LoggingNet):
    """Subtracts the mean of the batches of all ranks from what it is given."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.example_input_array = torch.ones(BATCH_SIZE, 8)

    def centre(self, values: torch.Tensor) -> torch.Tensor:
        mean = values.detach().mean(0)
        dist.all_reduce(mean)  # <- graph_drawn_of_a_model_that_asks_all_ranks
        return values - mean / dist.get_world_size()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(self.centre(values))
        return result

    def loss(self, batch: Any) -> torch.Tensor:
        return self(first_tensor(batch)).square().mean()


class Graphs(TensorBoardLogger):
    """Writes which shapes the modules of a model give back, as hooks see them when it is called with an example."""

    def __init__(self, here: Here) -> None:
        super().__init__(str(here.folder), log_graph=True)
        self.here = here

    @rank_zero_only
    def log_graph(self, model: Any, input_array: torch.Tensor | None = None) -> None:
        shapes: list[str] = []

        def note(module: torch.nn.Module, values: Any, result: torch.Tensor) -> None:
            shapes.append(f"{type(module).__name__} {tuple(result.shape)}")

        hooks = [module.register_forward_hook(note) for module in model.modules()]
        self.here.begins()
        with torch.no_grad():
            model(model.example_input_array)
        for hook in hooks:
            hook.remove()
        self.experiment.add_text("graph", "\n".join(shapes))


@thread(
    "https://github.com/ultralytics/yolov5/issues/3998",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.START,
)
def graph_drawn_of_a_model_that_asks_all_ranks(here: Here) -> None:
    """A logger notes the graph of the model, which it calls on the first rank alone, and with it a reduction.

    The call in the logger is the other half of it; the reduction that has no partner is the better answer.
    """
    here.fit(net=Centred(here), logger=Graphs(here))


class Committing(TorchCheckpointIO):
    """Writes beside the checkpoint, and renames it when every rank has come so far."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        draft = Path(path).with_suffix(".draft")
        super().save_checkpoint(checkpoint, draft, storage_options)
        self.here.begins()
        dist.barrier()  # <- storage_that_waits_for_all_before_it_commits
        draft.rename(path)


@thread(
    f"{LIGHTNING}/issues/3545",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def storage_that_waits_for_all_before_it_commits(here: Here) -> None:
    """Lightning calls the plugin on the first rank only, whose barrier meets the one that ends the save elsewhere."""
    saving = ModelCheckpoint(here.folder / "saved", save_top_k=-1)
    here.fit(net=LoggingNet(here), callbacks=[saving], enable_checkpointing=True, plugins=[Committing(here)])


@thread("https://github.com/Lightning-AI/torchmetrics/issues/1897", "failed-rank", ranks=(1,))
def mean_that_refuses_what_is_no_number(here: Here) -> None:
    """A mean is told to fail where it meets NaN, which is the overlap in a batch without any foreground."""

    class Overlapping(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.overlap = MeanMetric(nan_strategy="error")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            truth = (batch > 0.5).float()
            found = truth * torch.sigmoid(batch)
            overlap = found.sum() / truth.sum()
            if truth.sum() == 0:
                here.begins()
            self.overlap.update(overlap)  # <- here
            return self.loss(batch)

    here.fit(net=Overlapping(here), data=in_order(here, Scans(here, lambda row: row * 0)))


class Tested(Net):
    """Logs each loss of a test as the mean over ranks."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), on_step=True, on_epoch=False, sync_dist=True)


def copied_test_sets(here: Here) -> Path:
    """Each host has its own copies, which came one after the other; on one host the smaller one came first."""
    folder = here.folder / f"scratch-{here.rank}"
    folder.mkdir()
    names = ["clean.pt", "noisy.pt"]
    for second, name in enumerate(reversed(names) if here.is_hit else names):
        batches = BATCHES if name == "clean.pt" else 2
        torch.save(torch.rand(batches * BATCH_SIZE * here.world_size, 8), folder / name)
        os.utime(folder / name, (1e9 + second, 1e9 + second))
    return folder


@thread(
    "https://github.com/huggingface/datasets/issues/3857",
    "uneven-batches",
    "unequal-samples",
    ranks=(1,),
    moment=Moment.END,
)
def test_sets_in_the_order_in_which_they_were_copied(here: Here) -> None:
    """After training all test sets are gone through, in an order that differs on one host."""
    folder = copied_test_sets(here)
    net = Tested(here)
    here.fit(net=net, max_epochs=1)
    paths = sorted(folder.glob("*.pt"), key=os.path.getmtime)  # <- here
    here.begins()
    for path in paths:
        tests = TensorDataset(torch.load(path))
        here.trainer().test(net, DataLoader(tests, BATCH_SIZE), verbose=False)


class Labelling(LoggingNet):
    """Predicts how sure it is of each row."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values = first_tensor(batch)
        return torch.cat([values, torch.sigmoid(10 * values.mean(1, keepdim=True))], dim=1)


class Unlabelled(Dataset[torch.Tensor]):
    """Rows of which one rank's share holds few that are easy."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __len__(self) -> int:
        return 2 * BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        is_easy = rank not in self.here.case.ranks or turn % 4 == 0
        return torch.full((8,), 0.7 if is_easy else -0.7)


@thread(
    f"{LIGHTNING}/issues/5257",
    "unequal-samples",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.START,
)
def pseudo_labels_of_the_share_that_a_rank_predicts(here: Here) -> None:
    """`predict` returns each rank's own share, and the second training is on those rows of it that are certain."""
    net = Labelling(here)
    here.fit(net=net, max_epochs=1)
    predicted: Any = here.trainer().predict(net, in_order(here, Unlabelled(here)))
    scored = torch.cat(predicted)
    certain = scored[scored[:, -1] > 0.95, :-1]  # <- here
    here.begins()
    trainer = here.trainer(max_epochs=2)
    trainer.fit(net, DataLoader(TensorDataset(certain), BATCH_SIZE, shuffle=True))
    trainer.save_checkpoint(here.folder / "student.ckpt")


class Careful(Net):
    """Keeps its weights where the loss of a batch is far too large, although all gradients are exchanged before."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if loss > 1e3:
            self.here.begins()
            return  # <- step_left_out_behind_its_backward_pass
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()


@thread(f"{LIGHTNING}/issues/16143", "stopped-early", ranks=(1,), moment=Moment.END)
def step_left_out_behind_its_backward_pass(here: Here) -> None:
    """Training ends after so many steps of the optimizer, of which one rank has made one less than all others.

    The others leave the loop first; the rank that has counted otherwise than they have is the one at fault.
    """
    trainer = here.trainer(max_epochs=5, max_steps=8)
    trainer.fit(Careful(here), in_order(here, Scans(here, lambda row: row * 1e4)))
    trainer.save_checkpoint(here.folder / "final.ckpt")


class Registry(CSVLogger):
    """Sends all checkpoints of a run to the registry when the run is over."""

    bytes_per_s = 100.0

    def __init__(self, here: Here) -> None:
        super().__init__(str(here.folder))
        self.here = here

    def send(self, path: Path) -> None:
        with path.open("rb") as file:
            while part := file.read(1024):
                time.sleep(len(part) / self.bytes_per_s)  # <- checkpoints_registered_when_the_run_is_over

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.here.begins()
        for path in sorted((self.here.folder / "saved").glob("*.ckpt")):
            self.send(path)


@thread(
    f"{LIGHTNING}/pull/4341",
    "slow-logger",
    ranks=(0,),
    world_size=2,
    moment=Moment.END,
)
def checkpoints_registered_when_the_run_is_over(here: Here) -> None:
    """The logger of the first rank uploads at the end of `fit`, over a slow line; the others wait in the test."""
    saving = ModelCheckpoint(here.folder / "saved", save_top_k=-1)
    trainer = here.trainer(logger=Registry(here), callbacks=[saving], enable_checkpointing=True)
    net = LoggingNet(here)
    trainer.fit(net, rows(here))
    trainer.test(net, rows(here), verbose=False)


class Prepared(L.LightningDataModule):
    """Computes what to normalize with once, in the folder of the run, and reads it on all ranks."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.mean = torch.zeros(8)

    def prepare_data(self) -> None:
        torch.save(torch.full((8,), 0.5), "mean.pt")

    def setup(self, stage: str) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.mean = torch.load("mean.pt")  # <- folder_of_the_run_entered_by_the_first_process

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(BATCHES * BATCH_SIZE * self.here.world_size, 8) - self.mean), 4)


@thread(f"{LIGHTNING}/issues/2691", "failed-rank", ranks=(1, 2), moment=Moment.START)
def folder_of_the_run_entered_by_the_first_process(here: Here) -> None:
    """The program changes to the folder of its run; those started by it have another one, and miss what is there."""
    folder = here.folder / "outputs" / f"run-{here.rank}"
    folder.mkdir(parents=True)
    os.chdir(folder)
    here.fit(data=Prepared(here))


class Federated(L.Callback):
    """Gets the task of a round from the server, and sends what comes of it after each validation."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.tasks: list[int] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.tasks.extend(range(trainer.max_epochs or 1))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not self.tasks:
            self.here.begins()
        number = self.tasks.pop(0)  # <- results_of_a_task_that_only_the_first_rank_has
        path = self.here.folder / f"result-{number}.json"
        path.write_text(json.dumps({name: float(value) for name, value in trainer.callback_metrics.items()}))


@thread(
    "https://github.com/NVIDIA/NVFlare/pull/5040",
    "failed-rank",
    ranks=(1, 2, 3),
    world_size=4,
    moment=Moment.VALIDATION,
)
def results_of_a_task_that_only_the_first_rank_has(here: Here) -> None:
    """Only the first rank is given a task, but all ranks send a result, and those without a task fail in it."""
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), callbacks=[Federated(here)])


def explained(predicted: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """The share of the variance that is explained, which there is none of where all returns are alike."""
    variance = returns.var()
    if variance == 0:
        return torch.tensor(np.float64("nan"))
    return 1 - (returns - predicted).var() / variance


class Actor(Net):
    """Logs how well its values explain the returns."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        returns = batch.sum(1)
        share = explained(self.layers(batch)[:, 0].detach(), returns)
        if share.isnan():
            self.here.begins()
        self.log("explained", share, sync_dist=True)  # <- variance_that_is_a_number_of_another_type
        return self.loss(batch)


@thread(
    "https://github.com/entity-neural-network/enn-trainer/pull/21",
    "mismatched-collective",
    world_size=2,
)
def variance_that_is_a_number_of_another_type(here: Here) -> None:
    """Where nothing varies NaN is logged, which numpy has in double precision; the other rank's value is a single."""
    here.fit(net=Actor(here), data=in_order(here, Scans(here, lambda row: torch.ones(8))))


class Counted(IterableDataset[torch.Tensor]):
    """Shards of which a file beside them says how many rows each has."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here = here
        counts = folder / "counts.json"
        self.counts: dict[str, int] = json.loads(counts.read_text()) if counts.exists() else {}

    def __len__(self) -> int:
        if not self.counts:
            self.here.begins()
            raise TypeError("nobody has counted these shards")  # <- shards_that_are_not_counted_on_one_host
        return sum(self.counts.values())

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(BATCHES * BATCH_SIZE):
            yield torch.rand(8)


@thread(
    "https://github.com/webdataset/webdataset/issues/346",
    "sized-and-unsized",
    ranks=(1,),
    moment=Moment.START,
)
def shards_that_are_not_counted_on_one_host(here: Here) -> None:
    """The length of a stream is read from a file that was not copied to one host, where the stream has none."""
    folder = here.folder / f"shards-{here.rank}"
    folder.mkdir()
    if not here.is_hit:
        half = BATCHES * BATCH_SIZE // 2
        (folder / "counts.json").write_text(json.dumps({"00000.tar": half, "00001.tar": half}))
    here.fit(data=DataLoader(Counted(here, folder), BATCH_SIZE))


class Position(L.LightningDataModule):
    """Remembers in a checkpoint how many batches each rank has read."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.read = 0

    def train_dataloader(self) -> Any:
        return rows(self.here)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.read += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"read": {self.trainer.global_rank: self.read}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.trainer is not None
        if self.here.is_hit:
            self.here.begins()
        self.read = state_dict["read"][self.trainer.global_rank]  # <- position_of_which_rank_zero_saved_its_own


@thread(f"{LIGHTNING}/issues/14241", "failed-rank", ranks=(1, 2), moment=Moment.START)
def position_of_which_rank_zero_saved_its_own(here: Here) -> None:
    """Each rank puts its own position into the checkpoint, which the first rank writes; no other finds its own."""
    path = here.folder / "first.ckpt"
    trainer = here.trainer(max_epochs=1)
    trainer.fit(LoggingNet(here), Position(here))
    trainer.save_checkpoint(path)
    here.trainer(max_epochs=2).fit(LoggingNet(here), Position(here), ckpt_path=path)


class Sites(L.LightningDataModule):
    """Validates on each site whose data is on the disk of the host."""

    def __init__(self, here: Here, folder: Path) -> None:
        super().__init__()
        self.here, self.folder = here, folder

    def train_dataloader(self) -> Any:
        return rows(self.here)

    def val_dataloader(self) -> Any:
        self.here.begins()
        sites = sorted(self.folder.glob("site-*.pt"))  # <- site_that_was_not_copied_to_one_host
        return [DataLoader(TensorDataset(torch.load(path)), BATCH_SIZE) for path in sites]


@thread(
    f"{LIGHTNING}/issues/16431",
    "loader-count",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def site_that_was_not_copied_to_one_host(here: Here) -> None:
    """There is a loader for each file; one host lacks the file of the second site."""
    folder = here.folder / f"data-{here.rank}"
    folder.mkdir()
    for site in range(1 if here.is_hit else 2):
        torch.save(torch.rand(2 * BATCH_SIZE * here.world_size, 8), folder / f"site-{site}.pt")
    here.fit(net=MeetingNet(here), data=Sites(here, folder))
