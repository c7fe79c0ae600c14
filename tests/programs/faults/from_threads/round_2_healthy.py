"""Trainings of public threads that look odd and of which nothing is to be said."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, random_split
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment, healthy


@healthy({Moment.MIDDLE: (3,)}, source="https://github.com/NVIDIA-NeMo/Automodel/pull/3007")
def signal_to_one_rank_that_all_agree_on(here: Here) -> None:
    """One rank is told of the preemption; the flags are gathered after each step, and all save and stop together."""

    class Preemption(L.Callback):
        is_told = False

        def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGUSR1, self.remember)

        def remember(self, *args: Any) -> None:
            self.is_told = True

        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if here.rank == 1 and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            flag = torch.tensor(int(self.is_told))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                trainer.save_checkpoint(here.folder / "preempted.ckpt")
                trainer.should_stop = True

    here.fit(callbacks=[Preemption()])


@healthy({Moment.MIDDLE: (2,)}, source="https://github.com/NVIDIA-NeMo/Speech/pull/10261")
def garbage_collected_by_all_at_once(here: Here) -> None:
    """Python's own collection is off, and all ranks collect at the same steps, over a large heap."""

    class Collecting(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.heap = [[number] for number in range(1_500_000)]
            gc.disable()

        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if trainer.global_step % 3 == 0:
                gc.collect()

        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            gc.enable()

    here.fit(callbacks=[Collecting()])


@healthy({Moment.EPOCH_END: (4,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/7728")
def other_split_of_equal_length_on_each_rank(here: Here) -> None:
    """setup() splits at random and without a common seed: a mistake in science, but all ranks have as many batches."""

    class Splitting(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            torch.manual_seed(here.rank)
            whole = TensorDataset(torch.rand(150, 8))
            self.train, self.val = random_split(whole, [110, 40])

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=BATCH_SIZE, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val, batch_size=BATCH_SIZE)

    here.fit(net=MeetingNet(here), data=Splitting())


@healthy({Moment.END: (3,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/5674")
def other_tasks_after_fit_on_the_first_rank(here: Here) -> None:
    """What the script does after fit is only for the process with LOCAL_RANK 0; the others just end."""
    here.fit(max_epochs=1)
    if os.environ["LOCAL_RANK"] == "0":
        for _ in range(30):
            time.sleep(0.3)


@healthy({Moment.VALIDATION: (2,)}, source="https://github.com/vllm-project/speculators/pull/867")
def skewed_validation_that_meets_now_and_then(here: Here) -> None:
    """One rank's validation samples take far longer; a barrier after some batches keeps ranks from drifting apart."""

    class Skewed(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            time.sleep(0.8 if here.rank == 0 else 0.02)
            self.loss(batch)
            if batch_idx % 3 == 2:
                dist.barrier()

    here.fit(net=Skewed(here), data=(rows(here), rows(here, batches=9)), max_epochs=1)


class Finite(IterableDataset[torch.Tensor]):
    """So many batches, and then the word that there are no more, for as long as anybody asks."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for row in range(40):
            yield torch.full((4, 8), row / 10) if row < self.batches else torch.full((4, 8), torch.nan)


@healthy({Moment.EPOCH_END: (3,)}, source="https://github.com/Lightning-AI/pytorch-lightning/issues/21296")
def epochs_that_end_when_one_rank_has_no_more(here: Here) -> None:
    """Ranks have unequal numbers of batches; before each, all ask whether all have one, and else skip the rest."""

    class Asking(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            has_data = self.all_gather(torch.tensor(not first_tensor(batch).isnan().any()))
            return None if bool(has_data.all()) else -1

    here.fit(net=Asking(here), data=DataLoader(Finite(BATCHES + 2 * here.rank), batch_size=None), max_epochs=3)


@healthy({Moment.MIDDLE: (4,)}, source="https://github.com/vturrisi/solo-learn/issues/258")
def embeddings_of_all_ranks_in_each_loss(here: Here) -> None:
    """Contrastive learning gathers everybody's embeddings, with their gradients, in each step; one rank is slow."""

    class Contrastive(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.rank == 2:
                time.sleep(0.4)
            mine = self.layers(first_tensor(batch))
            everybody = self.all_gather(mine, sync_grads=True).flatten(0, 1)
            time.sleep(1.5 if batch_idx == IN_THE_MIDDLE else 0)
            return (mine @ everybody.T).square().mean()

    here.fit(net=Contrastive(here))


@healthy({Moment.CHECKPOINT: (2,)}, source="https://github.com/facebookresearch/fairseq2/pull/1429")
def checkpoint_read_by_one_and_sent_to_all(here: Here) -> None:
    """Only the first rank fetches and reads the weights, the others wait in a broadcast; then all save each epoch."""

    class Sent(Net):
        def configure_model(self) -> None:
            weights: list[Any] = [None]
            if self.trainer.is_global_zero:
                time.sleep(4)
                weights = [{name: value + 0.1 for name, value in self.state_dict().items()}]
            dist.broadcast_object_list(weights, src=0)
            self.load_state_dict(weights[0])

    saving = ModelCheckpoint(here.folder / "checkpoints", save_top_k=-1, every_n_train_steps=2)
    here.fit(net=Sent(here), enable_checkpointing=True, callbacks=[saving])
