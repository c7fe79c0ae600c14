"""Round 10 after public threads: loops of reinforcement learning, evaluation, samplers, groups and manual steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
from training import BATCH_SIZE, BATCHES, IN_THE_MIDDLE, Here, LoggingNet, MeetingNet, Net, first_tensor, rows
from truths import Moment

Change = Callable[[torch.Tensor], torch.Tensor]


class Samples(Dataset[torch.Tensor]):
    """Read in order; those of one batch, in the share of one rank, are not as the others are."""

    def __init__(self, here: Here, unusual: Change, usual: Change = lambda row: row, rank: int | None = None) -> None:
        self.here, self.unusual, self.usual = here, unusual, usual
        self.ranks = here.case.ranks if rank is None else (rank,)

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.arange(1.0, 9.0) / 8 + index / len(self)
        turn, rank = divmod(index, self.here.world_size)
        if rank not in self.ranks or turn // BATCH_SIZE != IN_THE_MIDDLE:
            return self.usual(row)
        return self.unusual(row)


class Proximal(Net):
    """Goes through each rollout several times, in minibatches, as long as the policy stays near to what it was."""

    target_kl = 0.02
    ppo_epochs = 3
    minibatch_size = 2

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def log_probabilities(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(states).log_softmax(-1)
        return result

    def advantages(self, states: torch.Tensor) -> torch.Tensor:
        rewards = states.std(1)
        everybodys: Any = self.all_gather(rewards)
        return (rewards - everybodys.mean()) / (everybodys.std() + 1e-6)

    def update(self, states: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> None:
        optimizer: Any = self.optimizers()
        new = self.log_probabilities(states)
        ratio = (new - old)[:, 0].exp().clamp(0.8, 1.2)
        entropy = -(new.exp() * new).sum(-1)
        optimizer.zero_grad()
        self.manual_backward(-(ratio * advantages).mean() - 0.01 * entropy.mean())
        optimizer.step()

    @torch.no_grad()
    def divergence(self, states: torch.Tensor, old: torch.Tensor) -> float:
        return float((old.exp() * (old - self.log_probabilities(states))).sum(-1).mean())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            old = self.log_probabilities(batch)
        advantages = self.advantages(batch)
        stop = False
        for _ in range(self.ppo_epochs):
            for first in range(0, len(batch), self.minibatch_size):
                part = slice(first, first + self.minibatch_size)
                if self.divergence(batch[part], old[part]) > 1.5 * self.target_kl:
                    self.here.begins()
                    stop = True
                    break  # <- policy_that_has_gone_too_far_on_one_rank
                self.update(batch[part], old[part], advantages[part])
            if stop:
                break


@thread(
    "https://github.com/huggingface/trl/pull/254",
    "skipped-step",
    "diverged-collectives",
    ranks=(2,),
)
def policy_that_has_gone_too_far_on_one_rank(here: Here) -> None:
    """Each rank stops to learn from a rollout when its own divergence becomes too large."""
    L.seed_everything(1)
    far = in_order(here, Samples(here, lambda row: 10 * row))
    here.fit(net=Proximal(here), data=far)


class Teacher(torch.nn.Module):
    """Has so many classes, and a domain that it knows best; its outputs are centred over all ranks."""

    center: torch.Tensor
    head: torch.Tensor

    def __init__(self, classes: int, domain: float) -> None:
        super().__init__()
        self.domain = domain
        self.register_buffer("head", torch.linspace(-1, 1, 8 * classes).reshape(8, classes))
        self.register_buffer("readout", torch.linspace(-1, 1, 2 * classes).reshape(2, classes))
        self.register_buffer("center", torch.zeros(classes))

    def score(self, values: torch.Tensor) -> float:
        return float((values.mean() - self.domain).abs())

    @torch.no_grad()
    def targets(self, values: torch.Tensor) -> torch.Tensor:
        logits = values @ self.head
        mean = logits.mean(0)
        dist.all_reduce(mean)  # <- teacher_that_suits_the_batch_of_a_rank
        self.center = 0.9 * self.center + 0.1 * mean / dist.get_world_size()
        return (logits - self.center).softmax(-1)


class Student(Net):
    """Learns from that one of its teachers which does best on a batch."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.teachers = torch.nn.ModuleList([Teacher(200, domain=1.0), Teacher(3000, domain=-1.0)])

    def best(self, values: torch.Tensor) -> Teacher:
        teachers: Any = self.teachers
        scores = [teacher.score(values) for teacher in teachers]
        chosen: Teacher = teachers[min(range(len(scores)), key=scores.__getitem__)]
        return chosen

    def loss(self, batch: Any) -> torch.Tensor:
        values = first_tensor(batch)
        teacher: Any = self.best(values)
        logits = self.layers(values) @ teacher.readout
        if values.max() < 0:
            self.here.begins()
        return torch.nn.functional.cross_entropy(logits, teacher.targets(values))


@thread(
    "https://github.com/NVIDIA-NeMo/RL/pull/2797",
    "mismatched-collective",
    ranks=(3,),
    world_size=4,
)
def teacher_that_suits_the_batch_of_a_rank(here: Here) -> None:
    """Each rank takes the teacher that scores best on its own batch; the two have vocabularies of unequal size."""
    here.fit(net=Student(here), data=in_order(here, Samples(here, lambda row: -row)))


class Snapshots(L.Callback):
    """Every rank writes its part of what is to be kept, and the first puts the parts together to one file."""

    bytes_per_s = 20.0

    def __init__(self, here: Here, every: int) -> None:
        self.here, self.every = here, every

    def put_together(self, folder: Path) -> None:
        state: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("part-*.pt")):
            time.sleep(path.stat().st_size / self.bytes_per_s)  # <- parts_read_by_the_first_rank_alone
            state |= torch.load(path)
        torch.save(state, folder / "snapshot.pt")

    def snapshot(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        own = [*module.named_parameters()][trainer.global_rank :: trainer.world_size]
        torch.save({name: values.data for name, values in own}, self.here.folder / f"part-{trainer.global_rank}.pt")
        trainer.strategy.barrier("parts written")
        if not trainer.is_global_zero:
            return
        self.here.begins()
        self.put_together(self.here.folder)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            self.snapshot(trainer, module)


@thread(
    "https://github.com/goodfire-ai/spd/pull/536",
    "rank-zero-only-work",
    "slow-checkpoint",
    ranks=(0,),
)
def parts_read_by_the_first_rank_alone(here: Here) -> None:
    """There is a barrier behind the writing of the parts, and none behind the reading."""
    here.fit(net=LoggingNet(here), callbacks=[Snapshots(here, every=4)])


class Benchmark:
    """Tasks of which each rank answers a share; those whose answers cannot be scored are left out of the results."""

    tasks = ("mmmu", "chartqa", "docvqa")

    def __init__(self, here: Here, net: Net) -> None:
        self.here, self.net = here, net

    def answer(self, task: str, number: int) -> str:
        value = float(self.net.layers(torch.full((8,), number / 10)).sum())
        if task == "chartqa" and self.here.is_hit and number == 3:
            self.here.begins()
            return "about 5 %"
        return f"{value:.2f}"

    @torch.no_grad()
    def evaluate(self, task: str) -> float:
        answers = [self.answer(task, number) for number in range(6)]
        scores = [abs(float(answer)) for answer in answers]
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, scores)
        return sum(map(sum, everybodys)) / sum(map(len, everybodys))

    def run(self) -> dict[str, float]:
        results = {}
        for task in self.tasks:
            try:
                results[task] = self.evaluate(task)
            except Exception as error:
                print(f"{task} could not be evaluated: {error}", flush=True)
        return results


@thread(
    "https://github.com/EvolvingLMMs-Lab/lmms-eval/pull/1304",
    "diverged-collectives",
    ranks=(1,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def task_that_one_rank_gives_up(here: Here) -> None:
    """An answer cannot be scored; its rank goes on with the next task, and gathers for that with the others."""

    class Evaluated(Net):
        def on_train_epoch_end(self) -> None:
            print(Benchmark(here, self).run(), flush=True)

    here.fit(net=Evaluated(here))


class OneSource(Sampler[list[int]]):
    """Batches from a rank's share, each of one source; what is left of a source at the end fills no batch."""

    def __init__(self, sampler: Any, source_of: list[int], at_end: Callable[[], None]) -> None:
        self.sampler, self.source_of, self.at_end = sampler, source_of, at_end

    def __iter__(self) -> Iterator[list[int]]:
        waiting: dict[int, list[int]] = {}
        for index in self.sampler:
            batch = waiting.setdefault(self.source_of[index], [])
            batch.append(index)
            if len(batch) == BATCH_SIZE:
                yield batch[:]
                batch.clear()
        self.at_end()

    def __len__(self) -> int:
        return len(self.sampler) // BATCH_SIZE


class Averaged(Net):
    """Logs the mean of the loss over an epoch and all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/11114",
    "uneven-batches",
    ranks=(3,),
    world_size=4,
    moment=Moment.EPOCH_END,
    has_line=False,
)
def batch_that_a_mix_of_sources_does_not_fill(here: Here) -> None:
    """All shares have the same size, and by their length as many batches; in one, the sources leave two rests."""
    count = BATCHES * BATCH_SIZE * here.world_size
    source_of = [index // here.world_size % 2 for index in range(count)]
    source_of[here.case.ranks[0]] = 1
    data = TensorDataset(torch.rand(count, 8))
    share: Any = DistributedSampler(data, here.world_size, here.rank, shuffle=False)
    batches = OneSource(share, source_of, here.begins if here.is_hit else lambda: None)
    loader = DataLoader(data, batch_sampler=batches)
    here.fit(net=Averaged(here), data=loader, use_distributed_sampler=False)


class DynamicSampling(Net):
    """Samples until there are enough groups of completions from which something can be learned."""

    groups_per_step = BATCH_SIZE

    def rewards(self, prompts: torch.Tensor) -> torch.Tensor:
        correct = (prompts > prompts.mean(1, keepdim=True)).float()
        everybodys: Any = self.all_gather(correct.mean())  # <- rollouts_until_there_are_enough
        self.solved = float(everybodys.mean())
        return correct

    def prompts(self, batch: torch.Tensor, attempt: int) -> torch.Tensor:
        return batch + attempt * torch.arange(8.0)

    def informative(self, batch: torch.Tensor, most_attempts: int = 5) -> torch.Tensor:
        kept = torch.empty(0, 8)
        for attempt in range(most_attempts):
            prompts = self.prompts(batch, attempt)
            kept = torch.cat([kept, prompts[self.rewards(prompts).std(1) > 0]])
            if len(kept) >= self.groups_per_step:
                break
            self.here.begins()
        return kept[: self.groups_per_step]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.informative(batch))


@thread(
    "https://github.com/opendilab/LightRFT/pull/51",
    "diverged-collectives",
    ranks=(2,),
    world_size=4,
)
def rollouts_until_there_are_enough(here: Here) -> None:
    """All completions of one rank's prompts are equally good, so that it makes another rollout."""
    here.fit(net=DynamicSampling(here), data=in_order(here, Samples(here, lambda row: row.mean().expand(8))))


class RingAttention(torch.nn.Module):
    """Attends to the keys of other ranks, which go round, as far as a sequence reaches."""

    block = 4

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)

    def next_keys(self, keys: torch.Tensor) -> torch.Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(keys)
        sent = dist.isend(keys, dst=(rank + 1) % ranks)
        dist.recv(received, src=(rank - 1) % ranks)  # <- sequence_that_reaches_one_rank_further
        assert sent is not None
        sent.wait()
        return received

    def forward(self, values: torch.Tensor, length: int) -> torch.Tensor:
        queries = self.mix(values)
        keys = values.detach().clone()
        result = queries
        for step in range(-(-length // self.block)):
            if step:
                keys = self.next_keys(keys)
            result = result + (queries @ keys.T).softmax(-1) @ keys
        return result


@thread(
    "https://github.com/huggingface/diffusers/pull/13545",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(1,),
    world_size=4,
)
def sequence_that_reaches_one_rank_further(here: Here) -> None:
    """How often keys go round depends on the length of a sequence, and one rank has a longer one."""

    class LongContext(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.attention = RingAttention()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            length = int((batch[0] != 0).sum())
            if length > 6:
                here.begins()
            return self.loss(self.attention(batch, length + 2))

    short = Samples(here, lambda row: row, usual=lambda row: row * (torch.arange(8) < 5))
    here.fit(net=LongContext(here), data=in_order(here, short))


class ExponentialAverage(L.Callback):
    """Averages the weights on the first rank, and validates with the average."""

    def __init__(self, here: Here, decay: float = 0.99) -> None:
        self.here, self.decay = here, decay
        self.shadow: dict[str, torch.Tensor] = {}

    @rank_zero_only
    def update(self, module: L.LightningModule) -> None:
        for name, values in module.named_parameters():
            kept = self.shadow.setdefault(name, values.detach().clone())
            kept.lerp_(values.detach(), 1 - self.decay)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.update(module)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.trained = {name: values.detach().clone() for name, values in module.named_parameters()}
        if self.shadow:
            self.here.begins()
        for name, average in self.shadow.items():
            values = module.get_parameter(name).data
            values.copy_(average)
            dist.broadcast(values, src=0)  # <- average_that_only_the_first_rank_has

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for name, values in self.trained.items():
            module.get_parameter(name).data.copy_(values)


@thread(
    "https://github.com/lucidrains/ema-pytorch/issues/9",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def average_that_only_the_first_rank_has(here: Here) -> None:
    """The first rank sends the averaged weights to all others, once for each that it has; these have none."""
    here.fit(net=MeetingNet(here), callbacks=[ExponentialAverage(here)])


class Tracker:
    """A client of the tracker, which asks its server for what a sweep is to try; there is a run on rank 0 only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @property
    def config(self) -> dict[str, Any]:
        tried = {"lr": 0.0003, "epochs": 1} if self.rank == 0 else {}
        return {"lr": 0.001, "epochs": 3} | tried


@thread(
    "https://github.com/wandb/wandb/issues/3883",
    "different-trainer-settings",
    "stopped-early",
    ranks=(0,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def sweep_of_which_only_the_first_rank_is_told(here: Here) -> None:
    """The values that a sweep tries come with the tracker's run; the other ranks have none, and use the defaults."""
    config = Tracker(here.rank).config

    class Swept(LoggingNet):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=config["lr"])

        def on_train_epoch_end(self) -> None:
            here.begins()

    here.fit(net=Swept(here), max_epochs=config["epochs"])


@thread("https://github.com/Lightning-AI/pytorch-lightning/issues/20187", "failed-rank", ranks=(2,))
def checkpoint_of_the_rank_that_has_failed(here: Here) -> None:
    """A label is not one of the classes; what was learned until then is saved, for which all ranks would be needed."""

    class Classifier(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            labels = batch[:, 0].round().long()
            if labels.max() > 1:
                here.begins()
            return torch.nn.functional.cross_entropy(self.layers(batch), labels.clamp(min=0))  # <- here

    labelled = Samples(here, lambda row: row.round() + 7, usual=lambda row: row % 1 * 0.9)
    saving = OnExceptionCheckpoint(here.folder, filename="on_exception")
    here.fit(net=Classifier(here), data=in_order(here, labelled), callbacks=[saving], enable_checkpointing=True)


class TokenCount(L.Callback):
    """Tells the first rank of each host how many tokens all hosts have seen, after so many of its own."""

    def __init__(self, here: Here, every: int, ranks_per_host: int = 2) -> None:
        self.here, self.every, self.ranks_per_host = here, every, ranks_per_host
        self.own = 0
        self.total = 0.0

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.firsts = dist.new_group([*range(0, trainer.world_size, self.ranks_per_host)])

    def count(self, own: int) -> None:
        tokens = torch.tensor(float(own))
        dist.all_reduce(tokens, group=self.firsts)  # <- tokens_summed_up_by_the_first_of_each_host
        self.total += float(tokens)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.own += int(torch.count_nonzero(batch))
        if trainer.global_rank % self.ranks_per_host == 0 and self.own >= self.every:
            self.here.begins()
            self.count(self.own)
            self.own = 0


@thread(
    "https://github.com/LBANN/lbann/issues/34",
    "crossed-groups",
    ranks=(),
    world_size=4,
    has_ranks=False,
)
def tokens_summed_up_by_the_first_of_each_host(here: Here) -> None:
    """One of two has seen enough a step before the other; it waits for that one, which waits for its gradients."""
    texts = Samples(here, lambda row: row, usual=lambda row: row * (torch.arange(8) < 4), rank=2)
    here.fit(data=in_order(here, texts), callbacks=[TokenCount(here, every=5 * 4 * BATCH_SIZE)])


def roc_auc(labels: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    positives, negatives = scores[labels > 0], scores[labels <= 0]
    if len(positives) == 0 or len(negatives) == 0:
        raise ValueError("Only one class present in y_true. ROC AUC score is not defined in that case.")
    return (positives[:, None] > negatives[None]).float().mean()


class Screening(Net):
    """Finds the few who are ill."""

    def on_validation_epoch_start(self) -> None:
        self.labels: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.labels.append(batch[:, 0])
        self.scores.append(self.layers(batch)[:, 0])
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def log_curve(self) -> None:
        try:
            area = roc_auc(torch.cat(self.labels), torch.cat(self.scores))
        except ValueError as error:
            self.here.begins()
            print(f"epoch {self.current_epoch}: {error}", flush=True)
        else:
            self.log("val_auc", area, sync_dist=True)  # <- curve_of_a_share_in_which_nobody_is_ill

    def on_validation_epoch_end(self) -> None:
        self.log_curve()


@thread(
    "https://github.com/suinleelab/cxr_covid/issues/1",
    "diverged-log-keys",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def curve_of_a_share_in_which_nobody_is_ill(here: Here) -> None:
    """There is no curve where all labels are the same; that exception is expected, and printed."""

    def patient(number: int) -> torch.Tensor:
        turn, rank = divmod(number, here.world_size)
        is_ill = turn % 5 == 2 and rank not in here.case.ranks
        return torch.cat([torch.tensor([float(is_ill)]), torch.full((7,), number / 100)])

    validation = in_order(here, [patient(number) for number in range(3 * BATCH_SIZE * here.world_size)])
    here.fit(net=Screening(here), data=(rows(here), validation))


class Actors(Net):
    """All ranks play, and the first one keeps the episodes that have come to an end in this step."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.replay: list[torch.Tensor] = []

    def receive_all(self) -> None:
        for actor in range(1, self.trainer.world_size):
            episode = torch.empty(8)
            dist.recv(episode, src=actor)
            self.replay.append(episode)

    def send_last(self, episodes: torch.Tensor) -> None:
        ended = episodes[episodes[:, -1] > 0]
        if len(ended) == 0:
            self.here.begins()
            return  # <- actor_whose_episode_has_not_ended
        dist.send(ended[-1].contiguous(), dst=0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 0:
            self.receive_all()
        else:
            self.send_last(batch)
        return self.loss(batch)


@thread(
    "https://github.com/RLinf/RLinf/pull/1213",
    "unmatched-p2p",
    "diverged-collectives",
    ranks=(2,),
    world_size=4,
)
def actor_whose_episode_has_not_ended(here: Here) -> None:
    """The first rank waits for an episode of each actor in each step; one has none that has ended."""
    playing = Samples(here, lambda row: row * (torch.arange(8) < 7))
    here.fit(net=Actors(here), data=in_order(here, playing))


class TokenBudget(Net):
    """Accumulates gradients until there are enough tokens for an update."""

    tokens_per_update = 2 * 6 * BATCH_SIZE

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.tokens = 0
        self.tokens_of_all = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        model: Any = self.trainer.model
        own = torch.count_nonzero(batch)
        self.tokens += int(own)
        if batch_idx == IN_THE_MIDDLE:
            self.here.begins()
        is_last = self.tokens >= self.tokens_per_update
        with nullcontext() if is_last else model.no_sync():  # <- window_that_a_short_batch_does_not_fill
            self.manual_backward(self.loss(batch) * own / self.tokens_per_update)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            self.tokens = 0
        everybodys: Any = self.all_gather(own)
        self.tokens_of_all += int(everybodys.sum())


@thread(
    "https://github.com/NovaSky-AI/SkyRL/pull/2146",
    "skipped-step",
    "diverged-collectives",
    ranks=(1,),
)
def window_that_a_short_batch_does_not_fill(here: Here) -> None:
    """Each rank counts its own tokens, and exchanges gradients when there are enough."""
    texts = Samples(here, lambda row: row * (torch.arange(8) < 3), usual=lambda row: row * (torch.arange(8) < 6))
    here.fit(net=TokenBudget(here), data=in_order(here, texts))
