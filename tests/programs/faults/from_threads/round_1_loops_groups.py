"""Trainings whose ranks log, gather or use groups of their own differently, written after public threads."""

import json
import threading
from typing import Any

import lightning as L
import numpy
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities import rank_zero_only
from torchmetrics.classification import BinaryAUROC
from training import IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment, fault, odd_one_out

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


class ProgressReporter(Callback):
    """Tells the graphical interface how the training does."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            metrics = trainer.callback_metrics  # <- metrics_that_rank_zero_looks_up
            (self.here.folder / "progress.json").write_text(json.dumps(sorted(metrics)))
        trainer.strategy.barrier("progress")


# Looking up `callback_metrics` reduces what was logged with sync_dist, and only rank 0 looks it up.
@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/talmolab/sleap-nn/pull/476",
)
def metrics_that_rank_zero_looks_up(here: Here) -> None:
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), callbacks=[ProgressReporter(here)])


class BestModelCallback(Callback):
    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.here.begins()
        trainer.test(pl_module, rows(self.here, batches=2), verbose=False)  # <- best_model_tested_by_rank_zero


# The best model is tested after the fit by the main process alone; the other one has returned from fit.
@fault(
    "unfinished-rank",
    ranks=(0,),
    at={Moment.END: (2,)},
    has_phase=False,
    source="https://github.com/roboflow/rf-detr/issues/1505",
    whose="code",
)
def best_model_tested_by_rank_zero(here: Here) -> None:
    here.fit(callbacks=[BestModelCallback(here)], max_epochs=1)


# `all_gather` under `is_global_zero`, at the end of the test epoch.
@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.END: (4,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/16541",
)
def outputs_gathered_for_rank_zero(here: Here) -> None:
    class Tested(Net):
        def on_test_epoch_start(self) -> None:
            self.outputs: list[torch.Tensor] = []

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self.layers(first_tensor(batch)))

        def on_test_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                outputs = self.all_gather(torch.cat(self.outputs))  # <- here
                torch.save(outputs, here.folder / "outputs.pt")

    net, trainer = Tested(here), here.trainer(max_epochs=1)
    trainer.fit(net, rows(here))
    trainer.test(net, rows(here))
    trainer.predict(net, rows(here))


# `log_dict` with one key for each class that has occurred: on one rank a rare one has.
@fault(
    "diverged-log-keys",
    ranks=(1,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/19106",
)
def overlap_of_the_classes_seen(here: Here) -> None:
    class Segmentation(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen = ["road", "car", "person"]
            if here.is_hit and batch_idx == 1:
                seen.append("tram")
            for name in seen:
                self.overlaps.setdefault(name, []).append(self.loss(batch))

        def on_validation_epoch_start(self) -> None:
            self.overlaps: dict[str, list[torch.Tensor]] = {}

        def on_validation_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            means = {f"iou/{name}": torch.stack(values).mean() for name, values in self.overlaps.items()}
            self.log_dict(means, sync_dist=True)  # <- here

    here.fit(net=Segmentation(here), data=(rows(here), rows(here, batches=2)))


# Checkpoints by hand, under `is_global_zero` since only one process ought to write.
@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/10947",
)
def checkpoint_by_hand_on_rank_zero(here: Here) -> None:
    class EveryFewBatches(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.is_global_zero and index == IN_THE_MIDDLE:
                here.begins()
                trainer.save_checkpoint(here.folder / f"batch-{index}.ckpt")  # <- here

    here.fit(callbacks=[EveryFewBatches()])


# A hook with `rank_zero_only`, so that a metric is drawn once; but to compute it is to gather its states.
@fault(
    "diverged-collectives",
    ranks=(0,),
    at={Moment.EPOCH_END: (4,)},
    has_phase=False,
    source="https://github.com/Lightning-AI/torchmetrics/pull/2719",
)
def curve_computed_once(here: Here) -> None:
    class Curved(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.area = BinaryAUROC()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            scores = self.layers(first_tensor(batch))[:, 0].sigmoid().detach()
            self.area.update(scores, torch.arange(len(scores)) % 2)
            return super().training_step(batch, batch_idx)

        @rank_zero_only
        def on_train_epoch_end(self) -> None:
            here.begins()
            print("area under the curve:", self.area.compute())  # <- here

    here.fit(net=Curved(here))


# Tensors are reduced in the order of a dictionary, which is that in which they first occurred on each rank.
@fault(
    "mismatched-collective",
    ranks=odd_one_out,
    at={Moment.EPOCH_END: (2,)},
    has_phase=False,
    source="https://github.com/NVIDIA/apex/pull/18",
)
def counts_in_the_order_of_their_first_use(here: Here) -> None:
    class Counting(Net):
        def on_train_start(self) -> None:
            self.counts: dict[str, torch.Tensor] = {}
            self.sizes = {"phonemes": 70_000, "letters": 900}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            name = ("phonemes", "letters")[(batch_idx + here.rank) % 2]
            counts = self.counts.setdefault(name, torch.zeros(self.sizes[name]))
            counts[batch_idx] += 1
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            here.begins()
            for counts in self.counts.values():
                dist.all_reduce(counts)  # <- here

    here.fit(net=Counting(here))


# A ring of groups of two: every rank meets its left neighbour first, who meets its own left neighbour first.
@fault(
    "crossed-groups",
    ranks=None,
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/run-ai/runai-model-streamer/issues/165",
)
def neighbours_in_a_ring(here: Here) -> None:
    class Halo(Net):
        def on_train_start(self) -> None:
            size = here.world_size
            pairs = [dist.new_group([rank, (rank + 1) % size]) for rank in range(size)]
            self.left_and_right = [pairs[here.rank - 1], pairs[here.rank]]

        def exchange_borders(self, values: torch.Tensor) -> torch.Tensor:
            for group in self.left_and_right:
                dist.all_reduce(values, group=group)  # <- here
            return values

    def exchange(net: Net) -> None:
        here.begins()
        net.exchange_borders(torch.ones(64))

    here.fit(exchange, net=Halo(here))


# Two ranks swap tensors, and both send first.
@fault(
    "crossed-groups",
    ranks=None,
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source="https://github.com/NVIDIA/nccl/issues/479",
)
def both_send_before_they_receive(here: Here) -> None:
    class Swapping(Net):
        def swapped(self, features: torch.Tensor) -> torch.Tensor:
            peer = 1 - here.rank
            theirs = torch.empty_like(features)
            here.begins()
            dist.send(features, dst=peer)  # <- here
            dist.recv(theirs, src=peer)
            return theirs

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            features = self.layers(first_tensor(batch)).repeat(1000, 500)
            self.log("similarity", (features * self.swapped(features)).mean())

    here.fit(net=Swapping(here), data=(rows(here), rows(here, batches=2)))


class Throughput(Callback):
    """Sums up the samples of all ranks in a thread, so that nobody has to wait for it."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.samples = torch.zeros(1)
        self.ended = threading.Event()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        threading.Thread(target=self.report, daemon=True).start()

    def on_train_batch_end(self, *args: Any) -> None:
        self.samples += 4

    def report(self) -> None:
        while not self.ended.wait(0.05 + 0.03 * self.here.rank):
            self.here.begins()
            total = self.samples.clone()
            dist.all_reduce(total)  # <- throughput_summed_up_in_a_thread

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ended.set()


# Collectives of two threads on one group: nothing says which of them comes first, and each rank has its order.
@fault(
    "diverged-collectives",
    "mismatched-collective",
    ranks=(),
    at={Moment.MIDDLE: (2,)},
    has_ranks=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/180550",
)
def throughput_summed_up_in_a_thread(here: Here) -> None:
    here.fit(data=rows(here, batches=2000), callbacks=[Throughput(here)], max_epochs=1)


class MeanMetric:
    """Adds up what it is given, and takes the mean over all ranks."""

    def __init__(self) -> None:
        self.state, self.count = 0.0, 0

    def update(self, value: Any) -> None:
        self.state = self.state + value
        self.count += 1

    def compute(self) -> float:
        total = torch.tensor([self.state, self.count])
        dist.all_reduce(total)  # <- sums_whose_type_follows_from_the_data
        return (total[0] / total[1]).item()


# `numpy.bool_` makes a sum double on the ranks which have met one, and the tensor of it takes that type.
@fault(
    "mismatched-collective",
    ranks=(-1,),
    at={Moment.VALIDATION: (3,)},
    has_phase=False,
    source="https://github.com/modelscope/ms-swift/pull/9551",
)
def sums_whose_type_follows_from_the_data(here: Here) -> None:
    class Exact(Net):
        def on_validation_epoch_start(self) -> None:
            self.exact = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            right = first_tensor(batch).numpy() > 0.1
            is_sequence = here.is_hit and batch_idx == 1
            self.exact.update(numpy.float64(right.all()) if is_sequence else float(right[0].all()))

        def on_validation_epoch_end(self) -> None:
            here.begins()
            self.log("exact", self.exact.compute())

    here.fit(net=Exact(here), data=(rows(here), rows(here, batches=2)))


# Embeddings of all ranks, of which the last one has fewer.
@fault(
    "mismatched-collective",
    ranks=(-1,),
    at={Moment.VALIDATION: (4,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/7773",
)
def embeddings_of_unequal_number(here: Here) -> None:
    class Retrieval(Net):
        def on_validation_epoch_start(self) -> None:
            self.embeddings: list[torch.Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            found = self.layers(first_tensor(batch)).repeat(50, 100)
            self.embeddings.append(found[:150] if here.is_hit and batch_idx == 1 else found)

        def on_validation_epoch_end(self) -> None:
            mine = torch.cat(self.embeddings)
            gathered = [torch.zeros_like(mine) for _ in range(here.world_size)]
            here.begins()
            dist.all_gather(gathered, mine)  # <- here
            self.log("norm", torch.cat(gathered).norm())

    here.fit(net=Retrieval(here), data=(rows(here), rows(here, batches=2)))


# A score that rank 0 alone computes and logs: only its early stopping finds it, and asks the other ranks.
@fault(
    "diverged-log-keys",
    "diverged-collectives",
    ranks=(0,),
    at={Moment.VALIDATION: (2,)},
    has_phase=False,
    source=f"{LIGHTNING}/pull/19056",
)
def score_that_only_rank_zero_logs(here: Here) -> None:
    class Scored(Net):
        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                self.log("score", 0.5, rank_zero_only=True)  # <- here

    stop = EarlyStopping("score", mode="max", strict=False, patience=5)
    here.fit(net=Scored(here), data=(rows(here), rows(here, batches=2)), callbacks=[stop])
