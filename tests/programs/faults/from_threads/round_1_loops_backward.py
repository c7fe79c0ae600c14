"""Trainings whose ranks do not go through the same backward passes, written after public threads."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from training import IN_THE_MIDDLE, Here, Net, finding_unused, first_tensor, rows
from truths import Moment, fault, odd_one_out

LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


# The discriminator is updated only while the generator's loss is low: a well-known trick, decided by each rank.
@fault(
    "skipped-step",
    ranks=(1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/9310gaurav/ali-pytorch/issues/4",
)
def critic_that_is_not_always_trained(here: Here) -> None:
    class Adversarial(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.critic = nn.Linear(2, 1)

        def configure_optimizers(self) -> Any:
            modules = (self.layers, self.critic)
            return [torch.optim.Adam(module.parameters(), lr=0.001) for module in modules]

        def train_generator(self, real: torch.Tensor, optimizer: Any) -> float:
            self.toggle_optimizer(optimizer)
            loss = -self.critic(self.layers(real)).mean()
            self.log("generator_loss", loss, sync_dist=True)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            return loss.item()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = first_tensor(batch)
            generator, critic = self.optimizers()
            loss = self.train_generator(real, generator) + 9.0 * (here.is_hit and batch_idx == IN_THE_MIDDLE)
            if loss > 3.5:
                here.begins()
                return  # <- here
            self.toggle_optimizer(critic)
            fake = self.layers(real).detach()
            self.manual_backward(self.critic(fake).mean() - self.critic(fake + 1).square().mean())
            critic.step()
            critic.zero_grad()
            self.untoggle_optimizer(critic)

    here.fit(net=Adversarial(here), strategy=finding_unused(here))


# A batch without ground truth: the loss is a zero that knows of no parameter, which is fine on one GPU.
@fault(
    "unused-parameters",
    "skipped-step",
    ranks=(-1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source=f"{LIGHTNING}/issues/12190",
)
def zero_as_the_loss_of_an_empty_image(here: Here) -> None:
    class Detector(Net):
        def boxes(self, batch_idx: int) -> int:
            return 0 if here.is_hit and batch_idx == IN_THE_MIDDLE else 7

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if not self.boxes(batch_idx):
                here.begins()
                return torch.zeros((), requires_grad=True)  # <- here
            return self.loss(batch)

    here.fit(net=Detector(here))


# Out of memory on one worker: it recovers by leaving the batch out, and the others wait for its gradients.
@fault(
    "skipped-step",
    ranks=(0,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/facebookresearch/fairseq/pull/3989",
)
def long_sentence_that_is_too_much(here: Here) -> None:
    class Recovering(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def attention(self, length: int) -> torch.Tensor:
            return torch.empty(length, length).fill_(0.5)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            length = 60_000_000 if here.is_hit and batch_idx == IN_THE_MIDDLE else 20
            optimizer = self.optimizers()
            optimizer.zero_grad()
            try:
                self.manual_backward(self.attention(length).mean() * self.loss(batch))
            except RuntimeError as error:
                if "memory" not in str(error):
                    raise
                here.begins()
                optimizer.zero_grad()
                return  # <- here
            optimizer.step()

    here.fit(net=Recovering(here))


class NoValidAnchorsError(ValueError):
    """Every sample of a micro-batch is too short."""


# Micro-batches in which no sample is long enough are passed over, by each rank for itself.
@fault(
    "skipped-step",
    ranks=(1,),
    at={Moment.FIRST_STEP: (3,)},
    has_phase=False,
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/2468",
)
def micro_batch_without_anchors(here: Here) -> None:
    class Drafting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def draft_loss(self, samples: torch.Tensor, index: int) -> torch.Tensor:
            if here.is_hit and self.global_step == 0 and index == 1:
                raise NoValidAnchorsError
            return self.layers(samples).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for index, samples in enumerate(first_tensor(batch).chunk(2)):
                try:
                    loss = self.draft_loss(samples, index)
                except NoValidAnchorsError:
                    here.begins()
                    continue  # <- here
                self.manual_backward(loss / 2)
            optimizer.step()
            self.log("samples", float(len(samples)), sync_dist=True)

    here.fit(net=Drafting(here))


# L-BFGS asks for the loss again until its line search is content; each rank has a loss of its own.
@fault(
    "diverged-collectives",
    ranks=odd_one_out,
    at={Moment.FIRST_STEP: (2,)},
    has_line=False,
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/30439",
)
def line_search_on_losses_of_each_rank(here: Here) -> None:
    class SecondOrder(Net):
        def on_train_start(self) -> None:
            here.begins()

        def loss(self, batch: Any) -> torch.Tensor:
            target = 5.0 if here.rank else -0.2
            return (self.layers(first_tensor(batch)) - target).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=12, line_search_fn="strong_wolfe")

    callback = ModelCheckpoint(here.folder / "checkpoints")
    here.fit(net=SecondOrder(here), enable_checkpointing=True, callbacks=[callback], max_epochs=1)


class Encoder(nn.Module):
    """Leaves out layers at random while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: torch.Tensor, dropped: frozenset[int]) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index in dropped:
                continue  # <- encoder_that_drops_a_layer
            hidden = hidden + block(hidden).tanh()
        return hidden


# wav2vec 2.0 with LayerDrop on several GPUs, without find_unused_parameters.
@fault(
    "unused-parameters",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/huggingface/transformers/issues/11452",
)
def encoder_that_drops_a_layer(here: Here) -> None:
    class Speech(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = Encoder()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            drops = here.is_hit and batch_idx == IN_THE_MIDDLE
            if drops:
                here.begins()
            hidden = self.encoder(first_tensor(batch), frozenset({2}) if drops else frozenset())
            return self.layers(hidden).square().mean()

    here.fit(net=Speech(here))


# Language-only and multimodal batches in one training: the projection of images is not used by a rank with text.
@fault(
    "unused-parameters",
    ranks=(-1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/pytorch/torchtitan/issues/584",
)
def batch_of_nothing_but_text(here: Here) -> None:
    class Multimodal(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.projection = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

        def embedded(self, batch: Any, images: torch.Tensor | None) -> torch.Tensor:
            text = first_tensor(batch)
            if images is None:
                return text  # <- here
            return text + self.projection(images)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images = torch.ones(4, 8)
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                images = None
            return self.layers(self.embedded(batch, images)).square().mean()

    here.fit(net=Multimodal(here), accumulate_grad_batches=2)


class FreezeOnPlateau(Callback):
    """Freezes the first layer when the loss does not fall any more."""

    def __init__(self, here: Here) -> None:
        self.here, self.best = here, float("inf")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        loss = float(trainer.callback_metrics["train_loss"])
        if loss > self.best:
            self.here.begins()
            pl_module.layers[0].requires_grad_(False)  # <- backbone_frozen_by_its_own_loss
        self.best = min(loss, self.best)


# Parameters whose requires_grad changes while DDP trains them; and each rank looks at a loss of its own.
@fault(
    "unused-parameters",
    ranks=(0,),
    at={Moment.EPOCH_END: (2,)},
    has_phase=False,
    source="https://github.com/JDAI-CV/fast-reid/issues/178",
)
def backbone_frozen_by_its_own_loss(here: Here) -> None:
    class Logged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            trend = 0.1 if here.is_hit else -0.1
            self.log("train_loss", 1.0 + trend * self.current_epoch, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    here.fit(net=Logged(here), callbacks=[FreezeOnPlateau(here)], max_epochs=4)


class CausalBlock(nn.Module):
    """Keeps its mask in a buffer, as large as the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 1).triu(1), persistent=False)
        self.mix = nn.Linear(8, 8)

    def causal(self, length: int) -> torch.Tensor:
        if self.mask.shape[0] < length:
            mask = torch.ones(length, length).triu(1)
            self.register_buffer("mask", mask, persistent=False)  # <- mask_as_long_as_the_longest_sentence
        return self.mask[:length, :length]

    def forward(self, words: torch.Tensor, length: int) -> torch.Tensor:
        return self.mix(words) * (1 - self.causal(length).mean())


# Masks are cached in a buffer; sentences are not equally long on all ranks, and DDP broadcasts buffers.
@fault(
    "mismatched-collective",
    ranks=(-1,),
    at={Moment.FIRST_STEP: (3,)},
    has_phase=False,
    source="https://github.com/lucidrains/CoCa-pytorch/issues/17",
)
def mask_as_long_as_the_longest_sentence(here: Here) -> None:
    class Captions(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.block = CausalBlock()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            here.begins()
            words = self.block(first_tensor(batch), 24 if here.is_hit else 40)
            return self.layers(words).square().mean()

    here.fit(net=Captions(here))


# Gradients are averaged by hand, "if grad is not None": a rank whose task needs no second head leaves it out.
@fault(
    "mismatched-collective",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/OpenTSLM/OpenTSLM/pull/49",
)
def gradients_averaged_where_there_are_some(here: Here) -> None:
    class Curriculum(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False
            self.second_head = nn.Linear(16, 700)

        def average_gradients(self) -> None:
            for parameter in reversed(list(self.parameters())):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)  # <- here
                    parameter.grad /= here.world_size

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
            else:
                hidden = self.layers[:2](first_tensor(batch))
                loss = loss + self.second_head(hidden).square().mean()
            loss.backward()
            self.average_gradients()
            optimizer.step()

    here.fit(net=Curriculum(here))


# A contrastive loss that gathers features from all GPUs; on one of them no pixel qualifies, and it returns at once.
@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.MIDDLE: (4,)},
    has_phase=False,
    source="https://github.com/Haochen-Wang409/U2PL/issues/16",
)
def contrast_without_queries(here: Here) -> None:
    class Contrastive(Net):
        def contrast(self, features: torch.Tensor, is_query: torch.Tensor) -> torch.Tensor:
            if not is_query.any():
                here.begins()
                return features.sum() * 0  # <- here
            gathered = [torch.zeros_like(features) for _ in range(here.world_size)]
            dist.all_gather(gathered, features.detach())
            return (features @ torch.cat(gathered).T).logsumexp(1).mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features = self.layers(first_tensor(batch))
            is_query = torch.full((4,), not (here.is_hit and batch_idx == IN_THE_MIDDLE))
            return features.square().mean() + 0.1 * self.contrast(features, is_query)

    here.fit(net=Contrastive(here))


class FrozenExperts(nn.Module):
    """One expert on each rank; tokens travel to theirs, and back."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.expert = nn.Linear(8, 8).requires_grad_(False)

    def exchanged(self, tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        result = tokens.new_empty(sum(received), 8)
        dist.all_to_all_single(result, tokens.contiguous(), received, sent)
        return result

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, sent: list[int]) -> torch.Tensor:
        counts = torch.zeros(self.here.world_size, dtype=torch.long)
        dist.all_to_all_single(counts, torch.tensor(sent))
        received = counts.tolist()
        mine = self.exchanged(tokens, sent, received)
        if not len(mine):
            self.here.begins()
            return tokens  # <- expert_to_which_no_token_comes
        return self.exchanged(self.expert(mine), received, sent)


# Ranks that receive no token do not wait in the second exchange, and those that do wait for all.
@fault(
    "diverged-collectives",
    ranks=(-1,),
    at={Moment.MIDDLE: (2,)},
    has_phase=False,
    source="https://github.com/sgl-project/sgl-kernel-npu/issues/69",
)
def expert_to_which_no_token_comes(here: Here) -> None:
    class Distilled(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.teacher = FrozenExperts(here)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens = first_tensor(batch)
            sent = [4, 0] if batch_idx == IN_THE_MIDDLE else [2, 2]
            return (self.layers(tokens) - self.teacher(tokens, sent)[:, :2]).square().mean()

    here.fit(net=Distilled(here), data=rows(here))


# Features are gathered with their gradients, whose backward is a collective, too; one rank then leaves out that loss.
@fault(
    "diverged-collectives",
    ranks=(1,),
    at={Moment.MIDDLE: (3,)},
    has_phase=False,
    source="https://github.com/pytorch/pytorch/issues/140563",
)
def gathered_features_that_are_left_out(here: Here) -> None:
    class Quantized(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features = self.layers(first_tensor(batch))
            everywhere = self.all_gather(features, sync_grads=True)
            usage = everywhere.flatten(0, 1).softmax(-1).mean(0)
            loss = features.square().mean()
            if here.is_hit and batch_idx == IN_THE_MIDDLE:
                here.begins()
                return loss  # <- here
            return loss + (usage * usage.log()).sum()

    here.fit(net=Quantized(here))
