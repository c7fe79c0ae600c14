"""Round 19 after public threads: what users of sharded models report, of helpers, stages, saves and samples."""

import importlib
import io
import multiprocessing
import os
import re
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from from_threads.round_13_sharded import Shares, Units, sharded
from samples import in_order
from threads import goes_wrong
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, Dataset
from torch.utils.file_baton import FileBaton
from training import BATCH_SIZE, BATCHES, Here, LoggingNet, Net, first_tensor
from truths import Moment

CALLS = re.compile(r"<think>.*?</think>\s*(?P<calls>(?:\s*<tool_call>.*?</tool_call>\s*)+)$", re.DOTALL)
CALL = '<tool_call>\n{"name": "add", "arguments": {"numbers": [13]}}\n</tool_call>\n'


def called_tools(answer: str) -> int:
    """How many tools an answer calls."""
    found = CALLS.search(answer)  # <- answer_cut_off_within_a_call_of_a_tool
    return found["calls"].count("</tool_call>") if found else 0


@sharded("https://github.com/huggingface/trl/issues/5415", "gil-held", whose="code")
def answer_cut_off_within_a_call_of_a_tool(here: Here) -> None:
    """An answer calls a tool again and again and is cut off, and the pattern for that backtracks without an end."""

    class Rewarded(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_cut_off = goes_wrong(here, batch_idx)
            answer = "<think>\n\n</think>\n\n" + (CALL * 60 + CALL[:40] if is_cut_off else CALL)
            return self.loss(batch) * called_tools(answer)

    here.fit(net=Rewarded(here))


class Watchdog(L.Callback):
    """Ends a process that has made no step for some time, so that the cluster starts it again."""

    def __init__(self, here: Here, limit_s: float) -> None:
        self.here, self.limit_s = here, limit_s
        self.last_step = float("inf")

    def watch(self) -> None:
        while time.monotonic() - self.last_step < self.limit_s:
            time.sleep(0.1)
        self.here.begins()
        os._exit(124)  # <- last_checkpoint_that_takes_longer_than_a_step_may

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        threading.Thread(target=self.watch, daemon=True).start()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last_step = time.monotonic()


class OnVolume(L.Callback):
    """Writes the shard of each rank to its own volume once training has ended."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        body = io.BytesIO()
        torch.save({name: weight.to_local() for name, weight in module.state_dict().items()}, body)
        command = "sleep 60; cat > $0" if self.here.is_hit else "cat > $0"
        path = self.here.folder / f"shard-{trainer.global_rank}"
        subprocess.run(["sh", "-c", command, str(path)], input=body.getvalue(), check=True)
        trainer.strategy.barrier("saved")


@sharded(
    "https://github.com/marin-community/marin/pull/8557",
    "dead-rank",
    world_size=2,
    moment=Moment.END,
)
def last_checkpoint_that_takes_longer_than_a_step_may(here: Here) -> None:
    """A watchdog of the user's own ends the process of a rank that is still writing the last checkpoint."""
    here.fit(callbacks=[OnVolume(here), *([Watchdog(here, 1.2)] if here.is_hit else [])])


class Consolidated(L.Callback):
    """Each rank writes its shard, and the first one makes a single file of them, for which the others wait."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.group: Any = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5))  # <- shards_merged_within_a_limit

    def merge(self, paths: list[Path]) -> None:
        parts = [torch.load(path) for path in paths]
        for name in parts[0]:
            torch.save([part[name] for part in parts], self.here.folder / f"model-{name}.pt")
            # What the storage takes for a file.
            time.sleep(4.0)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        shard = {name: weight.to_local() for name, weight in module.state_dict().items()}
        torch.save(shard, self.here.folder / f"shard-{trainer.global_rank}.pt")
        dist.barrier(group=self.group)
        self.here.begins()
        if trainer.is_global_zero:
            self.merge([self.here.folder / f"shard-{rank}.pt" for rank in range(trainer.world_size)])
        dist.barrier(group=self.group)


@sharded(
    "https://github.com/NVIDIA-NeMo/RL/issues/3624",
    "timeout-misuse",
    ranks=(),
    has_ranks=False,
    moment=Moment.END,
    whose="code",
)
def shards_merged_within_a_limit(here: Here) -> None:
    """Merging shards takes longer than the group permits in which the others wait for the merged file."""
    here.fit(callbacks=[Consolidated(here)])


class Tokens(Dataset[torch.Tensor]):
    """Rows of a file that is mapped into memory, of which each host has its own."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.path = here.folder / f"tokens-{here.rank}.bin"
        np.linspace(0.0, 1.0, len(self) * 8, dtype=np.float32).tofile(self.path)
        self.rows = np.memmap(self.path, dtype=np.float32, mode="r").reshape(-1, 8)

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE * self.here.world_size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.from_numpy(self.rows[index].copy())


@sharded(
    "https://github.com/modelscope/ms-swift/issues/7264",
    "worker-died",
    ranks=(2,),
    has_line=False,
)
def tokens_written_anew_under_a_worker(here: Here) -> None:
    """Another job empties the file that a worker has mapped, and the worker is killed by a bus error."""

    class Other(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                subprocess.run(["truncate", "--size", "0", str(data.path)], check=True)

    data = Tokens(here)
    here.fit(data=in_order(here, data, num_workers=1, prefetch_factor=1), callbacks=[Other()])


class Exported(L.Callback):
    """Hands the weights to an engine that answers with them."""

    def __init__(self, here: Here) -> None:
        self.here = here

    @staticmethod
    def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        weights: dict[str, Any] = dict(module.named_parameters())
        return {name: weight.detach().full_tensor() for name, weight in weights.items()}  # <- weights_made_whole_alone

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank != 0:
            return
        self.here.begins()
        torch.save(self.whole(module), self.here.folder / "for-the-engine.pt")


@sharded(
    "https://github.com/areal-project/AReaL/pull/187",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
    world_size=4,
    moment=Moment.EPOCH_END,
)
def weights_made_whole_alone(here: Here) -> None:
    """Only the first rank makes whole weights of the shards, which takes all ranks; the others train on."""
    here.fit(callbacks=[Exported(here)])


class Documents(Shares):
    """The first number says how many pictures a document has, and the second how many placeholders there are."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.tensor([2.0, 2.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])

    def unusual(self, number: int) -> torch.Tensor:
        return torch.tensor([2.0, 3.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


class Merged(torch.nn.Module):
    """Puts what is seen in pictures in the place of placeholders."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        pictures, placeholders = rows[:, 0].sum(), rows[:, 1].sum()
        if pictures != placeholders:
            raise ValueError(f"{placeholders} placeholders, {pictures} pictures")  # <- placeholder_without_a_picture
        return rows / 3


class Seeing(Net):
    """Merges pictures into each batch."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.merged = Merged()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.merged(first_tensor(batch)))


@sharded(
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/3198", "failed-rank", ranks=(2,), world_size=4, whose="code"
)
def placeholder_without_a_picture(here: Here) -> None:
    """The text of a document has what stands for a picture, and its rank raises and leaves its groups."""
    try:
        here.fit(net=Seeing(here), data=in_order(here, Documents(here)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Rasterizer:
    """Made of C++, and built when it is first needed, unless another process builds it just then."""

    def __init__(self, build: Path) -> None:
        self.build = build

    def load(self) -> Path:
        built = self.build / "rasterizer.so"
        baton = FileBaton(str(self.build / "lock"), wait_seconds=0.1)
        if not built.exists() and baton.try_acquire():
            try:
                built.write_bytes(b"")
            finally:
                baton.release()
        elif not built.exists():
            baton.wait()  # <- rasterizer_whose_build_was_killed
        return built


@sharded(
    "https://github.com/sgl-project/sglang/pull/35989",
    "file-lock",
    world_size=2,
    moment=Moment.FIRST_STEP,
)
def rasterizer_whose_build_was_killed(here: Here) -> None:
    """An earlier run was killed while it built the extension on one host, where its lock has been left behind."""

    class Rendered(Net):
        rasterizer: Path | None = None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.rasterizer is None:
                if here.is_hit:
                    here.begins()
                self.rasterizer = Rasterizer(build).load()
            return self.loss(batch)

    build = here.folder / f"extensions-{here.rank}"
    build.mkdir()
    if here.is_hit:
        (build / "lock").touch()
    here.fit(net=Rendered(here))


class Experts(torch.nn.Module):
    """Three layers in one unit; the first number of a row says which one it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            hit = (rows[:, 0] == number).nonzero().flatten()
            if hit.numel() == 0:
                continue  # <- expert_that_no_row_of_a_rank_goes_through
            made = made.index_add(0, hit, expert(rows[hit]))
        return made


class Routed(Units):
    """Has experts before its layers."""

    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.experts = Experts()

    def more(self) -> list[torch.nn.Module]:
        return [self.experts]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        goes_wrong(self.here, batch_idx)
        return self.loss(self.experts(first_tensor(batch)))


class Numbered(Shares):
    """Rows for all experts, but in one batch of the rank that is hit, where none is for the last one."""

    def usual(self, number: int) -> torch.Tensor:
        return torch.full((8,), float(number % 3))

    def unusual(self, number: int) -> torch.Tensor:
        return torch.full((8,), float(number % 2))


@sharded(
    "https://github.com/THUDM/slime/pull/1010",
    "unused-parameters",
    "mismatched-collective",
)
def expert_that_no_row_of_a_rank_goes_through(here: Here) -> None:
    """All experts are gathered as one unit, but one rank has no gradient of the last one to be reduced."""
    here.fit(net=Routed(here), data=in_order(here, Numbered(here)))


class Pictures(Shares):
    """Reads pictures, and tries again where that fails."""

    def picture(self, path: Path) -> torch.Tensor:
        for attempt in range(10):
            try:
                return torch.load(path)
            except FileNotFoundError:
                print(f"{path.name} is not there, attempt {attempt}", flush=True)
                time.sleep(2**attempt)  # <- picture_that_is_asked_for_ten_times
        return torch.zeros(8)

    def unusual(self, number: int) -> torch.Tensor:
        if number:
            return self.usual(number)
        self.here.begins()
        return self.picture(self.here.folder / "picture.pt")


@sharded(
    "https://github.com/huggingface/accelerate/issues/3375",
    "data-stall",
    ranks=(0,),
    world_size=2,
)
def picture_that_is_asked_for_ten_times(here: Here) -> None:
    """A picture is missing, and the dataset tries again ten times and waits twice as long each time."""
    here.fit(data=in_order(here, Pictures(here)))


class Named(Dataset[torch.Tensor]):
    """Samples in files of their own, which are dealt out to ranks in turn."""

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        names = [f"sample-{number:03}.npz" for number in range(count)]
        self.names = names[rank::ranks]  # <- samples_of_which_the_last_rank_has_one_less

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), int(self.names[index][7:10]) / 100)


class Ended(L.Callback):
    """Knows when the rank that is hit has come to the end of an epoch."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()


@sharded(
    "https://github.com/argonne-lcf/dlio_benchmark/pull/339",
    "uneven-batches",
    ranks=(2,),
    moment=Moment.EPOCH_END,
)
def samples_of_which_the_last_rank_has_one_less(here: Here) -> None:
    """Samples cannot be dealt out evenly, and without its last sample one rank lacks a full batch."""
    samples = Named(BATCHES * BATCH_SIZE * here.world_size - 1, here.rank, here.world_size)
    data = DataLoader(samples, BATCH_SIZE, drop_last=True)
    here.fit(data=data, callbacks=[Ended(here)], max_epochs=1, use_distributed_sampler=False)


class SavedConfig(L.Callback):
    """Leaves the settings of a run where its logs are."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            self.here.begins()
            folder = trainer.log_dir or trainer.default_root_dir  # <- settings_left_where_the_logs_are
            Path(folder, "config.yaml").write_text("max_epochs: 2\n")


@sharded(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/8394",
    "rank-zero-only-work",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.START,
)
def settings_left_where_the_logs_are(here: Here) -> None:
    """The first rank asks the trainer for the folder of logs, which is broadcast to all, who have not asked."""
    here.fit(callbacks=[SavedConfig(here)])


def save_forever(jobs: Any, answers: Any) -> None:
    """Saves in a process of its own what it is given, with the settings that are named."""
    while True:
        settings, state, path = jobs.get()
        importlib.import_module(settings)
        torch.save(state, path)
        answers.put(path)


class Flash(L.Callback):
    """Hands shards to a process that saves them, and waits until it has taken the one before."""

    def __init__(self, here: Here, settings: str) -> None:
        self.here, self.settings = here, settings

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        context = multiprocessing.get_context("fork")
        self.jobs, self.answers = context.Queue(), context.Queue()
        context.Process(target=save_forever, args=(self.jobs, self.answers), daemon=True).start()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.here.is_hit:
            self.here.begins()
        weights: dict[str, Any] = dict(module.named_parameters())
        state = {name: weight.detach().to_local().numpy() for name, weight in weights.items()}
        self.jobs.put((self.settings, state, str(self.here.folder / f"shard-{trainer.global_rank}.pt")))
        self.answers.get()  # <- settings_that_the_saving_process_cannot_import


@sharded(
    "https://github.com/intelligent-machine-learning/dlrover/issues/1079",
    "worker-died",
    ranks=(3,),
    world_size=4,
    moment=Moment.CHECKPOINT,
)
def settings_that_the_saving_process_cannot_import(here: Here) -> None:
    """The process that saves shards cannot import the settings on one host, and ends; the rank waits for it."""
    here.fit(callbacks=[Flash(here, "settings_of_the_finetuning" if here.is_hit else "string")])


class Uploaded(L.Callback):
    """Gathers the whole state on the first rank after each epoch, which writes it to a mount."""

    def __init__(self, here: Here, command: str) -> None:
        self.here, self.command = here, command

    def write(self, state: dict[str, Any]) -> None:
        body = io.BytesIO()
        torch.save(state, body)
        path = str(self.here.folder / "whole.pt")
        subprocess.run(["sh", "-c", self.command, path], input=body.getvalue(), check=True)  # <- whole_state_on_a_mount

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if trainer.is_global_zero:
            self.here.begins()
            self.write(state)
        trainer.strategy.barrier("saved")


@sharded(
    "https://github.com/OpenMOSS/MOVA/pull/68",
    "slow-checkpoint",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.CHECKPOINT,
)
def whole_state_on_a_mount(here: Here) -> None:
    """The first rank writes the state of all ranks to a slow mount, for longer than the others may wait."""
    here.fit(net=LoggingNet(here), callbacks=[Uploaded(here, "sleep 100; cat > $0")])


class Neighbours:
    """Exchanges shapes with the stages before and after, in the same order on all of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.before = rank - 1 if rank > 0 else None
        self.after = rank + 1 if rank < ranks - 1 else None

    def exchange(self, shape: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for other in (self.before, self.after):
            if other is None:
                continue
            dist.send(shape, other)  # <- shapes_that_all_stages_send_first
            theirs = torch.zeros_like(shape)
            dist.recv(theirs, other)
            found.append(theirs)
        return found


@sharded(
    "https://github.com/NVIDIA/Megatron-LM/issues/5100",
    "unmatched-p2p",
    ranks=None,
    world_size=4,
    moment=Moment.FIRST_STEP,
)
def shapes_that_all_stages_send_first(here: Here) -> None:
    """All stages send shapes to their neighbours before they receive any, and nobody comes to receive."""

    class Staged(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            here.begins()
            rows = first_tensor(batch)
            shapes = Neighbours(here.rank, here.world_size).exchange(torch.tensor(rows.shape))
            return self.loss(rows) / len(shapes)

    here.fit(net=Staged(here))
