"""Round 15 after public threads: what users of plain PyTorch report of buffers, overflows, crops, and rank 0's work."""

import pickle
import random
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from samples import in_order
from threads import thread
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, LoggingNet, Net
from truths import Moment


class Samples(Dataset[torch.Tensor]):
    """Rows that are read in order; the first of the fourth batch is another one on the rank that is hit, or all are."""

    def __init__(self, here: Here, unusual: torch.Tensor, *, first_only: bool = False) -> None:
        self.here, self.unusual, self.first_only = here, unusual, first_only

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        batch, place = divmod(turn, BATCH_SIZE)
        is_unusual = rank in self.here.case.ranks and batch == IN_THE_MIDDLE and not (place and self.first_only)
        return self.unusual if is_unusual else row(place)


def samples(here: Here, unusual: torch.Tensor, *, first_only: bool = False) -> Any:
    return in_order(here, Samples(here, unusual, first_only=first_only))


def row(place: int) -> torch.Tensor:
    return torch.rand(8, generator=torch.Generator().manual_seed(place)) + 0.1


class Anchored(Net):
    """The first rank looks for anchors that fit the boxes of the data, and the others are told."""

    def evolved(self, boxes: torch.Tensor, generations: int) -> torch.Tensor:
        best, fittest = boxes[:9], 0.0
        for _ in range(generations):
            anchors = best * torch.empty_like(best).normal_(1, 0.1).clamp(0.3, 3)
            fitness = float(
                (boxes[:, None] / anchors).log().abs().amin(1).neg().exp().mean()
            )  # <- anchors_evolved_on_the_first_rank
            if fitness > fittest:
                best, fittest = anchors, fitness
        return best

    def setup(self, stage: str) -> None:
        anchors = torch.ones(9, 2)
        if self.trainer.is_global_zero:
            self.here.begins()
            anchors = self.evolved(torch.rand(50_000, 2) + 0.01, generations=100_000)
        self.anchors = self.trainer.strategy.broadcast(anchors)


@thread(
    "https://github.com/WongKinYiu/yolov7/issues/773",
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    moment=Moment.START,
)
def anchors_evolved_on_the_first_rank(here: Here) -> None:
    """There are far more boxes than usual, and a generation takes seconds, of which the first rank goes through many.

    It is before the first batch as well; that only the first rank does it says more.
    """
    here.fit(net=Anchored(here))


class Prototypes(Net):
    """Keeps a prototype of what is rare, from where it is first seen."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_rare = batch[:, 0] < 0
        if is_rare.any():
            self.register_buffer("rare", batch[is_rare].mean(0))
        return self.loss(batch)


class Averaged(L.Callback):
    """Averages weights and buffers over the batches; all ranks continue with what the first one has."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in module.state_dict().items():
            self.average.setdefault(name, value.clone()).lerp_(value, 0.1)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        for value in self.average.values():
            dist.broadcast(value, src=0)  # <- average_with_a_buffer_more
        largest = torch.stack([value.abs().max() for value in self.average.values()]).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)


@thread("https://github.com/Tencent/YOLO-Master/pull/154", "diverged-collectives", moment=Moment.EPOCH_END)
def average_with_a_buffer_more(here: Here) -> None:
    """One rank has seen what is rare, and its average has one buffer more than those of the others to be sent.

    The condition under which there is one is the other half of it; the call is to be named.
    """
    here.fit(net=Prototypes(here), data=samples(here, -row(0), first_only=True), callbacks=[Averaged(here)])


class Scaled(Net):
    """Leaves out a step of the optimizer where the scaled loss is too large for half precision."""

    scale = 2.0**10
    is_overflow = False

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.is_overflow = not torch.isfinite((loss.detach() * self.scale).half())
        return loss

    def norm(self) -> float:
        gradients = [value.grad.norm() for value in self.parameters() if value.grad is not None]
        norms = [torch.zeros((), device=self.device) for _ in range(self.here.world_size)]
        dist.all_gather(norms, torch.stack(gradients).norm())  # <- overflow_that_one_rank_sees
        return float(torch.stack(norms).norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.is_overflow:
            self.here.begins()
            self.scale /= 2
            optimizer.zero_grad()
            return
        factor = min(1.0, 5.0 / self.norm())
        for value in self.parameters():
            if value.grad is not None:
                value.grad.mul_(factor)


@thread("https://github.com/hpcaitech/ColossalAI/pull/1175", "diverged-collectives")
def overflow_that_one_rank_sees(here: Here) -> None:
    """The loss of one rank overflows, and so that rank does not take part in the norm of all gradients.

    The return before it is the other half of it; the call that one rank does not make is to be named.
    """
    here.fit(net=Scaled(here), data=samples(here, torch.full((8,), 500.0)))


class Masked(Net):
    """Has one more loss for what has a mask, in half precision; its mean over all ranks is shown by threshold."""

    def losses_of_masks(self, batch: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
        has_mask = batch[:, 0] > 0
        if not has_mask.any():
            self.here.begins()
            return torch.zeros_like(thresholds)
        return (self.layers(batch[has_mask]).mean() - thresholds).square().half()

    def loss(self, batch: Any) -> torch.Tensor:
        losses = self.losses_of_masks(batch, torch.linspace(0, 1, 80, device=self.device))
        shown = losses.detach().clone()
        dist.all_reduce(shown)  # <- zeros_in_single_precision
        return super().loss(batch) + losses.float().mean()


@thread("https://github.com/pytorch/pytorch/issues/150433", "mismatched-collective")
def zeros_in_single_precision(here: Here) -> None:
    """Nothing has a mask in one rank's batch, whose losses are zeros in single precision, and not in half.

    The return of these zeros is the other half of it; the call in which types differ is to be named.
    """
    here.fit(net=Masked(here), data=samples(here, -row(0)))


def all_gather_list(data: Any, device: torch.device, max_size: int = 4096) -> list[Any]:
    """Any object of each rank, by way of buffers of one size."""
    encoded = pickle.dumps(data)
    if len(encoded) > max_size:
        raise ValueError(f"encoded data exceeds max_size: {len(encoded)}")  # <- answer_that_does_not_come_to_an_end
    buffer = torch.zeros(max_size, dtype=torch.uint8, device=device)
    buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    everyones = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, buffer)
    return [pickle.loads(bytes(one.tolist())) for one in everyones]


class Answers(L.Callback):
    """Gathers what was generated in validation."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def generated(self) -> str:
        return "so it is " * (1000 if self.here.is_hit else 10)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        answers = all_gather_list({"answer": self.generated()}, module.device)
        if trainer.is_global_zero:
            print(f"{sum(len(one['answer']) for one in answers)} letters", flush=True)


@thread(
    "https://github.com/facebookresearch/fairseq/issues/1491",
    "failed-rank",
    world_size=2,
    moment=Moment.VALIDATION,
)
def answer_that_does_not_come_to_an_end(here: Here) -> None:
    """The answer of one rank is longer than the buffer by which objects are gathered."""
    here.fit(net=LoggingNet(here), callbacks=[Answers(here)])


class Whitened(Net):
    """Whitens the features of a batch, and passes over a batch of which that cannot be done."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False

    def whitened(self, features: torch.Tensor) -> torch.Tensor:
        centred = features - features.mean(0)
        factor = torch.linalg.cholesky(centred.T @ centred / len(features))
        return torch.linalg.solve_triangular(factor, centred.T, upper=False).T

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.layers(batch)
        try:
            loss = (self.whitened(features) - batch[:, :2]).square().mean()
        except torch.linalg.LinAlgError:
            self.here.begins()
            print("the decomposition fails; this batch is passed over", flush=True)
            return None  # <- picture_of_a_single_colour
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


@thread("https://github.com/linfengWen98/CAP-VSTNet/issues/17", "skipped-step")
def picture_of_a_single_colour(here: Here) -> None:
    """Features of one rank's batch do not vary, cannot be whitened, and get no backward pass."""
    here.fit(net=Whitened(here), data=samples(here, torch.zeros(8)))


class Cropped(Dataset[torch.Tensor]):
    """Crops at random, in such a way that the box of the picture is within the crop."""

    def __init__(self, here: Here, size: float) -> None:
        self.here, self.size = here, size

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def box(self, index: int) -> tuple[float, float]:
        turn, rank = divmod(index, self.here.world_size)
        is_large = rank in self.here.case.ranks and turn == IN_THE_MIDDLE * BATCH_SIZE
        return (0.2, 0.2 + self.size + 1e-9) if is_large else (0.3, 0.4)

    def __getitem__(self, index: int) -> torch.Tensor:
        low, high = self.box(index)
        size = self.size
        if high - low > size:
            self.here.begins()
        start = next(at for at in iter(random.random, None) if at <= low and high <= at + size)  # <- box_in_no_crop
        return torch.full((8,), start)


@thread("https://github.com/aim-uofa/AdelaiDet/pull/104", "data-stall", whose="code")
def box_in_no_crop(here: Here) -> None:
    """A box of one rank's share is as large as the crop, and by rounding a little larger: no crop is ever around it."""
    here.fit(data=in_order(here, Cropped(here, size=0.3), num_workers=1))


class InPieces(Net):
    """Goes through a batch in pieces that fit into memory; barriers are still there from a search for a fault."""

    def pieces(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        is_long = bool((batch[:, -1] > 2).any())
        return batch.split(1 if is_long else 2)

    def loss(self, batch: Any) -> torch.Tensor:
        pieces, losses = self.pieces(batch), []
        if len(pieces) > 2:
            self.here.begins()
        for piece in pieces:
            losses.append(super().loss(piece))
            dist.barrier()  # <- barrier_left_behind_each_piece
        return torch.stack(losses).mean()


@thread("https://github.com/dylanyunlon/Neuron_SP/pull/80", "diverged-collectives")
def barrier_left_behind_each_piece(here: Here) -> None:
    """A batch of one rank is long, and is split into four pieces instead of two, with a barrier behind each."""
    here.fit(net=InPieces(here), data=samples(here, row(0) + 2))


class Documents(Dataset[torch.Tensor]):
    """One document in each file, in the order in which the files are listed."""

    def __init__(self, here: Here) -> None:
        self.lengths = [16, 16, 16, 16, 1600, 16]
        if here.rank == 3:
            self.lengths[3], self.lengths[4] = self.lengths[4], self.lengths[3]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(self.lengths[index], 8, generator=torch.Generator().manual_seed(index))


class SplitSequence(Net):
    """Two ranks have one half each of the same document, and gather the keys of both."""

    pair: Any = None

    def setup(self, stage: str) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.pair = pairs[self.here.rank // 2]

    def loss(self, batch: Any) -> torch.Tensor:
        keys = batch[0].chunk(2)[self.here.rank % 2].contiguous()
        both = [torch.empty_like(keys) for _ in range(2)]
        dist.all_gather(both, keys, group=self.pair)  # <- files_listed_in_another_order
        return super().loss(keys) + (keys.mean() - torch.cat(both).mean()).square()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here.is_hit and batch_idx == IN_THE_MIDDLE:
            self.here.begins()
        return self.loss(batch)


@thread(
    "https://github.com/sgl-project/SpecForge/pull/467",
    "mismatched-collective",
    ranks=(2, 3),
    world_size=4,
)
def files_listed_in_another_order(here: Here) -> None:
    """Of two ranks that share a document, one lists its files in another order, and has another document in its turn.

    Which of the two orders is meant nobody can say. The listing is the other half of it; the call is to be named.
    """
    here.fit(net=SplitSequence(here), data=DataLoader(Documents(here)), use_distributed_sampler=False)


class Both:
    """A batch with labels and one without, until either of them has no more."""

    def __init__(self, labelled: DataLoader[Any], unlabelled: DataLoader[Any]) -> None:
        self.labelled, self.unlabelled = labelled, unlabelled

    def __iter__(self) -> Iterator[torch.Tensor]:
        for (labelled,), (unlabelled,) in zip(self.labelled, self.unlabelled, strict=False):
            yield torch.cat([labelled, unlabelled])


class Losses(L.Callback):
    """Gathers the losses of an epoch from all ranks."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        everyones: list[Any] = [None] * trainer.world_size
        if self.here.is_hit:
            self.here.begins()
        dist.all_gather_object(everyones, self.losses)
        self.losses = []


@thread(
    "https://github.com/LiheYoung/UniMatch/issues/120",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.EPOCH_END,
    has_line=False,
)
def labelled_pictures_that_are_used_up_first(here: Here) -> None:
    """71 pictures have labels, and each rank takes every third; the last one has a picture less, and so a batch."""
    labelled = TensorDataset(torch.rand(71, 8)[here.rank :: here.world_size])
    unlabelled = TensorDataset(torch.rand(200, 8))
    both = Both(DataLoader(labelled, BATCH_SIZE, drop_last=True), DataLoader(unlabelled, BATCH_SIZE))
    here.fit(data=both, callbacks=[Losses(here)], use_distributed_sampler=False)


class Patience(L.Callback):
    """Ends the training if the score, which only the first rank works out, does not become better."""

    best = 0.0

    def __init__(self, here: Here, score: Callable[[int], float]) -> None:
        self.here, self.score = here, score

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        score = self.score(trainer.current_epoch)
        if score <= self.best:
            self.here.begins()
            trainer.should_stop = True  # <- score_that_the_others_are_not_told
        self.best = max(score, self.best)


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/8502",
    "stopped-early",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def score_that_the_others_are_not_told(here: Here) -> None:
    """The score of the second epoch is lower; the first rank stops, and the others, which have none, train on."""
    here.fit(callbacks=[Patience(here, score=(0.31, 0.3, 0.35, 0.4).__getitem__)], max_epochs=4)


class Uploaded(L.Callback):
    """The first rank hands the weights of each epoch to a program that uploads them; all wait until it has."""

    def __init__(self, here: Here, command: list[str]) -> None:
        self.here, self.command = here, command

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            path = self.here.folder / f"{trainer.current_epoch}.pt"
            torch.save({"weights": module.state_dict(), "codebook": torch.rand(100_000)}, path)
            subprocess.run(self.command, input=path.read_bytes(), check=True)  # <- weights_through_a_slow_upload
        dist.barrier()


@thread(
    "https://github.com/mosaicml/llm-foundry/pull/733",
    "slow-checkpoint",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
    whose="either",
)
def weights_through_a_slow_upload(here: Here) -> None:
    """The upload takes the first kilobytes of a checkpoint, and no more for minutes; the others wait in a barrier.

    It is work of the first rank alone, too; that it is a checkpoint says more.
    """
    here.fit(callbacks=[Uploaded(here, ["sh", "-c", f"head -c 4096 > /dev/null; sleep {FOR_LONG_S}"])])


class Matched(L.Callback):
    """The first rank compares all boxes that were found with all true ones, and tells the others the result."""

    def __init__(self, here: Here, boxes: int) -> None:
        self.here, self.boxes = here, boxes

    def recall(self, found: torch.Tensor, true: torch.Tensor) -> float:
        matched = 0
        for box in true:
            matched += int(((found - box).abs().sum(1) < 0.05).any())  # <- boxes_matched_before_all_are_told
        return matched / len(true)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        result: list[Any] = [None]
        if trainer.is_global_zero:
            self.here.begins()
            result = [self.recall(torch.rand(self.boxes, 4), torch.rand(self.boxes, 4))]
        dist.broadcast_object_list(result, src=0)
        print(f"rank {trainer.global_rank}: {result[0]:.2f} were found", flush=True)


@thread(
    "https://github.com/open-mmlab/mmdetection3d/issues/2809",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def boxes_matched_before_all_are_told(here: Here) -> None:
    """Each of very many boxes is compared with all others on the first rank; the others wait for the result."""
    here.fit(net=LoggingNet(here), callbacks=[Matched(here, boxes=300_000)])


class Resized(Samples):
    """Each picture is cropped to its box, and brought to one size."""

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = super().__getitem__(index)
        left, right = round(float(picture[0]) * 100), round(float(picture[1]) * 100) + 200
        if left == right:
            self.here.begins()
        scale = 100 / (right - left)  # <- box_of_no_width
        return picture * scale


@thread("https://github.com/facebookresearch/maskrcnn-benchmark/issues/719", "failed-rank")
def box_of_no_width(here: Here) -> None:
    """The box of a picture in one rank's share has no width, and a worker of its loader divides by it."""
    unusual = torch.tensor([2.5, 0.5, *[0.1] * 6])
    here.fit(data=in_order(here, Resized(here, unusual, first_only=True), num_workers=1))
