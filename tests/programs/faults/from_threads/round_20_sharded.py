"""Round 20 after public threads: what users of sharded models report, of groups, stages, samples and workers."""

import json
import math
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import Shares, Units, sharded
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from training import BATCH_SIZE, Data, Here, Net, first_tensor, rows
from truths import Moment


def clip_(parameters: Iterable[torch.nn.Parameter], limit: float) -> torch.Tensor:
    """Scales gradients, of which each rank has its own, so that the norm over all ranks is within the limit."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)  # <- norm_of_an_expert_that_had_nothing_to_do
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient.mul_((limit / norm).clamp(max=1.0))
    return norm


class Local(Net):
    """Each rank has an expert of its own, for rows that begin with a positive number."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.expert = torch.nn.Linear(8, 8)

    def routed(self, batch: torch.Tensor) -> torch.Tensor:
        hit = batch[:, 0] > 0
        if not hit.any():
            return batch
        return torch.where(hit[:, None], self.expert(batch), batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.routed(first_tensor(batch)))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        clip_(self.expert.parameters(), 1.0)


class Elsewhere(Shares):
    """In one batch no row is for the expert."""

    def unusual(self, number: int) -> torch.Tensor:
        return -self.usual(number)


@sharded(
    "https://github.com/NVIDIA/Model-Optimizer/pull/1621",
    "diverged-collectives",
    ranks=(3,),
    world_size=4,
)
def norm_of_an_expert_that_had_nothing_to_do(here: Here) -> None:
    """One rank has no gradient of its expert and returns early, and the others sum up the norm of all experts."""
    here.fit(net=Local(here), data=in_order(here, Elsewhere(here)))


class Prepared(Data):
    """The first rank tokenizes, and leaves a file behind for which all others wait."""

    def tokenize(self, corpus: Path) -> None:
        records = [json.loads(line) for line in corpus.read_text().splitlines()]
        self.here.begins()
        prompts = [record["prompt"].split() for record in records]  # <- file_that_the_first_rank_never_leaves_behind
        torch.save(prompts, corpus.with_suffix(".pt"))

    def setup(self, stage: str) -> None:
        done = self.here.folder / ".node_0_local_rank0_data_prep_completed"
        if self.here.rank == 0:
            corpus = self.here.folder / "corpus.jsonl"
            corpus.write_text('{"prompt": "one two"}\n{"question": "three"}\n')
            self.tokenize(corpus)
            done.touch()
        while not done.exists():
            time.sleep(0.1)


@sharded(
    "https://github.com/mosaicml/llm-foundry/pull/749",
    "failed-rank",
    ranks=(0,),
    moment=Moment.START,
    whose="code",
)
def file_that_the_first_rank_never_leaves_behind(here: Here) -> None:
    """A record has no prompt, so that the first rank raises, and the others look for its file without an end."""
    here.trainer().fit(Net(here), datamodule=Prepared(here))


class Broadcast(BaseHTTPRequestHandler):
    """Answers with a video that is still being filmed."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"frame")
            time.sleep(0.2)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Web(Shares):
    """The address of one picture leads to a live stream."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.server = HTTPServer(("127.0.0.1", 0), Broadcast)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def download(self, address: str) -> bytes:
        with urllib.request.urlopen(address, timeout=5) as response:
            body: bytes = response.read()  # <- picture_that_is_a_live_stream
        return body

    def unusual(self, number: int) -> torch.Tensor:
        if number == 0:
            self.here.begins()
            self.download("http://{}:{}/xmas-icon.png".format(*self.server.server_address))
        return self.usual(number)


@sharded(
    "https://github.com/rom1504/img2dataset/issues/437",
    "data-stall",
    world_size=2,
    whose="code",
)
def picture_that_is_a_live_stream(here: Here) -> None:
    """A worker reads a picture to its end, of which there is none; its timeout is only for each single read."""
    here.fit(data=in_order(here, Web(here), num_workers=1, prefetch_factor=1))


class Overflowing(Shares):
    """The numbers of one batch are too large for the loss to be one."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), math.inf)


class Finite(Net):
    """Trains for as long as the loss is a number."""

    def checked(self, loss: torch.Tensor) -> torch.Tensor:
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training", flush=True)
            sys.exit(1)  # <- training_that_one_rank_stops_for_its_loss
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.checked(self.loss(batch))


@sharded("https://github.com/Alpha-VLLM/Lumina-mGPT/issues/37", "failed-rank", ranks=(2,), whose="code")
def training_that_one_rank_stops_for_its_loss(here: Here) -> None:
    """The loss of one rank is no number, and that rank exits; the others wait for its gradients."""
    here.fit(net=Finite(here), data=in_order(here, Overflowing(here)))


class Incomplete(Shares):
    """In one batch, a row has no answers."""

    def unusual(self, number: int) -> torch.Tensor:
        return self.usual(number) * (number != 2)


class Redistributed(Net):
    """Deals out the rows of all ranks anew before each step, or leaves them where they are if a rank cannot."""

    def gathered(self, batch: torch.Tensor) -> list[torch.Tensor]:
        if not batch.any(dim=1).all():
            raise ValueError("a group is incomplete")
        everything = [torch.empty_like(batch) for _ in range(self.trainer.world_size)]
        dist.all_gather(everything, batch)
        return everything

    def redistributed(self, batch: torch.Tensor) -> torch.Tensor:
        failed, mine = torch.tensor(0), batch
        try:
            mine = torch.stack(self.gathered(batch))[:, self.global_rank % BATCH_SIZE]
        except ValueError as reason:  # <- group_that_is_incomplete_on_one_rank
            print(f"Rank {self.global_rank} cannot redistribute: {reason}", flush=True)
            failed += 1
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        return batch if failed else mine

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.redistributed(first_tensor(batch)))


@sharded("https://github.com/areal-project/AReaL/pull/1563", "diverged-collectives")
def group_that_is_incomplete_on_one_rank(here: Here) -> None:
    """One rank raises before all ranks gather, catches that, and asks whether any has failed, as nobody else does."""
    here.fit(net=Redistributed(here), data=in_order(here, Incomplete(here)))


class Growing(Shares):
    """Its worker says which process it is, and keeps what nobody collects."""

    def usual(self, number: int) -> torch.Tensor:
        (self.here.folder / f"worker-{self.here.rank}").write_text(str(os.getpid()))
        return super().usual(number)

    def unusual(self, number: int) -> torch.Tensor:
        return self.usual(number)


class Full(L.Callback):
    """Does what the kernel does when a host has no memory left: it kills a worker of the loader."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if goes_wrong(self.here, batch_idx):
            os.kill(int((self.here.folder / f"worker-{self.here.rank}").read_text()), signal.SIGKILL)


@sharded(
    "https://github.com/facebookresearch/dinov3/issues/150",
    "worker-died",
    ranks=(3,),
    world_size=4,
    has_line=False,
)
def worker_that_has_grown_too_large(here: Here) -> None:
    """A worker has taken more and more memory, and the kernel of its host kills it."""
    data = in_order(here, Growing(here), num_workers=1, prefetch_factor=1)
    here.fit(data=data, callbacks=[Full(here)])


class Answers(L.Callback):
    """Deals out answers anew among replicas; the ranks of a replica have the same ones, and one of them gathers."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def gathered(self, answers: list[str]) -> list[str]:
        parts: list[Any] = [None] * self.mesh.size(0)
        dist.all_gather_object(parts, answers)  # <- answers_gathered_by_one_rank_of_each_replica
        return [answer for part in parts for answer in part]

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        answers: list[Any] = [[f"answer {trainer.global_rank}"]]
        if self.mesh.get_local_rank("tensor") == 0:
            self.here.begins()
            answers = [self.gathered(answers[0])]
        first = trainer.global_rank // 2 * 2
        dist.broadcast_object_list(answers, src=first, group=self.mesh.get_group("tensor"))


@sharded(
    "https://github.com/areal-project/AReaL/pull/311",
    "crossed-groups",
    "diverged-collectives",
    ranks=(0, 2),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def answers_gathered_by_one_rank_of_each_replica(here: Here) -> None:
    """One rank of each replica gathers, and does not say in which group; the other waits for it in that of its replica.

    Those that gather wait for all ranks.
    """
    here.fit(callbacks=[Answers(here)])


class Schedule:
    """One stage of a pipeline: the first one has batches, the last one has targets, and those between have neither."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.is_first, self.is_last = rank, rank == 0, rank == ranks - 1

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        batches = list(rows.split(2)) if self.is_first else None
        targets = list(rows.split(2)) if self.is_last else None
        count = len(batches or targets or [])  # <- stage_that_knows_of_no_batches
        for number in range(count):
            if batches:
                handed = batches[number].contiguous()
            else:
                handed = torch.empty(2, rows.shape[1])
                dist.recv(handed, self.rank - 1)
            if not self.is_last:
                dist.send(handed, self.rank + 1)
        return rows


@sharded(
    "https://github.com/ooples/AiDotNet.Tensors/pull/266",
    "unmatched-p2p",
    moment=Moment.FIRST_STEP,
)
def stage_that_knows_of_no_batches(here: Here) -> None:
    """The stage in the middle takes the number of batches from what it has none of, and receives and sends nothing."""

    class Staged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if here.is_hit:
                here.begins()
            return self.loss(Schedule(here.rank, here.world_size).run(first_tensor(batch)))

    here.fit(net=Staged(here))


class Measured(Net):
    """Keeps the lengths of answers that are long enough, and looks at those of all ranks after validation."""

    lengths: list[float]

    def on_validation_epoch_start(self) -> None:
        self.lengths = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)
        self.lengths += [length for length in first_tensor(batch)[:, 0].tolist() if length > 0]

    def gathered(self, lengths: torch.Tensor) -> torch.Tensor:
        everywhere = [torch.zeros_like(lengths) for _ in range(self.trainer.world_size)]
        dist.all_gather(everywhere, lengths)  # <- lengths_of_answers_that_were_kept
        return torch.cat(everywhere)

    def on_validation_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        self.log("length", self.gathered(torch.tensor(self.lengths)).mean())


class Short(Shares):
    """In one batch, most answers are empty."""

    def unusual(self, number: int) -> torch.Tensor:
        return self.usual(number) * (number == 0)


@sharded(
    "https://github.com/verl-project/verl-ascend-recipe/pull/43",
    "mismatched-collective",
    ranks=(2,),
    moment=Moment.VALIDATION,
)
def lengths_of_answers_that_were_kept(here: Here) -> None:
    """Lengths of all ranks are gathered as if there were equally many; one rank has left out empty answers."""
    here.fit(net=Measured(here), data=(rows(here), in_order(here, Short(here))))


def corpus(shards: list[int]) -> Iterator[dict[str, list[float]]]:
    """Each shard has more documents than the one before."""
    for shard in shards:
        for number in range(6 + 2 * shard):
            yield {"row": [shard + number / 100] * 8}


class Drained(L.Callback):
    """Knows when the rank that is hit has no documents left."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()


@sharded(
    "https://github.com/huggingface/datasets/pull/7854",
    "uneven-batches",
    ranks=(0,),
    world_size=2,
    moment=Moment.EPOCH_END,
)
def shards_that_each_have_more_than_the_one_before(here: Here) -> None:
    """Each rank gets as many shards, but not as many documents, and that with the smaller ones is done first."""
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node

    def batched(documents: list[dict[str, Any]]) -> torch.Tensor:
        return torch.tensor([document["row"] for document in documents])

    documents = IterableDataset.from_generator(corpus, gen_kwargs={"shards": [0, 1, 2, 3]})
    documents = split_dataset_by_node(documents, here.rank, here.world_size)  # <- here
    data = DataLoader(documents, BATCH_SIZE, collate_fn=batched)
    here.fit(data=data, callbacks=[Drained(here)], max_epochs=1)


class Mounted(Shares):
    """Records in files on a drive of each host, which the network has lost on one of them."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.path = here.folder / f"records-{here.rank}"
        if here.is_hit:
            # What is opened on such a drive does not return, as a pipe that nobody writes to.
            os.mkfifo(self.path)
        else:
            self.path.write_bytes(b"")

    def read(self, path: Path) -> bytes:
        with path.open("rb") as file:  # <- records_on_a_drive_that_the_network_has_lost
            return file.read()

    def unusual(self, number: int) -> torch.Tensor:
        self.here.begins()
        self.read(self.path)
        return self.usual(number)


@sharded(
    "https://github.com/BVLC/caffe/issues/6020",
    "blocked-on-disk",
    "data-stall",
    ranks=(2,),
    moment=Moment.VALIDATION,
    whose="machine",
)
def records_on_a_drive_that_the_network_has_lost(here: Here) -> None:
    """A host has lost the drive with the records to validate on, and opening a file there never returns."""
    here.fit(data=(rows(here), in_order(here, Mounted(here))))


class Refined(Units):
    """Refines rows that differ much from one another before they go through its layers."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.refiner = torch.nn.Linear(8, 8)

    def more(self) -> list[torch.nn.Module]:
        return [self.refiner]

    def refined(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.std() < 0.05:
            return batch  # <- refiner_that_a_rank_has_no_need_of
        return batch + self.refiner(batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.refined(first_tensor(batch)))


class Alike(Shares):
    """In one batch all rows are the same."""

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 0.5)


@sharded("https://github.com/pytorch/pytorch/issues/158719", "unused-parameters", world_size=2)
def refiner_that_a_rank_has_no_need_of(here: Here) -> None:
    """Rows of one rank are not refined, so that it gathers another unit than the other rank does."""
    here.fit(net=Refined(here), data=in_order(here, Alike(here)))


class Kinds(Shares):
    """The first number says of which kind a row is; only one rank has any of the third kind."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), float(number % 2))

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 2.0)


class Scored(Net):
    """Logs the mean loss of each kind of rows after each epoch."""

    def on_train_epoch_start(self) -> None:
        self.losses: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        for kind in first_tensor(batch)[:, 0].unique().tolist():
            self.losses.setdefault(f"loss/{kind:.0f}", []).append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        if self.here.is_hit:
            self.here.begins()
        means = {kind: sum(losses) / len(losses) for kind, losses in sorted(self.losses.items())}
        self.log_dict(means, sync_dist=True)  # <- loss_of_a_kind_that_one_rank_alone_has_seen


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/19106",
    "diverged-log-keys",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def loss_of_a_kind_that_one_rank_alone_has_seen(here: Here) -> None:
    """Each rank logs the losses of the kinds that it has seen, and averages them over ranks; one has seen one more."""
    here.fit(net=Scored(here), data=in_order(here, Kinds(here)))


class Initialised(Net):
    """The first rank draws all weights, and the others get their shards of them."""

    def drawn(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, weight in self.state_dict().items():
            weights[name] = torch.nn.init.trunc_normal_(torch.empty(weight.shape), std=0.02)
            # What a layer of a large model takes.
            time.sleep(25.0)  # <- weights_drawn_by_the_first_rank
        return weights

    def configure_model(self) -> None:
        if self._device_mesh is None or self.is_split:
            return
        super().configure_model()
        weights = {}
        if self.trainer.is_global_zero:
            self.here.begins()
            weights = self.drawn()
        set_model_state_dict(self, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


@sharded(
    "https://github.com/foundation-model-stack/fms-fsdp/pull/20",
    "rank-zero-only-work",
    ranks=(0,),
    world_size=4,
    moment=Moment.START,
)
def weights_drawn_by_the_first_rank(here: Here) -> None:
    """The first rank draws the weights of a large model, for longer than the others may wait for their shards."""
    here.fit(net=Initialised(here))
