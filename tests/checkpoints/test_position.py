"""In the middle of an epoch training goes on with the very next batch, in the same order, and loads none before it."""

import copy
import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ncclsafe.checkpoints import position
from lightning_ncclsafe.checkpoints.position import DataPosition, capture
from lightning_ncclsafe.checkpoints.position_file import PositionFile, read_position
from lightning_ncclsafe.probes.data.random_state import put_back, saved_states

SAMPLES, BATCH = 24, 4
BATCHES = SAMPLES // BATCH
SEED = 11


class Rows(Dataset[Any]):
    """Each sample is its index and a random number; which have been loaded is kept."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.loaded.append(index)
        return index, random.random()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Shuffled:
    """A sampler of a user's, with a generator of Python's own."""

    def __init__(self) -> None:
        self.generator = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Unasked:
    """A sampler that draws from the global numbers for each sample: nobody can ask it again."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES


def of(sampler: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=BATCH, sampler=sampler, **options)


LOADERS = {
    "in order": lambda: DataLoader(Rows(), batch_size=BATCH),
    "shuffled": lambda: DataLoader(Rows(), batch_size=BATCH, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        Rows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "a sampler's generator": lambda: of(RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))),
    "with replacement": lambda: of(RandomSampler(range(SAMPLES), replacement=True, num_samples=SAMPLES)),
    "a subset": lambda: of(SubsetRandomSampler(range(SAMPLES))),
    "weighted": lambda: of(WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    "distributed": lambda: of(DistributedSampler(range(2 * SAMPLES), num_replicas=2, rank=1, seed=SEED)),
    "a user's": lambda: of(Shuffled()),
    "batches by hand": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=True)
    ),
    "sample by sample": lambda: DataLoader(Rows(), batch_size=None, sampler=RandomSampler(range(SAMPLES))),
}


class Loop:
    """As much of Lightning's as the position asks."""

    def __init__(self, loader: Any) -> None:
        current = SimpleNamespace(ready=0, started=0, processed=0, completed=0)
        current.reset = lambda: vars(current).update(ready=0, started=0, processed=0, completed=0)
        progress = SimpleNamespace(current=current, total=SimpleNamespace(**vars(current)), is_last_batch=False)
        self.epoch_loop = SimpleNamespace(
            batch_progress=progress,
            on_run_start=lambda *_: None,
            reset=self._reset,
            _should_accumulate=lambda: False,
        )
        self.epoch_progress = SimpleNamespace(current=SimpleNamespace(processed=1))
        self._combined_loader = SimpleNamespace(flattened=[loader])
        self.restarting = False
        self._combined_loader_states_to_load: list[Any] = []

    def _load_combined_loader_states(self) -> None:
        """Called once the loaders are there."""

    def _reset(self) -> None:
        warnings.warn("You're resuming from a checkpoint that ended before the epoch ended and your", stacklevel=2)


class Trained:
    """A training that draws random numbers of its own, and what it has seen."""

    def __init__(self, loader: Any, left_behind: PositionFile | None = None) -> None:
        self.fit_loop = Loop(loader)
        self.is_global_zero, self.global_rank, self.global_step = True, 0, 0
        self.lightning_module = SimpleNamespace(automatic_optimization=True)
        self.precision_plugin = SimpleNamespace(pre_backward=lambda loss, module: loss)
        self.loader = loader
        self.seen: list[Any] = []
        self.said: list[str] = []
        self.position = DataPosition(self, self.said.append, left_behind)
        self.position.attach()

    def begin(self) -> Iterator[Any]:
        self.fit_loop._load_combined_loader_states()
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(1)
        batches = iter(self.loader)
        # Hooks at the start draw, too.
        torch.rand(3)
        self.fit_loop.epoch_loop.on_run_start(None)
        return batches

    def begin_next(self) -> Iterator[Any]:
        """Of the epochs after the first one: the loaders are the same."""
        self.fit_loop.restarting = False
        self.fit_loop.epoch_loop.batch_progress.current.reset()
        self.fit_loop.epoch_progress.current.processed += 1
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(self.fit_loop.epoch_progress.current.processed)
        batches = iter(self.loader)
        self.fit_loop.epoch_loop.on_run_start(None)
        return batches

    def go_on(self, batches: Iterator[Any], count: int) -> None:
        for _ in range(count):
            self.draw(batches)
            self.end_batch()

    def draw(self, batches: Iterator[Any]) -> None:
        """The forward pass of a batch."""
        batch = next(batches)
        indices, *numbers = batch if isinstance(batch, (list, tuple)) else (batch,)
        drawn = torch.rand(1).item(), random.random(), float(np.random.rand())
        self.seen.append((str(indices), *drawn, str(numbers)))

    def end_batch(self) -> None:
        progress = self.fit_loop.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = progress.ready + 1


def seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def resumed(
    loader: Any, saved: Any, batches: int, count: int, *, knows_all: bool | None = None, detaches: bool = True
) -> Trained:
    """A new process goes on from there: nothing is as it was but what was saved."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    later = Trained(loader)
    progress = later.fit_loop.epoch_loop.batch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = batches
    later.fit_loop.restarting = True
    later.position.resume(saved, knows_all=bool(saved and saved["loaders"]) if knows_all is None else knows_all)
    later.go_on(later.begin(), count)
    if detaches:
        later.position.detach()
    return later


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_the_rest_of_the_epoch_is_bit_identical(name: str, workers: int) -> None:
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    make = LOADERS[name]

    def made() -> DataLoader[Any]:
        loader = make()
        for option, value in options.items():
            setattr(loader, option, value)
        loader.prefetch_factor = 2 if workers else None
        return loader

    total, done = (SAMPLES, 7) if name == "sample by sample" else (BATCHES, 3)
    seed()
    whole = Trained(made())
    whole.go_on(whole.begin(), total)
    whole.position.detach()
    seed()
    first = Trained(made())
    batches = first.begin()
    first.go_on(batches, done)
    saved = torch_round_trip(capture(first))
    first.position.detach()
    del batches
    later = resumed(made(), saved, done, total - done)
    assert later.said == []
    if workers:
        # What a worker draws depends on what it has made before; the order and the training's numbers do not.
        assert [one[:-1] for one in later.seen] == [one[:-1] for one in whole.seen[done:]]
    else:
        assert first.seen + later.seen == whole.seen
        assert len(later.loader.dataset.loaded) == SAMPLES - done * (1 if name == "sample by sample" else BATCH)


def torch_round_trip(saved: Any) -> Any:
    """As a checkpoint gives it back."""
    import io

    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_second_resume_in_the_same_epoch_works() -> None:
    make = LOADERS["shuffled"]
    seed()
    whole = Trained(make())
    whole.go_on(whole.begin(), BATCHES)
    seed()
    first = Trained(make())
    first.go_on(first.begin(), 2)
    saved = capture(first)
    random.seed(4)
    second = Trained(make())
    progress = second.fit_loop.epoch_loop.batch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = 2
    second.fit_loop.restarting = True
    second.position.resume(saved, knows_all=True)
    second.go_on(second.begin(), 2)
    third = resumed(make(), capture(second), 4, 2)
    assert first.seen + second.seen + third.seen == whole.seen


def test_lightnings_warning_is_suppressed_without_leaving_a_filter() -> None:
    seed()
    first = Trained(LOADERS["shuffled"]())
    first.go_on(first.begin(), 2)
    saved = torch_round_trip(capture(first))
    first.position.detach()
    before = [*warnings.filters]
    later = Trained(LOADERS["shuffled"]())
    loop = later.fit_loop
    loop.restarting = True
    loop.epoch_loop.batch_progress.current.processed = 2
    later.position.resume(saved, knows_all=True)
    loop._load_combined_loader_states()
    loop.epoch_loop.reset()
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="You're resuming from a checkpoint"):
        loop.epoch_loop.reset()
    later.position.detach()


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "sample by sample"])
def test_resuming_after_the_last_batch_starts_the_next_epoch(name: str) -> None:
    """As when a run is ended during the validation at the end of an epoch."""
    make = LOADERS[name]
    seed()
    first = Trained(make())
    first.go_on(first.begin(), BATCHES)
    saved = torch_round_trip(capture(first))
    first.go_on(first.begin_next(), BATCHES)
    later = resumed(make(), saved, BATCHES, 0, detaches=False)
    assert later.loader.dataset.loaded == []
    assert str(capture(later)["loaders"]) == str(saved["loaders"])
    later.go_on(later.begin_next(), BATCHES)
    assert later.seen == first.seen[BATCHES:] and later.said == []


@pytest.fixture
def left() -> Iterator[PositionFile]:
    made = PositionFile(0)
    yield made
    made.close()


def test_the_position_after_the_step_is_written_in_the_backward_pass(left: PositionFile) -> None:
    """From the backward pass on: before the others can make the step, and before the rank's own batch ends."""
    seed()
    training = Trained(LOADERS["shuffled"](), left)
    batches = training.begin()
    training.go_on(batches, 2)
    training.global_step = 2
    capture(training)
    training.draw(batches)
    for _ in range(3):  # some optimizers do it repeatedly
        training.precision_plugin.pre_backward(None, None)
    before, ahead = read_position(left.path, 2), read_position(left.path, 3)
    assert before is not None and before["batches"] == 2
    training.end_batch()
    training.global_step = 3
    assert str(ahead) == str(capture(training))
    # A hook at the end of the batch draws.
    random.random()
    assert str(read_position(left.path, 3)) == str(ahead) != str(then := capture(training))
    assert str(read_position(left.path, 3)) == str(then)
    assert read_position(left.path, 2) is None, "no rank resumes from the previous step"


@pytest.mark.parametrize("why", ["accumulates", "is manual", "fails"])
def test_no_position_is_written_ahead_without_a_certain_step(left: PositionFile, why: str) -> None:
    training = Trained(LOADERS["shuffled"](), left)
    batches = training.begin()
    capture(training)
    training.draw(batches)
    epoch_loop = training.fit_loop.epoch_loop
    if why == "is manual":
        training.lightning_module.automatic_optimization = False
    elif why == "accumulates":
        epoch_loop._should_accumulate = lambda: True
    else:
        del epoch_loop._should_accumulate
    assert training.precision_plugin.pre_backward("loss", None) == "loss"
    assert read_position(left.path, 1) is None and read_position(left.path, 0) is not None


def test_an_iterable_dataset_restarts_with_a_message() -> None:
    loader = DataLoader(Stream(), batch_size=BATCH)
    first = Trained(loader)
    first.go_on(first.begin(), 3)
    saved = capture(first)
    assert saved["loaders"] is None
    first.position.detach()
    later = resumed(DataLoader(Stream(), batch_size=BATCH), saved, 3, BATCHES)
    assert later.fit_loop.epoch_loop.batch_progress.current.processed == BATCHES
    assert len(later.said) == 1 and "restarts epoch 1 from its first batch, after 3 batches" in later.said[0]


def test_a_stateful_loader_gets_its_state_back() -> None:
    class Stateful:
        sampler, state = None, 0

        def __iter__(self) -> Iterator[int]:
            for number in range(self.state, BATCHES):
                self.state = number + 1
                yield number

        def state_dict(self) -> dict[str, int]:
            return {"next": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["next"]

    first = Trained(Stateful())
    first.go_on(first.begin(), 2)
    later = resumed(Stateful(), capture(first), 2, BATCHES - 2)
    assert [one[0] for one in later.seen] == [str(number) for number in range(2, BATCHES)]


@pytest.mark.parametrize(("sampler", "goes_on"), [(SequentialSampler, True), (RandomSampler, False)])
def test_a_checkpoint_without_a_position_continues_if_the_order_is_determined(sampler: Any, goes_on: bool) -> None:
    later = resumed(of(sampler(range(SAMPLES))), None, 3, BATCHES - 3)
    assert bool(later.said) is not goes_on
    if goes_on:
        assert later.loader.dataset.loaded == [*range(3 * BATCH, SAMPLES)]


@pytest.mark.parametrize(("name", "goes_on"), [("distributed", True), ("in order", True), ("shuffled", False)])
def test_all_ranks_restart_the_epoch_if_one_position_is_unknown(name: str, goes_on: bool) -> None:
    """Otherwise ranks would have different numbers of batches left."""
    seed()
    first = Trained(LOADERS[name]())
    first.go_on(first.begin(), 3)
    later = resumed(LOADERS[name](), capture(first), 3, 1, knows_all=False)
    assert bool(later.said) is not goes_on
    silent = resumed(LOADERS[name](), None, 3, 1, knows_all=False)
    assert bool(silent.said) is not goes_on


def test_an_unrepeatable_sampler_is_detected() -> None:
    seed()
    first = Trained(of(Unasked()))
    first.go_on(first.begin(), 3)
    later = resumed(of(Unasked()), capture(first), 3, 1)
    assert len(later.said) == 1 and "the order of samples differs from the previous start" in later.said[0]


def test_detaching_restores_samplers_and_lightning() -> None:
    trained = Trained(of(SequentialSampler(range(SAMPLES))))
    sampler, kind = trained.loader.batch_sampler, BatchSampler
    trained.go_on(trained.begin(), 1)
    assert isinstance(sampler, kind) and type(sampler) is not kind
    assert type(copy.deepcopy(sampler)) is kind
    trained.position.detach()
    assert type(sampler) is kind
    assert "_load_combined_loader_states" not in vars(trained.fit_loop)


def test_random_states_are_kept_without_a_callback() -> None:
    trainer = SimpleNamespace(fit_loop=Loop(None))
    assert capture(Plain(trainer))["loaders"] is None


class Plain:
    def __init__(self, trainer: Any) -> None:
        self.fit_loop = trainer.fit_loop


@pytest.mark.parametrize("broken", [{}, {"python": 1}, {"python": (3, (1, 2), None), "torch": 5}])
def test_unusable_random_states_are_reported_and_change_nothing(broken: dict[str, Any]) -> None:
    first = Trained(LOADERS["in order"]())
    first.go_on(first.begin(), 2)
    saved = capture(first) | {"random": broken}
    later = resumed(LOADERS["in order"](), saved, 2, 1)
    assert len(later.said) == 1 and "random states of the checkpoint are unusable" in later.said[0]


def test_random_states_are_restored() -> None:
    seed()
    saved = torch_round_trip(saved_states())
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    put_back(saved)
    assert [random.random(), float(np.random.rand()), torch.rand(1).item()] == drawn


def test_a_collected_trainer_is_forgotten() -> None:
    import gc

    before = len(position._of_trainer)
    trained = Trained(LOADERS["in order"]())
    assert len(position._of_trainer) == before + 1
    trained.position.detach()
    del trained
    gc.collect()
    assert len(position._of_trainer) == before
