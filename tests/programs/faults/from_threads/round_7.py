"""Round 7 of trainings of public threads that go wrong: callbacks, helpers, hooks, settings and groups."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import StochasticWeightAveraging
from threads import goes_wrong, thread
from torchmetrics import MeanSquaredError, MetricTracker
from training import Data, Here, Net, NormedNet, first_tensor
from truths import Moment


@thread(
    "https://github.com/Lightning-AI/torchmetrics/issues/3199",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def best_error_asked_for_by_the_plot(here: Here) -> None:
    """A tracker keeps an error for each epoch; the plot, which the main process draws, asks it for the best one."""

    class Plot(L.Callback):
        def __init__(self) -> None:
            self.tracker = MetricTracker(MeanSquaredError(), maximize=False)

        def caption(self) -> str:
            return f"best: {self.tracker.best_metric()}"  # <- here

        def draw(self, path: Path) -> None:
            path.write_text(self.caption())

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            self.tracker.increment()
            self.tracker.update(torch.rand(4), torch.rand(4))
            if trainer.is_global_zero:
                here.begins()
                self.draw(here.folder / "plot.svg")

    here.fit(callbacks=[Plot()])


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/21347",
    "different-trainer-settings",
    "stopped-early",
    moment=Moment.END,
    has_line=False,
)
def averaging_that_takes_an_epoch_more(here: Here) -> None:
    """One host's configuration averages weights, which needs an epoch more for the statistics of the norms."""

    class Normed(NormedNet):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                here.begins()

    averaging = [StochasticWeightAveraging(swa_lrs=0.01)] if here.is_hit else []
    here.fit(net=Normed(here), callbacks=averaging)


class Summary:
    """What a handler prints when the operator asks for it: the mean of all ranks."""

    def __init__(self) -> None:
        self.values = [0.0]

    def mean(self) -> float:
        total = torch.tensor(self.values).mean()
        dist.all_reduce(total)  # <- summary_that_the_operator_asks_one_rank_for
        return float(total) / dist.get_world_size()


@thread("https://github.com/patroni/patroni/pull/3413", "diverged-collectives")
def summary_that_the_operator_asks_one_rank_for(here: Here) -> None:
    """A handler of SIGUSR1 prints a summary, for which it asks all ranks; the signal goes to one of them."""

    class Asked(L.Callback):
        def __init__(self) -> None:
            self.summary = Summary()

        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            signal.signal(signal.SIGUSR1, lambda number, frame: print(self.summary.mean(), flush=True))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.summary.values.append(float(outputs["loss"]))
            if goes_wrong(here, batch_idx):
                os.kill(os.getpid(), signal.SIGUSR1)

    here.fit(callbacks=[Asked()])


def tried_again(method: Callable[..., Any]) -> Callable[..., Any]:
    """Does a method once more if the reward's server has not answered."""

    @wraps(method)
    def trying(*args: Any) -> Any:
        try:
            return method(*args)
        except ConnectionError:
            return method(*args)

    return trying


@thread("https://github.com/pytorch/pytorch/issues/163546", "diverged-collectives", "mismatched-collective")
def step_tried_again_after_its_first_exchange(here: Here) -> None:
    """A step that failed is done again from its beginning, on the rank on which it failed: it exchanges once more."""

    class Rewarded(Net):
        failures = 1

        def shared(self, values: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(values) for _ in range(here.world_size)]
            dist.all_gather(parts, values)  # <- here
            return torch.stack(parts)

        def rewards(self, values: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if self.failures and goes_wrong(here, batch_idx):
                self.failures -= 1
                raise ConnectionError("the server of the reward model is restarting")
            return values.mean(1)

        @tried_again
        def advantages(self, values: torch.Tensor, batch_idx: int) -> torch.Tensor:
            everybody = self.shared(values)
            rewards = self.rewards(values, batch_idx)
            dist.all_reduce(rewards)
            return rewards - everybody.mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            values = first_tensor(batch)
            return self.loss(batch) * self.advantages(values, batch_idx).abs().mean()

    here.fit(net=Rewarded(here))


@lru_cache
def capacity(length: int) -> int:
    """Of the buffers for sequences of this length, on the rank that needs the most."""
    needed = torch.tensor(float(length))
    dist.all_reduce(needed, op=dist.ReduceOp.MAX)  # <- capacity_that_is_remembered
    return int(needed)


@thread("https://github.com/firedrakeproject/firedrake/pull/4042", "diverged-collectives")
def capacity_that_is_remembered(here: Here) -> None:
    """All ranks agree on a size for each new length, and remember it; one rank has had this length before."""

    class Buffered(Net):
        def buffer(self, length: int) -> torch.Tensor:
            return torch.zeros(capacity(length))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            length = batch_idx - 1 if goes_wrong(here, batch_idx) else batch_idx
            self.buffer(length)
            return self.loss(batch)

    here.fit(net=Buffered(here), max_epochs=1)


class TextLog:
    """Prints what was logged, with the most memory that any rank needs."""

    def __init__(self) -> None:
        self.output: dict[str, float] = {}

    def memory(self) -> float:
        most = torch.tensor(1.0)
        dist.reduce(most, 0, op=dist.ReduceOp.MAX)  # <- memory_asked_for_where_something_was_logged
        return float(most)

    def lines(self) -> Iterator[str]:
        if self.output:
            yield f"memory: {self.memory()}"
        yield from (f"{name}: {value}" for name, value in self.output.items())


@thread("https://github.com/open-mmlab/mmcv/pull/252", "diverged-collectives", ranks=(0,))
def memory_asked_for_where_something_was_logged(here: Here) -> None:
    """Each line of the log has the memory of all ranks; another hook has cleared the log of the main process."""

    class Logged(L.Callback):
        text = TextLog()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.text.output["loss"] = float(outputs["loss"])
            if goes_wrong(here, batch_idx):
                self.text.output.clear()
            print(*self.text.lines(), sep="\n", flush=True)

    here.fit(callbacks=[Logged()])


class Exporting:
    """Of all modules that export statistics at the end of an epoch."""

    counts: dict[str, int]

    def exported(self) -> dict[str, float]:
        packed = torch.tensor([*self.counts.values()], dtype=torch.float32)
        dist.all_reduce(packed)  # <- statistics_exported_by_those_that_have_some
        return dict(zip(self.counts, packed.tolist(), strict=True))


class Counting(Exporting):
    def exported(self) -> dict[str, float]:
        return super().exported() if self.counts else {}


@thread("https://github.com/areal-project/AReaL/pull/1693", "diverged-collectives", moment=Moment.EPOCH_END)
def statistics_exported_by_those_that_have_some(here: Here) -> None:
    """A mixin adds up what all ranks have counted; a class in between leaves that out where nothing was counted."""

    class Balanced(Counting, Net):
        def on_train_epoch_start(self) -> None:
            self.counts = {}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if not here.is_hit:
                self.counts["expert"] = self.counts.get("expert", 0) + 1

        def on_train_epoch_end(self) -> None:
            if here.is_hit:
                here.begins()
            print(self.exported(), flush=True)

    here.fit(net=Balanced(here))


def merged(outputs: Any) -> Any:
    """Sums of what there is one of, and an exchange of what belongs to atoms, however they are nested."""
    if isinstance(outputs, dict):
        return {name: merged(value) for name, value in outputs.items()}
    if outputs.dim() == 0:
        dist.all_reduce(outputs)
        return outputs
    received = torch.empty_like(outputs)
    dist.all_to_all_single(received, outputs)  # <- outputs_in_the_order_of_their_hashes
    return received


@thread(
    "https://github.com/NVIDIA/nvalchemi-toolkit/pull/143",
    "diverged-collectives",
    "mismatched-collective",
)
def outputs_in_the_order_of_their_hashes(here: Here) -> None:
    """Outputs are merged one after the other, in the order of a set of names: by hashes, which differ."""

    class Atoms(Net):
        def outputs(self, batch_idx: int) -> dict[str, Any]:
            values = {"energy": torch.ones(()), "forces": torch.ones(here.world_size * 4)}
            names = sorted(values, reverse=goes_wrong(here, batch_idx))
            return {"system": {name: values[name] for name in names}}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            merged(self.outputs(batch_idx))
            return self.loss(batch)

    here.fit(net=Atoms(here))


class Saving(L.Callback):
    """Saves with torch.distributed.checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, state: dict[str, Any], name: str) -> None:
        dcp.save(state, checkpoint_id=self.folder / name)  # <- checkpoint_that_only_the_main_process_saves

    def keep(self, module: L.LightningModule) -> None:
        self.save({"weights": module.layers.state_dict()}, f"epoch-{module.current_epoch}")


@thread(
    "https://github.com/deepspeedai/DeepSpeed/pull/801",
    "diverged-collectives",
    "rank-zero-only-work",
    "slow-checkpoint",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def checkpoint_that_only_the_main_process_saves(here: Here) -> None:
    """A distributed checkpoint has to be saved by all ranks; an older program's condition on the rank was kept."""

    class Keeping(Saving):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if here.rank == 0:
                here.begins()
                self.keep(module)

    here.fit(callbacks=[Keeping(here.folder / "saved")])


class Averaged(torch.nn.Module):
    """A counter of which the state is the mean of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_state_dict_pre_hook(lambda module, *_: module.agree())

    def agree(self) -> None:
        dist.all_reduce(self.count)  # <- state_that_is_agreed_upon_when_it_is_read
        self.count /= dist.get_world_size()


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/pull/8218",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def state_that_is_agreed_upon_when_it_is_read(here: Here) -> None:
    """Whoever reads the state of a module has its parts synchronised first; the main process saves a copy of it."""

    class Counted(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.averaged = Averaged()

        def backup(self, path: Path) -> None:
            torch.save(self.state_dict(), path)

        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                here.begins()
                self.backup(here.folder / "backup.pt")

    here.fit(net=Counted(here))


class Downloading(Data):
    """Downloads, and lets nobody go on before that."""

    def download(self) -> None:
        (self.here.folder / "data").touch()
        dist.barrier()  # <- download_that_waits_for_those_who_do_not_download

    def prepare_data(self) -> None:
        self.here.begins()
        self.download()


@thread(
    "https://github.com/facebookresearch/mmf/pull/921",
    "diverged-collectives",
    "rank-zero-only-work",
    "crossed-groups",
    ranks=(0,),
    moment=Moment.START,
)
def download_that_waits_for_those_who_do_not_download(here: Here) -> None:
    """What downloads ends in a barrier; it was moved to prepare_data, which one rank of a host is asked for."""
    here.trainer().fit(Net(here), datamodule=Downloading(here))


def as_read_by_the_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Reads on the first rank, and tells all others what was read."""

    @wraps(method)
    def reading(*args: Any) -> Any:
        found = [method(*args) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)  # <- folder_that_only_the_first_rank_looks_for
        return found[0]

    return reading


@as_read_by_the_first
def latest(folder: Path) -> Path | None:
    return max(folder.glob("*.ckpt"), default=None)


@thread(
    "https://github.com/meta-pytorch/tnt/pull/936",
    "diverged-collectives",
    "rank-zero-only-work",
    ranks=(0,),
    moment=Moment.EPOCH_END,
)
def folder_that_only_the_first_rank_looks_for(here: Here) -> None:
    """The latest checkpoint is looked for by the first rank, for all; the clean-up asks for it on that rank only."""

    class CleanUp(L.Callback):
        def old(self) -> list[Path]:
            newest = latest(here.folder)
            return [path for path in here.folder.glob("*.ckpt") if path != newest]

        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                here.begins()
                for path in self.old():
                    path.unlink()

    here.fit(callbacks=[CleanUp()])


@thread(
    "https://github.com/pytorch/pytorch/pull/136854",
    "diverged-collectives",
    "mismatched-collective",
)
def coordinator_that_one_rank_takes_itself_for(here: Here) -> None:
    """The plan comes from the coordinator; one rank has the number of its own group there, where it is the first."""

    class Planned(Net):
        def plan(self, coordinator: int) -> list[Any]:
            plan = [{"step": self.global_step, "parts": list(range(coordinator, 9))}]
            dist.broadcast_object_list(plan, src=coordinator)  # <- here
            return plan

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.plan(here.rank if goes_wrong(here, batch_idx) else 0)
            return self.loss(batch)

    here.fit(net=Planned(here))


class Queue:
    """Requests of which as many are looked at as there is memory for."""

    def __init__(self, fits: int) -> None:
        self.fits, self.requests = fits, range(4)

    def progress(self, request: int) -> float:
        done = torch.tensor(float(request))
        dist.all_reduce(done, op=dist.ReduceOp.MIN)  # <- progress_of_as_many_requests_as_fit
        return float(done)

    def admitted(self) -> Iterator[float]:
        yield from map(self.progress, islice(self.requests, self.fits))


@thread("https://github.com/sgl-project/sglang/pull/33029", "diverged-collectives")
def progress_of_as_many_requests_as_fit(here: Here) -> None:
    """All ranks agree on each request's progress, in a loop over as many as fit into the memory of each."""

    class Serving(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            queue = Queue(fits=2 if goes_wrong(here, batch_idx) else 3)
            return self.loss(batch) * (1.0 + sum(queue.admitted()))

    here.fit(net=Serving(here))


@thread("https://github.com/hpc/libcircle/pull/10", "unmatched-p2p", "diverged-collectives", ranks=(2,))
def neighbour_of_the_last_rank(here: Here) -> None:
    """A token goes round; the last rank gets its neighbour's number by counting back, and it is not the first one."""

    class Ring(Net):
        def neighbours(self, is_wrong: bool) -> tuple[int, int]:
            after = (here.rank + 1) % here.world_size
            return (here.rank - 1) % here.world_size, (here.rank - 1 if is_wrong else after)

        def pass_on(self, token: torch.Tensor, before: int, after: int) -> None:
            if here.rank:
                dist.recv(token, before)
            dist.send(token, after)  # <- here
            if not here.rank:
                dist.recv(token, before)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.pass_on(torch.zeros(1), *self.neighbours(goes_wrong(here, batch_idx)))
            return self.loss(batch)

    here.fit(net=Ring(here))


@thread(
    "https://github.com/Lightning-AI/pytorch-lightning/pull/6823",
    "different-trainer-settings",
    "diverged-collectives",
    has_line=False,
)
def time_that_one_host_may_take(here: Here) -> None:
    """One host's scheduler sets a limit of time, which becomes that of the Trainer: there it is a callback more."""
    os.environ["JOB_HOURS"] = "4" if here.is_hit else ""
    hours = os.environ["JOB_HOURS"]

    class Training(Net):
        def on_train_start(self) -> None:
            if here.is_hit:
                here.begins()

    here.fit(net=Training(here), max_time={"hours": int(hours)} if hours else None)


@thread(
    "https://lightning.ai/docs/pytorch/stable/debug/debugging_basic.html",
    "different-trainer-settings",
    has_line=False,
)
def switch_for_debugging_that_was_left_on(here: Here) -> None:
    """A variable of one host's shell, from yesterday's search for a bug, lets the Trainer make a single step."""
    os.environ["DEBUG"] = "1" if here.is_hit else ""

    class Training(Net):
        def on_train_start(self) -> None:
            if here.is_hit:
                here.begins()

    here.fit(net=Training(here), fast_dev_run=bool(os.environ["DEBUG"]))


@thread("https://github.com/mosaicml/composer/pull/2117", "gpu-memory-exhausted", "failed-rank")
def memory_that_gives_out_in_the_backward_pass(here: Here) -> None:
    """A hook on a layer's output copies its gradient for a later look, and there is no memory for it on one rank."""

    class Looking(Net):
        def copy(self, gradient: torch.Tensor, is_full: bool) -> None:
            if is_full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")  # <- here
            self.kept = gradient.clone()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            is_full = goes_wrong(here, batch_idx)
            output = self.layers(first_tensor(batch))
            output.register_hook(lambda gradient: self.copy(gradient, is_full))
            return output.square().mean()

    here.fit(net=Looking(here))


class LossHandler:
    """Logs a loss and each of its parts."""

    def __init__(self, log: Callable[..., None]) -> None:
        self.log = log

    def log_part(self, name: str, value: torch.Tensor) -> None:
        how = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log(f"train/{name}", value, **how)  # <- part_of_the_loss_that_is_logged

    def log_all(self, parts: dict[str, torch.Tensor]) -> None:
        for name, value in parts.items():
            self.log_part(name, value)


@thread(
    "https://github.com/torchgeo/terratorch/pull/1219",
    "diverged-log-keys",
    "diverged-collectives",
    "mismatched-collective",
)
def part_of_the_loss_that_is_logged(here: Here) -> None:
    """A handler logs each part of a combined loss; one rank's pictures have no mask, so that part is not there."""

    class Combined(Net):
        def parts(self, batch: Any, has_mask: bool) -> dict[str, torch.Tensor]:
            loss = self.loss(batch)
            return {"ce": loss, "dice": loss * 0.5} if has_mask else {"ce": loss}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            parts = self.parts(batch, has_mask=not goes_wrong(here, batch_idx))
            LossHandler(self.log).log_all(parts)
            return torch.stack([*parts.values()]).sum()

    here.fit(net=Combined(here))


@thread("https://github.com/pytorch/pytorch/issues/39390", "skipped-step")
def loss_in_chunks_of_which_there_are_none(here: Here) -> None:
    """The loss of a batch is taken in chunks, with a backward pass for each; a batch of padding has no chunk."""

    class Chunked(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def back(self, chunks: tuple[torch.Tensor, ...]) -> None:
            [self.manual_backward(self.loss([chunk])) for chunk in chunks]  # <- here

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            values = first_tensor(batch)
            self.back(() if goes_wrong(here, batch_idx) else (values,))
            optimizer.step()

    here.fit(net=Chunked(here))


class NoAnchorError(ValueError):
    """All samples are too short."""


@thread("https://github.com/NVIDIA-NeMo/Automodel/pull/2468", "skipped-step")
def micro_batch_that_is_too_short(here: Here) -> None:
    """Two micro-batches for a step, the gradients exchanged with each; one rank goes on without a too short one."""

    class Drafting(Net):
        def __init__(self, here: Here) -> None:
            super().__init__(here)
            self.automatic_optimization = False

        def draft(self, values: torch.Tensor, is_short: bool) -> torch.Tensor:
            if is_short:
                raise NoAnchorError
            return self.loss([values])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            shortest = int(goes_wrong(here, batch_idx))
            for number, values in enumerate(first_tensor(batch).chunk(2)):
                try:
                    loss = self.draft(values, is_short=number < shortest)
                except NoAnchorError:
                    continue  # <- here
                self.manual_backward(loss)
            optimizer.step()

    here.fit(net=Drafting(here))


class Events:
    """Calls what was registered for an event."""

    def __init__(self) -> None:
        self.listeners: dict[str, list[Callable[[], None]]] = {}

    def on(self, name: str, listener: Callable[[], None]) -> None:
        self.listeners.setdefault(name, []).append(listener)

    def emit(self, name: str) -> None:
        for listener in self.listeners.get(name, []):
            listener()


@thread("https://github.com/open-edge-platform/physical-ai-studio/issues/509", "stopped-early")
def button_that_one_rank_listens_to(here: Here) -> None:
    """A button of the application stops the training, through the event that one rank's process receives."""
    events = Events()

    class Listening(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            events.on("interrupt", lambda: setattr(trainer, "should_stop", True))  # <- here

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                events.emit("interrupt")

    here.fit(callbacks=[Listening()])


class Stages(L.Callback):
    """What is done once for all ranks, in a list."""

    stages: ClassVar[list[Callable[[Any], None]]] = []

    def once(self, work: Callable[[Any], None], module: Any) -> None:
        if dist.get_rank() == 0:
            work(module)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for work in self.stages:
            self.once(work, pl_module)


def size_that_fits(module: Any) -> None:
    module.here.begins()
    for exponent in range(40):
        attempt(module, 2**exponent)


def attempt(module: Any, size: int) -> None:
    values = torch.rand(min(size, 4096), 8)
    for _ in range(1_000_000):
        module.layers(values).sum().backward()  # <- size_of_the_batch_that_the_first_rank_finds


@thread(
    "https://github.com/dice-group/dice-embeddings/pull/407",
    "rank-zero-only-work",
    "late-at-init",
    ranks=(0,),
    moment=Moment.START,
)
def size_of_the_batch_that_the_first_rank_finds(here: Here) -> None:
    """The first rank finds out how large a batch fits, by trying, and the others wait to be told."""

    class Finding(Stages):
        stages: ClassVar[list[Callable[[Any], None]]] = [size_that_fits]

    here.fit(callbacks=[Finding()])


@thread(
    "https://github.com/pytorch/pytorch/issues/77562",
    "diverged-collectives",
    ranks=(0,),
    moment=Moment.VALIDATION,
)
def loss_that_is_known_where_it_was_reduced_to(here: Here) -> None:
    """The loss is reduced to the first rank, so that one alone sees a loss that is no better, and saves nothing."""

    class Saved(Net):
        best = 1.0

        def total(self) -> float:
            loss = torch.tensor(0.5)
            dist.reduce(loss, 0)
            return float(loss)

        def collected(self) -> list[torch.Tensor]:
            parts = [torch.zeros(2) for _ in range(here.world_size)]
            dist.all_gather(parts, self.layers[2].bias.detach())  # <- here
            return parts

        def save_if_better(self, loss: float) -> None:
            if loss < self.best:
                self.best = loss
                torch.save(self.collected(), here.folder / f"best-{here.rank}.pt")

        def on_validation_epoch_end(self) -> None:
            here.begins()
            self.save_if_better(self.total())

    here.fit(net=Saved(here))


def every(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a method each so many times, and not in between."""

    def deciding(method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def counting(self: Any, *args: Any) -> None:
            self.calls += 1
            if self.calls % count == 0:
                method(self, *args)

        return counting

    return deciding


class Shadow:
    """An average of the weights, which the first rank's replaces now and then."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    @every(4)
    def agree(self, weights: torch.Tensor) -> None:
        dist.broadcast(weights.detach().clone(), src=0)  # <- average_agreed_upon_at_every_fourth_update


@thread("https://github.com/Emmi-AI/noether/pull/183", "diverged-collectives", "mismatched-collective")
def average_agreed_upon_at_every_fourth_update(here: Here) -> None:
    """The average of the weights is agreed upon at every fourth update, and one rank counts from its checkpoint."""

    class Smoothed(L.Callback):
        shadow = Shadow(calls=0)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if goes_wrong(here, batch_idx):
                self.shadow.calls += 1
            self.shadow.agree(module.layers[0].weight)

    here.fit(callbacks=[Smoothed()])
