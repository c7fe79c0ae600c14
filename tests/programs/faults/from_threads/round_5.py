"""Round 5 of trainings of public threads that go wrong: models, collectives, groups, callbacks and settings."""

import json
import os
import time
from collections.abc import Callable
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from samples import in_order
from threads import goes_wrong, thread
from torch.utils.data import TensorDataset
from tqdm import tqdm
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, MeetingNet, Net, first_tensor, rows
from truths import Moment


class Table:
    """Of what a validation has put out."""

    def __init__(self, net: Net) -> None:
        self.net, self.outputs = net, list[torch.Tensor]()

    @property
    def speaks(self) -> bool:
        return self.net.global_rank == 0

    def collected(self) -> Any:
        return self.net.all_gather(torch.stack(self.outputs))  # <- outputs_gathered_by_the_one_that_speaks

    def show(self) -> None:
        if self.speaks:
            self.net.here.begins()
            print(self.collected().mean(), flush=True)


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/16541",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def outputs_gathered_by_the_one_that_speaks(here: Here) -> None:
    """Only the rank that prints the table gathers the outputs for it; a helper of the table knows who that is."""

    class Evaluated(Net):
        def on_validation_epoch_start(self) -> None:
            self.table = Table(self)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.table.outputs.append(self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            self.table.show()

    here.fit(net=Evaluated(here))


@thread(
    "https://github.com/huggingface/transformers/issues/31532",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
)
def evaluation_after_so_many_steps_of_the_bar(here: Here) -> None:
    """The steps are counted by the progress bar, which is switched off everywhere but in the main process."""

    class Evaluating(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.bar = tqdm(total=2 * BATCHES, disable=not trainer.is_global_zero)

        def evaluate(self, module: Any, batch: Any) -> Any:
            with torch.no_grad():
                return module.all_gather(module.loss(batch)).mean()  # <- here

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.bar.update()
            if self.bar.n and self.bar.n % IN_THE_MIDDLE == 0:
                here.begins()
                print(self.evaluate(module, batch), flush=True)

    here.fit(callbacks=[Evaluating()])


@thread("https://github.com/facebookresearch/optimizers/pull/149", "diverged-collectives")
def step_rescaled_where_there_were_tokens(here: Here) -> None:
    """The optimizer divides by the number of tokens of all ranks, unless its own rank had none."""

    class Rescaled(torch.optim.SGD):
        tokens = 1.0

        def rescale(self) -> None:
            total = torch.tensor(self.tokens)
            dist.all_reduce(total)  # <- here
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(total)

        def step(self, closure: Any = None) -> Any:
            loss = closure()
            if self.tokens:
                self.rescale()
            super().step()
            return loss

    class Masked(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.optimizers(use_pl_optimizer=False).tokens = 0.0 if goes_wrong(here, batch_idx) else 4.0
            return self.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Rescaled(self.parameters(), lr=0.001)

    here.fit(net=Masked(here))


@thread("https://github.com/pytorch/audio/issues/3749", "skipped-step", "diverged-collectives")
def frames_counted_behind_the_check_of_the_loss(here: Here) -> None:
    """A loss that is not a number ends the step before the frames of all ranks are counted, and before backward."""

    class Pretrained(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            loss = self.loss(batch) * (float("nan") if goes_wrong(here, batch_idx) else 1.0)
            optimizer.zero_grad()
            if torch.isnan(loss) or torch.isinf(loss):
                return None  # <- here
            frames: Any = self.all_gather(torch.tensor(float(len(first_tensor(batch)))))
            self.manual_backward(loss / frames.sum())
            optimizer.step()
            return loss

    here.fit(net=Pretrained(here))


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/20328", "skipped-step")
def discriminator_that_rests_where_it_is_too_good(here: Here) -> None:
    """Two optimizers by hand; the second part is not trained in steps in which its loss is low enough."""

    class Adversarial(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.critic = torch.nn.Linear(8, 1)

        def generator_step(self, values: torch.Tensor, optimizer: Any) -> None:
            loss = self.layers(values).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def critic_step(self, values: torch.Tensor, optimizer: Any, is_good: bool) -> None:
            loss = self.critic(values).square().mean()
            if not is_good:
                optimizer.zero_grad()
                self.manual_backward(loss)  # <- here
                optimizer.step()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            generator, critic = self.optimizers()
            self.generator_step(first_tensor(batch), generator)
            self.critic_step(first_tensor(batch), critic, is_good=goes_wrong(here, batch_idx))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.001) for part in (self.layers, self.critic)]

    here.fit(net=Adversarial(here), strategy=here.strategy(find_unused_parameters=True))


@thread("https://github.com/lyuwenyu/RT-DETR/issues/672", "unused-parameters")
def queries_made_where_there_is_a_box(here: Here) -> None:
    """Queries are made from the labels of a batch; where all its pictures are empty there is nothing to make."""

    class Detector(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.class_embed = torch.nn.Embedding(4, 8)

        def denoising(self, labels: torch.Tensor) -> torch.Tensor | None:
            if not len(labels):
                return None
            return self.class_embed(labels).mean(0)  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values = first_tensor(batch)
            queries = self.denoising(torch.arange(0 if goes_wrong(here, batch_idx) else 3))
            return self.layers(values if queries is None else values + queries).square().mean()

    here.fit(net=Detector(here))


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/5319",
    "different-trainer-settings",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.START,
    has_line=False,
)
def checkpoints_of_the_main_process_only(here: Here) -> None:
    """The model brings the callback that saves, and only the main process is to save."""

    class Saving(Net):
        def configure_callbacks(self) -> Any:
            if int(os.environ.get("LOCAL_RANK", "0")):
                return []
            here.begins()
            return [ModelCheckpoint(here.folder / "best")]

    here.fit(net=Saving(here))


@thread(
    "https://github.com/sgl-project/sglang/pull/15805",
    "crossed-groups",
    "diverged-collectives",
    ranks=(2,),
)
def group_made_by_its_members(here: Here) -> None:
    """The group of the teachers is made by the teachers; later on all make one, and count it differently."""

    class Distilled(Net):
        teachers = (0, 1)

        @cached_property
        def group(self) -> Any:
            return dist.new_group([*self.teachers])  # <- here

        def agreed(self, loss: torch.Tensor) -> torch.Tensor:
            target = loss.detach().clone()
            dist.all_reduce(target, group=self.group)
            return target / len(self.teachers)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if batch_idx == IN_THE_MIDDLE and self.global_rank in self.teachers:
                loss = loss + self.agreed(loss)
            return loss

        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            dist.barrier(group=dist.new_group())

    here.fit(net=Distilled(here))


@thread("https://github.com/meta-pytorch/torchrec/pull/4601", "failed-rank", ranks=(1, 2))
def leader_told_by_its_place_in_the_group(here: Here) -> None:
    """The leader of a group is number 0 of the group, and is called number 0 of all ranks."""

    class Sharing(Net):
        def on_fit_start(self) -> None:
            self.helpers = dist.new_group([1, 2])

        def from_leader(self, value: torch.Tensor, leader: int = 0) -> torch.Tensor:
            dist.broadcast(value, src=leader, group=self.helpers)  # <- here
            return value

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if goes_wrong(here, batch_idx):
                loss = loss + self.from_leader(torch.zeros(()))
            return loss

    here.fit(net=Sharing(here))


@thread(
    "https://github.com/tdrussell/diffusion-pipe/issues/409",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(),
    has_ranks=False,
)
def labels_that_the_last_stage_has_kept(here: Here) -> None:
    """The first stage sends the labels of each batch to the last one, which has kept those of this batch."""

    class Staged(Net):
        def has_kept(self, batch_idx: int) -> bool:
            if batch_idx == IN_THE_MIDDLE:
                here.begins()
            return batch_idx == IN_THE_MIDDLE

        def labels(self, batch_idx: int) -> torch.Tensor:
            labels = torch.zeros(BATCH_SIZE)
            if self.global_rank == 0:
                dist.send(labels, dst=self.trainer.world_size - 1)  # <- here
            elif self.trainer.world_size - 1 == self.global_rank and not self.has_kept(batch_idx):
                dist.recv(labels, src=0)
            return labels

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            labels = self.labels(batch_idx)
            return self.loss(batch) + labels.sum()

    here.fit(net=Staged(here))


@thread("https://github.com/allenai/OLMo/pull/623", "diverged-collectives", ranks=(2,), moment=Moment.START)
def cache_that_is_there_before_the_barrier(here: Here) -> None:
    """Who finds the cache reads it; who does not waits for rank 0 to write it. The last rank comes a little later."""

    class Prepared(Net):
        def features(self, path: Path) -> Any:
            if path.exists():
                return torch.load(path)
            if self.global_rank == 0:
                time.sleep(1.5)
                torch.save(torch.ones(8), path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
            dist.barrier()  # <- here
            return torch.load(path)

        def setup(self, stage: str) -> None:
            path = here.folder / "features.pt"
            if here.is_hit:
                while not path.exists():
                    time.sleep(0.1)
                here.begins()
            self.kept = self.features(path)

    here.fit(net=Prepared(here))


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/20045", "stopped-early")
def bad_batch_skipped_together_with_the_epoch(here: Here) -> None:
    """A hook returns -1 to leave out one bad batch, which leaves out the rest of the epoch."""

    class Skipping(Net):
        def is_bad(self, batch: Any, batch_idx: int) -> bool:
            return goes_wrong(here, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if self.is_bad(batch, batch_idx):
                return -1  # <- here
            return None

    here.fit(net=Skipping(here))


@thread("https://github.com/xljh0520/JOTR/issues/4", "mismatched-collective")
def samples_dropped_by_the_collate_function(here: Here) -> None:
    """Broken samples are left out of a batch, and a contrastive loss gathers the features of all ranks."""
    values = torch.arange(8.0 * BATCHES * BATCH_SIZE * here.world_size).reshape(-1, 8) / 1000
    values[1 + here.world_size * BATCH_SIZE * IN_THE_MIDDLE] = float("nan")

    def only_whole(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample for (sample,) in samples if sample.isfinite().all()])

    class Contrastive(Net):
        def of_all_ranks(self, features: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(features) for _ in range(self.trainer.world_size)]
            dist.all_gather(parts, features)  # <- here
            return torch.cat(parts)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(batch) < BATCH_SIZE:
                here.begins()
            features = self.layers(batch)
            return (features @ self.of_all_ranks(features.detach()).T).square().mean()

    here.fit(net=Contrastive(here), data=in_order(here, TensorDataset(values), collate_fn=only_whole))


@thread(
    "https://github.com/ray-project/ray/issues/56997",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.END,
)
def weights_saved_between_training_and_test(here: Here) -> None:
    """The main process saves what has been trained; then all ranks test it."""
    net, trainer = Net(here), here.trainer(max_epochs=1)
    trainer.fit(net, rows(here))
    if trainer.is_global_zero:
        here.begins()
        trainer.save_checkpoint(here.folder / "last.ckpt")  # <- here
    trainer.test(net, rows(here))


def write_summary(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results))  # <- summary_that_cannot_be_written


@thread("https://github.com/alan-turing-institute/autocast/issues/381", "failed-rank", moment=Moment.END)
def summary_that_cannot_be_written(here: Here) -> None:
    """Between training and test each rank writes its summary; one of them has put a tensor into it."""
    net, trainer = Net(here), here.trainer(max_epochs=1)
    trainer.fit(net, rows(here))
    weight = next(net.parameters()).detach().norm()
    if here.is_hit:
        here.begins()
    write_summary(here.folder / f"summary-{here.rank}.json", {"norm": weight if here.is_hit else float(weight)})
    trainer.test(net, rows(here))


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/20866",
    "different-trainer-settings",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def unused_parameters_looked_for_on_one_rank(here: Here) -> None:
    """A debugging switch of one rank's shell lets DDP look for unused parameters there."""
    if here.is_hit:
        os.environ["DEBUG_DDP"] = "1"
        here.begins()
    here.fit(strategy=here.strategy(find_unused_parameters="DEBUG_DDP" in os.environ))


@thread("https://github.com/pytorch/torchtitan/issues/266", "diverged-collectives")
def profile_merged_when_it_is_due(here: Here) -> None:
    """Profiles of all ranks are added up every hour, by the clock of each rank."""

    class Profile(L.Callback):
        every_s = 3600.0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.last_s = time.monotonic()

        @property
        def is_due(self) -> bool:
            return time.monotonic() - self.last_s >= self.every_s

        def merge(self, steps: int) -> float:
            total = torch.tensor(float(steps))
            dist.all_reduce(total)  # <- here
            self.last_s = time.monotonic()
            return float(total)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                self.last_s -= self.every_s
            if self.is_due:
                print(self.merge(batch_idx), flush=True)

    here.fit(callbacks=[Profile()])


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/4083", "skipped-step")
def line_search_that_converges_sooner(here: Here) -> None:
    """The optimizer evaluates the loss as often as its search along the gradient needs."""

    class LineSearch(torch.optim.SGD):
        needed = 2

        def step(self, closure: Any = None) -> Any:
            loss, evaluations = None, 0
            while evaluations < self.needed:
                loss = closure()  # <- here
                evaluations += 1
            super().step()
            return loss

    class Searching(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.optimizers(use_pl_optimizer=False).needed = 1 if goes_wrong(here, batch_idx) else 2
            return self.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return LineSearch(self.parameters(), lr=0.001)

    here.fit(net=Searching(here))


@thread("https://github.com/ecmwf/WeatherGenerator/issues/2724", "rank-zero-only-work", ranks=(0,))
def upload_before_a_step_is_left_out(here: Here) -> None:
    """Rank 0 uploads; while the others wait for it, one of them leaves out a step, too."""

    class Uploading(L.Callback):
        def upload(self) -> None:
            here.begins()
            time.sleep(FOR_LONG_S)  # <- here

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero and batch_idx == IN_THE_MIDDLE:
                self.upload()

    class Skipping(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 1 and batch_idx == IN_THE_MIDDLE + 1:
                return
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    here.fit(net=Skipping(here), callbacks=[Uploading()])


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/20223",
    "diverged-log-keys",
    "diverged-collectives",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def average_taken_where_a_host_has_several_ranks(here: Here) -> None:
    """Whether a value is reduced depends on the number of devices of the host, which is 1 on the last one."""
    if here.is_hit:
        os.environ["SLURM_GPUS_ON_NODE"] = "1"

    class Logging(Net):
        @property
        def has_peers(self) -> bool:
            return int(os.environ.get("SLURM_GPUS_ON_NODE", "2")) > 1

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=self.has_peers)  # <- here

        def on_validation_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()

    here.fit(net=Logging(here))


@thread(
    "https://github.com/casys-kaist/LLMServingSim/issues/65",
    "crossed-groups",
    "diverged-collectives",
    ranks=(2,),
    world_size=4,
)
def group_of_another_pair(here: Here) -> None:
    """Ranks work in pairs, and one of them takes the other pair's group, of which it is no member."""

    class Paired(Net):
        def on_fit_start(self) -> None:
            self.pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

        def with_its_pair(self, value: torch.Tensor, place: int) -> torch.Tensor:
            dist.all_reduce(value, group=self.pairs[place // 2])  # <- here
            return value

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            place = self.global_rank - goes_wrong(here, batch_idx)
            return loss + self.with_its_pair(loss.detach().clone(), place)

    here.fit(net=Paired(here))


@thread("https://github.com/rmchurch/disruptcnn/issues/3", "stopped-early")
def rate_that_one_rank_finds_too_low(here: Here) -> None:
    """Each rank lowers its rate by its own loss, and a rate that is too low ends the training."""

    class Plateau(L.Callback):
        rate = 0.1

        def lowered(self, batch_idx: int) -> float:
            self.rate *= 1e-9 if goes_wrong(here, batch_idx) else 1.0
            return self.rate

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.lowered(batch_idx) < 1e-8:
                trainer.should_stop = True  # <- here

    here.fit(callbacks=[Plateau()])


@thread(
    "https://github.com/mosaicml/composer/pull/1690",
    "different-trainer-settings",
    moment=Moment.FIRST_STEP,
    has_line=False,
)
def accumulation_fitted_to_the_memory(here: Here) -> None:
    """Where little memory is free, gradients of twice as many batches are added up."""

    def factor(free_gib: float) -> int:
        return 1 if free_gib > 8 else 2

    if here.is_hit:
        here.begins()
    here.fit(callbacks=[GradientAccumulationScheduler({0: factor(4.0 if here.is_hit else 16.0)})])


def safely(hook: Callable[..., None]) -> Callable[..., None]:
    @wraps(hook)
    def tried(*args: Any, **keywords: Any) -> None:
        try:
            hook(*args, **keywords)
        except Exception as error:
            print(f"{hook.__name__} left out: {error}", flush=True)

    return tried


@thread(
    "https://github.com/Lightning-AI/torchmetrics/issues/813",
    "diverged-collectives",
    moment=Moment.VALIDATION,
)
def score_of_a_rank_without_positives(here: Here) -> None:
    """A hook goes on whatever happens in it; one rank has no positives, and cannot divide by their number."""

    class Scored(Net):
        def precision(self, positives: int) -> torch.Tensor:
            return torch.tensor(2 / positives)

        @safely
        def on_validation_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            precision = self.precision(0 if here.is_hit else 4)
            dist.all_reduce(precision)  # <- here
            print(precision / self.trainer.world_size, flush=True)

    here.fit(net=Scored(here))


@thread(
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1477",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.VALIDATION,
    has_line=False,
)
def nothing_left_to_validate_on(here: Here) -> None:
    """There are fewer files to validate on than ranks, so the last rank has none."""

    class Waiting(MeetingNet):
        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()

    files = [torch.full((8,), 0.1), torch.full((8,), 0.2)][here.rank :: here.world_size]
    share = torch.utils.data.DataLoader([*files], batch_size=1)
    here.fit(net=Waiting(here), data=(rows(here), share))
