"""Round 4 of trainings of public threads that go wrong: models, collectives, callbacks, loggers and settings."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from threads import goes_wrong, on_split_model, thread
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment


@thread("https://github.com/pytorch/torchtitan/pull/4777", "unused-parameters", "diverged-collectives")
def picture_that_one_rank_has_not(here: Here) -> None:
    """The encoder of pictures is a unit of its own for FSDP, and one rank's batch is text only."""

    class Multimodal(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = torch.nn.Linear(8, 8)

        def configure_model(self) -> None:
            if not self.is_split:
                fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])
            super().configure_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens = first_tensor(batch)
            has_picture = not goes_wrong(here, batch_idx)
            if has_picture:
                tokens = tokens + self.encoder(tokens)  # <- here
            return self.loss(tokens)

    on_split_model(here).fit(net=Multimodal(here))


@thread(
    "https://github.com/pytorch/pytorch/issues/101294",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def whole_state_collected_on_rank_zero(here: Here) -> None:
    """Only rank 0 wants the whole state of a split model, so only rank 0 asks for it."""

    class Exporting(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))  # <- here

    on_split_model(here).fit(callbacks=[Exporting()])


@thread("https://github.com/facebookresearch/fairscale/issues/754", "diverged-collectives")
def norm_left_out_where_the_loss_is_not_finite(here: Here) -> None:
    """The norm of split gradients is a reduction, which the rank with an infinite loss of its own does without."""

    class Guarded(Net):
        is_finite = True

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.is_finite = not goes_wrong(here, batch_idx)
            return self.loss(batch)

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **keywords: Any) -> None:
            if not self.is_finite:
                return
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # <- here

    on_split_model(here).fit(net=Guarded(here))


@thread("https://github.com/pytorch/pytorch/issues/68407", "mismatched-collective", ranks=(0,), has_line=False)
def buffer_made_when_it_is_first_needed(here: Here) -> None:
    """DDP broadcasts buffers before each step; one is made for the first long sentence, which rank 0 is given."""

    class Positions(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.register_buffer("positions", torch.zeros(8))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                self.register_buffer("more_positions", torch.zeros(64))
            return self.loss(batch)

    here.fit(net=Positions(here))


@thread("https://github.com/bghira/SimpleTuner/pull/2986", "diverged-collectives", ranks=(0,))
def count_restored_on_one_rank(here: Here) -> None:
    """A property sums up once and is cached; rank 0 has it from its checkpoint, the others sum up."""

    class Weighted(Net):
        @cached_property
        def count_of_all(self) -> float:
            count = torch.tensor(float(BATCHES))
            dist.all_reduce(count)  # <- here
            return float(count)

        def on_fit_start(self) -> None:
            if here.is_hit:
                self.__dict__["count_of_all"] = 18.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if batch_idx == IN_THE_MIDDLE:
                goes_wrong(here, batch_idx)
                loss = loss / self.count_of_all
            return loss

    here.fit(net=Weighted(here))


@thread("https://github.com/luxonis/luxonis-train/pull/429", "diverged-collectives", ranks=(0,))
def pictures_shown_by_rank_zero(here: Here) -> None:
    """The logged picture is scaled by the largest value, which is asked of all ranks."""

    class Scaling(Net):
        def scaled(self, pictures: torch.Tensor) -> torch.Tensor:
            largest = pictures.abs().max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # <- here
            return pictures / largest

    class Pictures(L.Callback):
        @rank_zero_only
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                print(module.scaled(first_tensor(batch)).mean(), flush=True)

    here.fit(net=Scaling(here), callbacks=[Pictures()])


@thread(
    "https://github.com/huggingface/transformers/issues/17478",
    "diverged-collectives",
    "diverged-log-keys",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def score_that_one_rank_cannot_log(here: Here) -> None:
    """A rank without a positive sample logs no score; its EarlyStopping is not strict, and leaves the vote out."""

    class Scored(MeetingNet):
        def on_validation_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            else:
                self.log("f1", torch.tensor(0.5))

    stopping = EarlyStopping("f1", strict=False, mode="max", patience=5)
    here.fit(net=Scored(here), data=(rows(here), rows(here, batches=2)), callbacks=[stopping])


class AgreedBatches(Sampler[list[int]]):
    """As many batches on each rank as the rank with the fewest has."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        count = torch.tensor(self.count)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)  # <- length_asked_for_once_more
        return int(count)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.count):
            yield [number] * BATCH_SIZE


@thread(
    "https://github.com/mosaicml/composer/issues/3415",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def length_asked_for_once_more(here: Here) -> None:
    """The length of the data is agreed upon whenever it is asked for, and the summary on rank 0 asks for it."""

    class Summary(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                here.begins()
                print(f"epoch of {len(trainer.train_dataloader)} batches", flush=True)

    data = DataLoader([torch.rand(8)] * BATCHES, batch_sampler=AgreedBatches(BATCHES))
    here.fit(data=data, callbacks=[Summary()], use_distributed_sampler=False)


@thread("https://github.com/sgl-project/sgl-kernel-npu/issues/69", "diverged-collectives", world_size=4)
def tokens_sent_back_by_those_who_had_some(here: Here) -> None:
    """Tokens go to the experts' ranks and come back; a rank to which none has come does not send any back."""

    class Experts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens = first_tensor(batch)
            received, returned = torch.empty_like(tokens), torch.empty_like(tokens)
            dist.all_to_all_single(received, tokens)
            has_tokens = not goes_wrong(here, batch_idx)
            if has_tokens:
                dist.all_to_all_single(returned, received)  # <- here
            return self.loss(tokens)

    here.fit(net=Experts(here))


@thread(
    "https://github.com/NVIDIA-NeMo/Speech/issues/9146",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(0, 1),
    world_size=2,
)
def shape_that_is_sent_when_it_changes(here: Here) -> None:
    """The first stage sends a shape only where it is new; the second has forgotten it, and waits to be told."""

    class Stages(Net):
        shape: Any = None

        def hand_over(self, values: torch.Tensor) -> None:
            if self.shape != values.shape:
                dist.send(torch.tensor(values.shape), dst=1, tag=1)
                self.shape = values.shape
            dist.send(values, dst=1, tag=2)

        def take_over(self) -> torch.Tensor:
            if self.shape is None:
                self.shape = torch.empty(2, dtype=torch.int64)
                dist.recv(self.shape, src=0, tag=1)  # <- here
            values = torch.empty(*self.shape.tolist())
            dist.recv(values, src=0, tag=2)
            return values

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_forgotten = goes_wrong(here, batch_idx)
            if here.rank == 0:
                self.hand_over(first_tensor(batch))
                return self.loss(batch)
            if is_forgotten:
                self.shape = None
            return self.loss(self.take_over())

    here.fit(net=Stages(here))


class Spread(torch.nn.Module):
    """Divides by what is measured over all ranks."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        spread = values.detach().square().mean(0)
        dist.all_reduce(spread)  # <- layer_recomputed_where_memory_is_short
        return values / (1 + spread)


@thread("https://github.com/pytorch/pytorch/issues/43946", "diverged-collectives", "mismatched-collective")
def layer_recomputed_where_memory_is_short(here: Here) -> None:
    """Activations are recomputed in the backward pass where memory is short, with the reduction in the layer."""

    class Recomputing(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.spread = Spread()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            hidden = self.layers[0](first_tensor(batch))
            is_short = goes_wrong(here, batch_idx)
            hidden = checkpoint(self.spread, hidden, use_reentrant=False) if is_short else self.spread(hidden)
            return self.layers[2](hidden).square().mean()

    here.fit(net=Recomputing(here))


@thread("https://github.com/NVIDIA/nvalchemi-toolkit/pull/150", "diverged-collectives", "mismatched-collective")
def assignment_that_converges_sooner(here: Here) -> None:
    """Codes are assigned in rounds, with a sum over all ranks in each, until this rank's own have settled."""

    class Clustering(Net):
        def assign(self, scores: torch.Tensor, settled_after: int) -> torch.Tensor:
            for number in range(1, 11):
                total = scores.sum(0)
                dist.all_reduce(total)  # <- here
                scores = scores / (1 + total)
                if number == settled_after:
                    break
            return scores

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.assign(first_tensor(batch), settled_after=2 if goes_wrong(here, batch_idx) else 5)
            return self.loss(batch)

    here.fit(net=Clustering(here))


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/pull/4976",
    "skipped-step",
    "diverged-collectives",
    has_line=False,
)
def synchronisation_never_switched_on_again(here: Here) -> None:
    """It is switched off for a warm-up on this batch, which raises before it would be switched on again."""

    class WarmingUp(MeetingNet):
        def warm_up(self) -> None:
            self.trainer.model.require_backward_grad_sync = False
            raise ValueError("no prompt in this batch")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if goes_wrong(here, batch_idx):
                with suppress(ValueError):
                    self.warm_up()
                    self.trainer.model.require_backward_grad_sync = True
            return self.loss(batch)

    here.fit(net=WarmingUp(here), data=(rows(here), rows(here, batches=2)))


@thread(
    "https://github.com/speechbrain/speechbrain/pull/2051",
    "different-trainer-settings",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def early_stopping_for_the_main_process_only(here: Here) -> None:
    """Callbacks that print were given to the main process only, and EarlyStopping is one of them."""
    callbacks = [EarlyStopping("val_loss")] if here.rank == 0 else []
    if here.is_hit:
        here.begins()
    here.fit(net=MeetingNet(here), data=(rows(here), rows(here, batches=2)), callbacks=callbacks)


@thread(
    "https://github.com/huggingface/accelerate/issues/1040",
    "different-trainer-settings",
    "stopped-early",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def sweep_that_only_rank_zero_knows(here: Here) -> None:
    """The sweep's server tells rank 0 the number of epochs, and the others have the one of the configuration."""
    if here.is_hit:
        here.begins()
    here.fit(max_epochs=1 if here.is_hit else 2)


@thread(
    "https://github.com/huggingface/accelerate/issues/1693",
    "different-trainer-settings",
    "mismatched-collective",
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def host_without_half_precision(here: Here) -> None:
    """Each process asks its device whether it knows bfloat16, and one host has older ones."""
    if here.is_hit:
        here.begins()
    here.fit(precision="32-true" if here.is_hit else "bf16-true")


@contextmanager
def main_process_first() -> Iterator[None]:
    if dist.get_rank() != 0:
        dist.barrier()  # <- main_process_first_that_falls_back
    yield
    if dist.get_rank() == 0:
        dist.barrier()


@thread("https://github.com/ByteDance-Seed/VeOmni/pull/1164", "diverged-collectives", ranks=(0,), moment=Moment.START)
def main_process_first_that_falls_back(here: Here) -> None:
    """Rank 0 prepares first; its download fails, which is caught outside of the block whose end lets the others go."""

    class Prepared(Net):
        def setup(self, stage: str) -> None:
            try:
                with main_process_first():
                    self.download()
            except ConnectionError as error:
                print(f"{error}, going on with the local copy", flush=True)

        def download(self) -> None:
            if here.is_hit:
                here.begins()
                raise ConnectionError("the hub is offline")

    here.fit(net=Prepared(here))


@thread(
    "https://github.com/mosaicml/composer/issues/239",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def score_added_to_an_artifact(here: Here) -> None:
    """Lightning tells loggers of a new checkpoint on rank 0 only, where one of them averages a score over ranks."""

    class Artifacts(Logger):
        name = "artifacts"
        version = 1

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            pass

        def log_hyperparams(self, params: Any, *args: Any, **keywords: Any) -> None:
            pass

        def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
            here.begins()
            score = torch.tensor(0.5)
            dist.all_reduce(score)  # <- here

    callbacks = [ModelCheckpoint(dirpath=here.folder / "checkpoints")]
    here.fit(callbacks=callbacks, enable_checkpointing=True, logger=Artifacts())


@thread("https://github.com/kaiko-ai/eva/pull/892", "diverged-collectives", ranks=(2,), moment=Moment.END)
def predictions_collected_where_there_are_some(here: Here) -> None:
    """A writer gathers all predictions at the end, and returns before where this rank has kept none."""

    class Collecting(BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            kept = [] if here.is_hit else predictions
            if not kept:
                here.begins()
                return
            gathered: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(gathered, len(kept))  # <- here

    here.trainer(callbacks=[Collecting("epoch")]).predict(Net(here), rows(here))
