"""Round 17 after public threads: what users of plain PyTorch report of scorers, pools, pipelines, and own clocks."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, cast

import lightning as L
import torch
import torch.distributed as dist
from samples import Stream, in_order
from threads import goes_wrong, thread
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, Net, rows
from truths import Moment


class Shares(Dataset[torch.Tensor]):
    """Rows in order; those of one batch of some ranks are others."""

    def __init__(self, here: Here, ranks: tuple[int, ...], unusual: Callable[[int], torch.Tensor]) -> None:
        self.here, self.ranks, self.unusual = here, ranks, unusual

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        turn, rank = divmod(index, self.here.world_size)
        batch, place = divmod(turn, BATCH_SIZE)
        return self.unusual(place) if rank in self.ranks and batch == IN_THE_MIDDLE else usual(place)


def shares(here: Here, unusual: Callable[[int], torch.Tensor], ranks: tuple[int, ...] | None = None) -> Any:
    return in_order(here, Shares(here, here.case.ranks if ranks is None else ranks, unusual))


def usual(place: int) -> torch.Tensor:
    return torch.linspace(0.1, 0.8, 8) + place / 100


def precision(found: list[float], truth: list[float]) -> float:
    """The share of what was found that is close to something that is there."""
    close = [box for box in found if any([abs(box - other) < 0.01 for other in truth])]  # <- boxes_matched_one_by_one
    return len(close) / len(found)


class Boxes(L.Callback):
    """The first rank compares what was found in validation with what is there, and tells all the result."""

    def __init__(self, here: Here, boxes: int) -> None:
        self.here, self.boxes = here, boxes

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        results: list[float | None] = [None]
        if trainer.is_global_zero:
            self.here.begins()
            found, truth = (torch.rand(self.boxes).tolist() for _ in range(2))
            results = [precision(found, truth)]
        dist.broadcast_object_list(results, src=0)


@thread(
    "https://github.com/open-mmlab/mmdetection/issues/11096",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=2,
    moment=Moment.VALIDATION,
)
def boxes_matched_one_by_one(here: Here) -> None:
    """The first rank alone evaluates, in a loop over all pairs of boxes; the others wait for its broadcast."""
    here.fit(callbacks=[Boxes(here, boxes=100_000)])


def texts(shards: list[int]) -> Iterator[dict[str, Any]]:
    """Twelve texts from each shard; of one shard, four are of a lower quality."""
    for shard in shards:
        for number in range(3 * BATCH_SIZE):
            is_poor = shard == 4 and number < BATCH_SIZE
            yield {"values": usual(number).tolist(), "quality": 0.2 if is_poor else 0.9}


class Texts(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return self.layers(batch["values"]).square().mean()

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


def good_texts(here: Here) -> Any:
    from datasets import IterableDataset as TextStream
    from datasets.distributed import split_dataset_by_node

    stream = TextStream.from_generator(texts, gen_kwargs={"shards": list(range(6))})
    stream = split_dataset_by_node(stream, rank=here.rank, world_size=here.world_size)
    return stream.filter(lambda text: text["quality"] > 0.5).with_format("torch")


@thread(
    "https://github.com/huggingface/datasets/issues/6719",
    "uneven-batches",
    moment=Moment.EPOCH_END,
    has_line=False,
)
def texts_filtered_after_they_were_shared_out(here: Here) -> None:
    """All ranks have as many shards; what is poor is left out later, which makes a batch less on one rank."""
    here.fit(net=Texts(here), data=DataLoader(good_texts(here), BATCH_SIZE), max_epochs=1, enable_checkpointing=True)


class Recurrent(Net):
    """Reads a text word by word, in a function that is compiled for each length."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.again = torch.nn.Linear(16, 16)
        self.read = torch.compile(self.read_words, dynamic=False, backend="aot_eager")

    def read_words(self, words: torch.Tensor) -> torch.Tensor:
        state = words.new_zeros(len(words), 16)
        for word in words.unbind(1):
            state = torch.tanh(self.layers[0](word) + self.again(state))
        return self.layers[2](state)

    def loss(self, batch: Any) -> torch.Tensor:
        if batch.shape[1] > 2:
            self.here.begins()
        return self.read(batch).square().mean()  # <- text_for_which_the_loop_is_compiled_anew


class Words(Shares):
    def __getitem__(self, index: int) -> torch.Tensor:
        row = super().__getitem__(index)
        return row if row.dim() == 2 else row.repeat(2, 1)


@thread(
    "https://github.com/pytorch/pytorch/issues/140229",
    "compile-skew",
    ranks=(0,),
    world_size=2,
)
def text_for_which_the_loop_is_compiled_anew(here: Here) -> None:
    """One rank's batch has long texts, and for their length the whole loop is compiled once more, on that rank."""
    words = Words(here, here.case.ranks, lambda place: usual(place).repeat(400, 1))
    here.fit(net=Recurrent(here), data=in_order(here, words))


class Pictures(Dataset[torch.Tensor]):
    """Pictures in a folder; the download of one of them has ended too early."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def read(self, path: Path) -> Any:
        from PIL import Image

        with Image.open(path) as picture:
            return picture.convert("L").resize((8, 1))  # <- picture_of_which_the_end_is_missing

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.folder / f"{index:04}.jpg"
        if not path.read_bytes().endswith(b"\xff\xd9"):
            self.here.begins()
        return torch.tensor(list(self.read(path).tobytes())) / 255


def download(here: Here, folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    for turn in range(BATCHES * BATCH_SIZE):
        path = folder / f"{turn * here.world_size + here.rank:04}.jpg"
        Image.frombytes("L", (64, 64), os.urandom(64 * 64)).save(path)
        if here.is_hit and turn == IN_THE_MIDDLE * BATCH_SIZE + 2:
            path.write_bytes(path.read_bytes()[:1000])


@thread("https://github.com/facebookresearch/detectron2/issues/143", "failed-rank", ranks=(2,))
def picture_of_which_the_end_is_missing(here: Here) -> None:
    """The last rank's worker meets a picture that was not downloaded to its end, and nothing expects that."""
    folder = here.folder / f"pictures-{here.rank}"
    download(here, folder)
    here.fit(data=in_order(here, Pictures(here, folder), num_workers=1))


class Scorer:
    """A program that reads a reference and a caption from each line, and answers with a score."""

    program = 'while read -r reference caption; do [ -z "$caption" ] || echo 0.5; done'

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(["sh", "-c", self.program], text=True, bufsize=1, **pipes)

    def score(self, reference: str, caption: str) -> float:
        to_program, answers = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        to_program.write(f"{reference} {caption}\n")
        return float(answers.readline())  # <- caption_to_which_the_scorer_has_no_answer


class Captioning(Net):
    """Writes captions in validation, which are scored at its end."""

    def __init__(self, here: Here, scorer: Scorer) -> None:
        super().__init__(here)
        self.scorer = scorer
        self.captions: list[str] = []

    def caption(self, picture: torch.Tensor) -> str:
        return " ".join(f"w{int(10 * value)}" for value in picture if value > 0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.captions += [self.caption(picture) for picture in batch]

    def on_validation_epoch_end(self) -> None:
        if not all(self.captions):
            self.here.begins()
        scores = [self.scorer.score("w1", caption) for caption in self.captions]
        self.captions.clear()
        self.log("score", sum(scores) / len(scores), sync_dist=True)


@thread(
    "https://github.com/AIChallenger/AI_Challenger_2017/issues/3",
    "rank-behind",
    moment=Moment.VALIDATION,
)
def caption_to_which_the_scorer_has_no_answer(here: Here) -> None:
    """Of one picture the model says nothing; the scorer reads that line, writes none, and is waited for."""
    pictures = shares(here, lambda place: -usual(place))
    here.fit(net=Captioning(here, Scorer()), data=(rows(here), pictures))


class Pipelined(Net):
    """Two pipelines of two stages, of which the first one hands its outputs on to the second one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.layers(batch[0]).detach()
        self.hand_on(outputs, stage=self.here.rank % 2)
        return super().training_step(batch, batch_idx)

    def hand_on(self, outputs: torch.Tensor, stage: int) -> None:
        if self.here.is_hit:
            self.here.begins()
        other = 1 - stage
        (dist.send if stage == 0 else dist.recv)(outputs, other)  # <- stage_that_counts_within_its_pipeline


@thread(
    "https://github.com/pytorch/pytorch/pull/118593",
    "unmatched-p2p",
    ranks=(2, 3),
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def stage_that_counts_within_its_pipeline(here: Here) -> None:
    """What is given as the other rank is its number in the pipeline, and wanted is that among all ranks.

    In the first pipeline the two are the same. Those of the second one send to and receive from the first one.
    """
    here.fit(net=Pipelined(here))


class Bucketed(Net):
    def on_train_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()


@thread(
    "https://github.com/bghira/SimpleTuner/pull/1391",
    "different-trainer-settings",
    "stopped-early",
    ranks=(2,),
    moment=Moment.END,
    has_line=False,
)
def steps_counted_in_the_bucket_of_each_rank(here: Here) -> None:
    """Each rank counts in its own part of the bucket how many steps there are to be, and the last one has one less.

    The batches are drawn from the bucket again and again, and do not run out.
    """
    bucket = [f"{number:03}.png" for number in range(6 * BATCH_SIZE * here.world_size + 2)]
    share = bucket[here.rank :: here.world_size]
    steps = -(-len(share) // BATCH_SIZE)
    data = DataLoader(Stream(batches=1000), BATCH_SIZE)
    here.fit(net=Bucketed(here), data=data, max_epochs=-1, max_steps=steps, enable_checkpointing=True)


class Grid(Net):
    """Ranks are in two rows and two columns, in both of which norms are reduced."""

    groups: dict[str, Any]

    def on_fit_start(self) -> None:
        rows_of_grid = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.groups = {"row": rows_of_grid[self.here.rank // 2], "column": columns[self.here.rank % 2]}

    def reduce_norms(self, norms: dict[str, torch.Tensor]) -> None:
        for side in sorted(norms, key=lambda side: float(norms[side])):
            dist.all_reduce(norms[side], group=self.groups[side])  # <- norms_reduced_from_the_smaller_one_on

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        norms = {"row": batch[:, :4].norm(), "column": batch[:, 4:].norm()}
        if batch_idx == IN_THE_MIDDLE:
            self.here.begins()
        self.reduce_norms(norms)
        return super().training_step(batch, batch_idx)


@thread(
    "https://github.com/NVIDIA/Megatron-LM/issues/107",
    "crossed-groups",
    ranks=(),
    has_ranks=False,
    world_size=4,
)
def norms_reduced_from_the_smaller_one_on(here: Here) -> None:
    """Each rank begins with the smaller of its two norms; in one batch it is the other one on two of four ranks.

    No rank is wrong by itself. The order is the other half of it; the call in which all wait is to be named.
    """
    here.fit(net=Grid(here), data=shares(here, lambda place: usual(place).flip(0), ranks=(0, 3)))


class Hydrated(Net):
    """Learns from halves of a batch, one after the other, and only from those with water in them."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.automatic_optimization = False
        self.skipped = 0

    def losses(self, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        for half in batch.split(BATCH_SIZE // 2):
            if (half > 0).any():
                yield self.loss(half)
            else:
                self.here.begins()
                self.skipped += 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = cast(Any, self.optimizers())
        for loss in self.losses(batch):
            optimizer.zero_grad()
            self.manual_backward(loss)  # <- proteins_without_water
            optimizer.step()


@thread("https://github.com/prism-science/WaterFlow/pull/94", "skipped-step", ranks=(0,))
def proteins_without_water(here: Here) -> None:
    """Half of a batch of the first rank has no water, so that its generator has one loss less than all others.

    The condition is the other half of it; the backward pass that one rank makes less often is to be named.
    """
    here.fit(net=Hydrated(here), data=shares(here, lambda place: usual(place) * (1 if place < 2 else -1)))


class Detecting(Net):
    """Has a head for classes and one for boxes, of which the second counts where an anchor has been assigned."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.boxes = torch.nn.Linear(2, 4)

    def loss(self, batch: Any) -> torch.Tensor:
        features = self.layers(batch)
        boxes, loss = self.boxes(features), features.square().mean()
        is_assigned = batch[:, 0] > 0
        if is_assigned.any():
            loss = loss + boxes[is_assigned].square().mean()  # <- anchors_none_of_which_was_assigned
        else:
            self.here.begins()
        return loss


@thread(
    "https://github.com/ultralytics/ultralytics/pull/26012",
    "unused-parameters",
    ranks=(3,),
    world_size=4,
)
def anchors_none_of_which_was_assigned(here: Here) -> None:
    """The last rank has a batch in which no anchor is assigned; its boxes are predicted, and not part of the loss."""
    here.fit(net=Detecting(here), data=shares(here, lambda place: -usual(place)))


class Archive(IterableDataset[torch.Tensor]):
    """Rows of an archive, from the pipe of a program that downloads it."""

    def __init__(self, here: Here, command: str) -> None:
        self.here, self.command = here, command

    def begins_after(self, count: int) -> None:
        if self.here.is_hit and count == IN_THE_MIDDLE * BATCH_SIZE:
            self.here.begins()

    def __iter__(self) -> Iterator[torch.Tensor]:
        with subprocess.Popen(self.command, shell=True, stdout=subprocess.PIPE) as program:
            archive = cast(IO[bytes], program.stdout)
            for count in range(BATCHES * BATCH_SIZE):
                self.begins_after(count)
                row = archive.read(8)  # <- archive_whose_download_stands_still
                yield torch.tensor(list(row)) / 255


@thread(
    "https://github.com/webdataset/webdataset/issues/308",
    "data-stall",
    world_size=2,
)
def archive_whose_download_stands_still(here: Here) -> None:
    """A server stops in the midst of an archive; the program was given no limit, and waits, and so does its reader."""
    path = here.folder / f"{here.rank:06}.tar"
    path.write_bytes(os.urandom(8 * BATCHES * BATCH_SIZE))
    stalled = f"head -c {8 * IN_THE_MIDDLE * BATCH_SIZE} {path}; sleep {FOR_LONG_S}"
    archive = Archive(here, stalled if here.is_hit else f"cat {path}")
    here.fit(data=DataLoader(archive, BATCH_SIZE, num_workers=1), max_epochs=1)


def recommend(history: int) -> int:
    """What is close to a history; memory for a long one comes to an end after a while."""
    if history > 1000:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return history % 10


class Recommended(L.Callback):
    """Recommends to the users of a rank's share, in processes of a pool, and counts the hits of all."""

    def __init__(self, here: Here, histories: list[int]) -> None:
        self.here, self.histories = here, histories

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if max(self.histories) > 1000:
            self.here.begins()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            hits = pool.map(recommend, self.histories)  # <- history_that_is_too_long_for_the_pool
        total = torch.tensor(float(sum(hits)))
        dist.all_reduce(total)


@thread("https://github.com/lenskit/lkpy/issues/290", "worker-died", ranks=(2,), moment=Moment.EPOCH_END)
def history_that_is_too_long_for_the_pool(here: Here) -> None:
    """A process of the last rank's pool is killed for want of memory; the pool has a new one, and waits for the task.

    The kernel kills it, and whoever used an executor would be told.
    """
    histories = [10, 20, 30, 5_000_000 if here.is_hit else 40]
    here.fit(callbacks=[Recommended(here, histories)], max_epochs=1)


class Played(Net):
    """Plays games with the policy for so many seconds, and compares them with those of all ranks."""

    limit_s = 1.0

    def play(self, state: torch.Tensor) -> torch.Tensor:
        time.sleep(float(state[0].clamp(max=1)))
        return state.repeat(100_000)

    def games(self, states: torch.Tensor) -> Iterator[torch.Tensor]:
        end = time.monotonic() + self.limit_s
        for state in states:
            if time.monotonic() > end:
                return
            yield self.play(state)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        steps = torch.cat([*self.games(batch)])
        dist.all_reduce(steps)  # <- games_ended_by_the_clock_of_each_rank
        return super().training_step(batch, batch_idx)


@thread("https://github.com/sgl-project/sglang/pull/27164", "mismatched-collective")
def games_ended_by_the_clock_of_each_rank(here: Here) -> None:
    """Whoever has played for a second stops; one rank's games take longer, and it has fewer steps to be reduced.

    The limit is the other half of it; the call in which sizes differ is to be named.
    """
    here.fit(net=Played(here), data=shares(here, lambda place: usual(place) + 0.6))


class Exported(L.Callback):
    """Puts weights together on all ranks, one after the other, and the first rank writes them."""

    def __init__(self, here: Here, command: str) -> None:
        self.here, self.command = here, command
        self.group: Any = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=1.5))  # <- export_under_the_limit_of_a_step

    def write(self, name: str, weight: torch.Tensor) -> None:
        self.here.begins()
        path = self.here.folder / f"{name}.bin"
        subprocess.run(self.command.format(path), shell=True, input=weight.numpy().tobytes(), check=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for name, weight in module.state_dict().items():
            whole = weight.clone()
            dist.all_reduce(whole, group=self.group)
            if trainer.is_global_zero:
                self.write(name, whole)


@thread(
    "https://github.com/ServiceNow/Fast-LLM/pull/543",
    "timeout-misuse",
    ranks=(),
    has_ranks=False,
    world_size=2,
    moment=Moment.EPOCH_END,
)
def export_under_the_limit_of_a_step(here: Here) -> None:
    """The group for the export gives up as soon as one for steps would; a slow disk takes longer for a file."""
    here.fit(callbacks=[Exported(here, "sleep 6; cat > {}")], max_epochs=1)
