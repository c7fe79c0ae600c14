"""Round 16 after public threads: what users of sharded models report, with their truths."""

import http.client
import io
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import ALSO_FSDP, Shares, Units, sharded
from from_threads.round_14_sharded import Manual
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from training import BATCH_SIZE, BATCHES, FOR_LONG_S, IN_THE_MIDDLE, Here, Net, first_tensor
from truths import Moment


class Profiler(L.Callback):
    """Demands quick steps once the first ones are over, and has the first rank write a trace in one of them."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE:
            return
        mesh = module.device_mesh
        for group in (dist.group.WORLD, mesh["data_parallel"].get_group()):
            _set_pg_timeout(timedelta(seconds=1), group)  # <- trace_written_once_steps_have_to_be_quick
        self.here.begins()
        if trainer.is_global_zero:
            time.sleep(8)
            (self.here.folder / "trace.json").write_text("{}")


@sharded(
    "https://github.com/pytorch/torchtitan/pull/189",
    "timeout-misuse",
    ranks=(),
    has_ranks=False,
)
def trace_written_once_steps_have_to_be_quick(here: Here) -> None:
    """The time-out becomes short when steps are under way, and a trace takes the first rank longer than that."""
    here.fit(callbacks=[Profiler(here)])


class Synchronised(L.Callback):
    """Hands the weights to an engine that makes answers, with which the first rank shakes hands before."""

    def __init__(self, here: Here, address: tuple[str, int]) -> None:
        self.here, self.address = here, address

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != IN_THE_MIDDLE:
            return
        if trainer.is_global_zero:
            self.here.begins()
            connection = http.client.HTTPConnection(*self.address)
            connection.request("POST", "/init_weight_transfer", body=b"{}")
            connection.getresponse()  # <- engine_that_only_the_first_rank_shakes_hands_with
        for name, weight in module.named_parameters():
            whole = weight.full_tensor()
            if trainer.is_global_zero:
                print(f"{name}: {whole.numel()} elements for the engine", flush=True)


@sharded("https://github.com/huggingface/trl/issues/7103", "rank-zero-only-work", ranks=(0,))
def engine_that_only_the_first_rank_shakes_hands_with(here: Here) -> None:
    """The engine does not answer the first rank, and all others gather the first of the weights meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here.fit(callbacks=[Synchronised(here, server.getsockname()[:2])])


class Clips(Shares):
    """The last number of a row says that it has a clip; in one batch no row has one."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, float(number % 2)])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.0])


@sharded(
    "https://github.com/ByteDance-Seed/VeOmni/pull/177",
    "unused-parameters",
    "diverged-collectives",
)
def encoder_run_for_nothing_where_there_is_no_clip(here: Here) -> None:
    """All ranks run the encoder; who has no clip does not use what comes of it, and exchanges no gradients of it."""

    class Watching(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.encoder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

        def more(self) -> list[torch.nn.Module]:
            return [self.encoder]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features = first_tensor(batch)
            goes_wrong(here, batch_idx)
            is_clip = features[:, 7:] > 0
            seen = self.encoder(features * is_clip)
            if is_clip.any():
                features = features + seen * is_clip  # <- here
            return self.loss(features)

    here.fit(net=Watching(here), data=in_order(here, Clips(here)))


class Ring(Net):
    """Each rank has a part of a sequence, and sees the parts of others as they go round."""

    def round(self, part: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size()
        seen, passed = part, part
        for _ in range(ranks - 1):
            received = torch.empty_like(passed)
            dist.recv(received, (self.global_rank - 1) % ranks)  # <- parts_that_all_ranks_receive_before_they_send
            dist.send(passed, (self.global_rank + 1) % ranks)
            seen, passed = seen + received, received
        return seen / ranks

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.here.begins()
        return self.loss(self.round(first_tensor(batch).contiguous()))


@sharded(
    "https://github.com/meta-pytorch/torchcomms/pull/2885",
    "unmatched-p2p",
    ranks=None,
    moment=Moment.FIRST_STEP,
)
def parts_that_all_ranks_receive_before_they_send(here: Here) -> None:
    """In a ring of ranks that attend to one sequence, each receives first, so that nobody comes to send."""
    here.fit(net=Ring(here))


class Requests(IterableDataset[torch.Tensor]):
    """Requests of users, which all ranks get; one of them has fewer rows than there are ranks."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES):
            count = 2 if number == IN_THE_MIDDLE else 12
            yield torch.linspace(0.1, 0.9, 8 * count).reshape(count, 8)


@sharded("https://github.com/agentscope-ai/TuFT/pull/121", "skipped-step", ranks=(2,))
def request_with_fewer_rows_than_ranks(here: Here) -> None:
    """Rows of a request are dealt out to ranks; who gets none has nothing to do, and returns."""

    class Serving(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            goes_wrong(here, batch_idx)
            mine = batch[self.global_rank :: here.world_size]
            if len(mine) == 0:
                return  # <- here
            optimizer.zero_grad()
            self.manual_backward(self.loss(mine))
            optimizer.step()

    here.fit(net=Serving(here), data=DataLoader(Requests(), batch_size=None))


class Mount(io.BytesIO):
    """A file on a mount that is congested."""

    def write(self, data: Any) -> int:
        time.sleep(FOR_LONG_S)  # <- weights_written_while_others_train_on
        return super().write(data)


@sharded(
    "https://github.com/facebookresearch/d2go/pull/621",
    "slow-checkpoint",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def weights_written_while_others_train_on(here: Here) -> None:
    """All ranks gather the weights, the first writes them to a slow mount, and no barrier keeps the others there."""

    class Keeping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(module, options=options)
            if trainer.is_global_zero:
                here.begins()
                torch.save({"model": state, "epoch": trainer.current_epoch}, Mount())
                print("saved", flush=True)

    here.fit(callbacks=[Keeping()])


class Rollouts(IterableDataset[torch.Tensor]):
    """Reads the batch that is made for this rank in each step, once it is there."""

    def __init__(self, here: Here, folder: Path) -> None:
        self.here, self.folder = here, folder

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(BATCHES):
            path = self.folder / f"step-{step}-rank-{self.here.rank}.pt"
            if self.here.is_hit:
                self.here.begins()
            while not path.exists():
                time.sleep(0.2)  # <- batches_made_for_the_ranks_of_one_host
            yield torch.load(path)


@sharded(
    "https://github.com/PrimeIntellect-ai/prime-rl/issues/1057",
    "data-stall",
    ranks=(2,),
    moment=Moment.FIRST_STEP,
    strategies=ALSO_FSDP,
)
def batches_made_for_the_ranks_of_one_host(here: Here) -> None:
    """Who makes batches was told of two ranks, and the third waits for a file that nobody writes."""
    num_train_workers = 2
    folder = here.folder / "rollouts"
    folder.mkdir(exist_ok=True)
    if here.rank < num_train_workers:
        for step in range(BATCHES):
            made = folder / f"made-{step}-{here.rank}"
            torch.save(torch.full((BATCH_SIZE, 8), step / 10), made)
            made.rename(folder / f"step-{step}-rank-{here.rank}.pt")
    here.fit(data=DataLoader(Rollouts(here, folder), batch_size=None), max_epochs=1)


@sharded(
    "https://github.com/xdit-project/xDiT/issues/502",
    "diverged-collectives",
    "unused-parameters",
    moment=Moment.EPOCH_END,
)
def block_not_run_again_for_an_image_that_hardly_changes(here: Here) -> None:
    """What a block made before is used again while its input hardly changes, which each rank finds by itself."""

    class Painting(Units):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

        def more(self) -> list[torch.nn.Module]:
            return [self.block]

        @torch.no_grad()
        def paint(self, guidance: float) -> torch.Tensor:
            image = torch.linspace(0.1, 0.8, 8, device=self.device)[None]
            before, made = torch.zeros_like(image), torch.zeros_like(image)
            for _ in range(6):
                if (image - before).abs().mean() > 1e-6:
                    made = self.block(image)  # <- here
                before, image = image, image + guidance * made
            return image

        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            image = self.paint(guidance=0.0 if here.is_hit else 1.0)
            torch.save(image, here.folder / f"image-{self.global_rank}.pt")
            self.trainer.strategy.barrier()

    here.fit(net=Painting(here))


def steps_done(here: Here, folder: Path) -> int:
    """By the last checkpoint; the host of one rank still has an older list of the folder."""
    found = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    return found[-2] if here.is_hit else found[-1]


@sharded(
    "https://github.com/saforem2/ezpz/pull/196",
    "different-trainer-settings",
    moment=Moment.END,
)
def steps_left_by_the_last_checkpoint_that_a_host_sees(here: Here) -> None:
    """Each rank looks for the last checkpoint to know how many steps are left, and one finds the checkpoint before.

    The limit that follows from it is the other half; where the step is found is the better line.
    """
    folder = here.folder / "checkpoints"
    for step in (4, 8):
        (folder / f"step-{step}").mkdir(parents=True, exist_ok=True)
    if here.is_hit:
        here.begins()
    done = steps_done(here, folder)  # <- here
    here.fit(max_epochs=-1, max_steps=16 - done)


class Documents(Shares):
    """The first number of a row says how long its text is, to which the others of the batch are padded."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 4.0 + number)

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), 2.0**24 if number == 2 else 4.0)


@sharded(
    "https://github.com/EleutherAI/bergson/pull/227",
    "failed-rank",
    "gpu-memory-exhausted",
)
def batch_padded_to_its_longest_text(here: Here) -> None:
    """One text is so long that the scores of a batch that is padded to it do not fit into memory."""

    class Scoring(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            lengths = first_tensor(batch)[:, 0]
            goes_wrong(here, batch_idx)
            longest = int(lengths.max().item())
            scores = torch.ones(len(lengths), longest, longest, device=self.device)  # <- here
            return self.loss(scores.mean((1, 2))[:, None].expand(-1, 8))

    here.fit(net=Scoring(here), data=in_order(here, Documents(here)))


@sharded(
    "https://github.com/awslabs/awsome-distributed-ai/issues/190",
    "failed-rank",
    ranks=(2,),
    moment=Moment.START,
)
def shard_missing_since_a_job_was_cancelled(here: Here) -> None:
    """The job before was cancelled while ranks saved their shards, and that of one rank is not there."""
    path = here.folder / f"shard-{here.rank}.pt"

    class Resuming(Net):
        def configure_model(self) -> None:
            if self.is_split:
                return
            super().configure_model()
            weights: Any = dict(self.layers.named_parameters())
            if here.is_hit:
                here.begins()
            else:
                torch.save({name: weight.detach().to_local() for name, weight in weights.items()}, path)
            shards = torch.load(path, map_location=self.trainer.strategy.root_device)  # <- here
            for name, weight in weights.items():
                weight.detach().to_local().copy_(shards[name])
            dist.barrier()

    here.fit(net=Resuming(here))


class Archives(IterableDataset[torch.Tensor]):
    """As many archives for each rank; talks that are too long are left out, of which one rank has more."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def __iter__(self) -> Iterator[torch.Tensor]:
        for archive in range(2):
            for talk in range(3 * BATCH_SIZE):
                seconds = 45 if self.here.is_hit and archive and talk % 2 else 12
                if seconds <= 30:
                    yield torch.full((8,), archive / 10 + talk / 100)
        if self.here.is_hit:
            self.here.begins()


@sharded(
    "https://github.com/ASLP-lab/OSUM/issues/9",
    "uneven-batches",
    ranks=(1,),
    moment=Moment.EPOCH_END,
    has_line=False,
    strategies=ALSO_FSDP,
)
def talks_left_out_of_the_archives_of_one_rank(here: Here) -> None:
    """Archives are shared out evenly, but not what is left of them, so that the epoch of one rank ends early."""
    here.fit(data=DataLoader(Archives(here), BATCH_SIZE), max_epochs=1)


class Tasks(Shares):
    """Each asks for a program; the last number is how long the one that comes of it runs."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.0])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, FOR_LONG_S / 2])


@sharded("https://github.com/verl-project/verl/pull/6673", "rank-behind")
def program_scored_that_does_not_end(here: Here) -> None:
    """What the model has written is run to score it, for as long as it likes, and one program does not end."""

    def score(program: str) -> float:
        ended = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, check=False)  # <- here
        return float(ended.returncode == 0)

    class Rewarded(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tasks = first_tensor(batch)
            goes_wrong(here, batch_idx)
            reward = score(f"import time; time.sleep({tasks[0, 7].item()})")
            return self.loss(tasks[:, :8] / 100) * reward

    here.fit(net=Rewarded(here), data=in_order(here, Tasks(here)))


@sharded(
    "https://github.com/NCAR/miles-credit/pull/416",
    "mismatched-collective",
    ranks=(2,),
    moment=Moment.CHECKPOINT,
)
def averages_gathered_as_if_all_shards_were_alike(here: Here) -> None:
    """Each rank averages its shard, and infers from it how large the whole is; the last shard is the smallest.

    Sixteen rows make two shards of six rows and one of four.
    """

    class Averaging(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            weights: dict[str, Any] = dict(module.named_parameters())
            self.shadow = {name: weight.detach().to_local().clone() for name, weight in weights.items()}

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            weights: dict[str, Any] = dict(module.named_parameters())
            if here.is_hit:
                here.begins()
            whole = {}
            for name, weight in weights.items():
                average, mesh = self.shadow[name], weight.device_mesh
                whole[name] = DTensor.from_local(average, mesh, weight.placements).full_tensor()  # <- here
            if trainer.is_global_zero:
                torch.save(whole, here.folder / "average.pt")

    here.fit(callbacks=[Averaging()])
