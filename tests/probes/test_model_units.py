"""The units of real models in two forked ranks, held against what the Flight Recorder has recorded of them."""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from polling import until
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.classification import MulticlassAccuracy

from lightning_ncclsafe.facts import Collective, Frame, ModelUnit, Phase, Progress, RankFacts
from lightning_ncclsafe.probes.process.flight_recorder import FlightRecorder
from lightning_ncclsafe.probes.process.stacks import main_thread_stack
from lightning_ncclsafe.probes.rank import RankProbe
from lightning_ncclsafe.probes.trainer.actions import ActionTracker
from lightning_ncclsafe.probes.trainer.model_units import MAX_UNITS, plain_name, read_units
from lightning_ncclsafe.probes.trainer.state import TrainerProbe
from lightning_ncclsafe.rules.kit.purpose import purpose_words

_FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")
OUTSTANDING = Collective(group="0", seq=1, op="all_reduce", backend="gloo", input_sizes=((4,),))
Result = dict[str, Any]


class Net(nn.Module):
    """Sizes that do not divide by two, so that shards are padded; two blocks that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 101)
        self.blocks = nn.Sequential(nn.Linear(101, 101), nn.Linear(101, 101))
        self.wide = nn.Linear(101, 333)
        self.head = nn.Linear(333, 50, bias=False)
        self.accuracy = MulticlassAccuracy(num_classes=50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.blocks(self.embed(x))))  # type: ignore[no-any-return]


def ddp() -> nn.Module:
    return DistributedDataParallel(Net(), bucket_cap_mb=0.1)


def ddp_that_finds_unused() -> nn.Module:
    return DistributedDataParallel(Net(), bucket_cap_mb=0.1, find_unused_parameters=True)


def ddp_as_it_comes() -> nn.Module:
    return DistributedDataParallel(Net())


def fsdp() -> nn.Module:
    net = Net()
    net.blocks = nn.Sequential(*(FullyShardedDataParallel(block, device_id=CPU) for block in net.blocks))
    net.wide = FullyShardedDataParallel(net.wide, device_id=CPU)  # type: ignore[assignment]
    return FullyShardedDataParallel(net, device_id=CPU)


def fsdp2() -> nn.Module:
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for module in (*net.blocks, net.wide, net):
        fully_shard(module, mesh=mesh)
    return net


MODELS: tuple[Callable[[], nn.Module], ...] = (ddp, ddp_that_finds_unused, ddp_as_it_comes, fsdp, fsdp2)


def step(model: nn.Module) -> None:
    model(torch.randn(4, 64)).sum().backward()


def recorded() -> tuple[Collective, ...]:
    return FlightRecorder().read()[1]


def in_words(units: tuple[ModelUnit, ...], entry: Collective, stack: tuple[Frame, ...] = ()) -> str:
    facts = RankFacts(rank=0, progress=Progress(phase=Phase.TRAIN), stack=stack, collectives=(entry,), units=units)
    return purpose_words(entry, facts)


def words_of_a_step(model: nn.Module) -> list[str]:
    """What each collective of a step is said to be, after the fact."""
    began_ns = time.time_ns()  # A fork has the entries of the process that it was forked from, too.
    step(model)
    made = [replace(entry, completed=False) for entry in recorded() if entry.created_ns >= began_ns]
    return [in_words(read_units(model, [entry]), entry) for entry in made]


def words_while_blocked(act: Callable[[], object], model: nn.Module, is_read: Event) -> tuple[str, float]:
    """What is said of the collective that the main thread is blocked in, and how long that takes, in seconds."""
    said: list[tuple[str, float]] = []
    begun_ns = time.time_ns()

    def under_way() -> list[Collective]:
        # Gloo's threads may be yet to note the end of the step before.
        return [entry for entry in recorded() if not entry.completed and entry.created_ns >= begun_ns]

    def read() -> None:
        entries = until(under_way, within_s=20.0)
        began = time.monotonic()
        units = read_units(model, entries)
        said.append((in_words(units, entries[0], main_thread_stack()), time.monotonic() - began))

    reader = threading.Thread(target=read)
    reader.start()
    # A reader that waits for the blocked thread must not keep it blocked.
    threading.Thread(target=lambda: (reader.join(25), is_read.set())).start()
    act()
    return said[0] if said else ("nothing: it waited for what it was to read", 25.0)


def body(rank: int, is_read: dict[str, Event]) -> Result:
    result: Result = {}
    for make in MODELS:
        torch.manual_seed(0)
        model = make()
        # Before the first step much of FSDP is not there yet, and has to do no harm.
        read_units(model, [OUTSTANDING])
        result[make.__name__] = [words_of_a_step(model) for _ in range(2)]
        blocked_alone(rank, make.__name__, model, lambda model=model: step(model), is_read, result)  # type: ignore[misc]
    spread = parallelize_module(nn.Linear(64, 32, bias=False), init_device_mesh("cpu", (2,)), ColwiseParallel())
    weight: Any = spread.weight
    blocked_alone(rank, "parameter", spread, lambda: weight.full_tensor(), is_read, result)
    net = Net()
    net.accuracy.update(torch.tensor([1, 2]), torch.tensor([1, 3]))
    blocked_alone(rank, "metric", net, net.accuracy.compute, is_read, result)
    return result


def blocked_alone(
    rank: int,
    name: str,
    model: nn.Module,
    act: Callable[[], object],
    is_read: dict[str, Event],
    result: Result,
) -> None:
    """Rank 1 comes once rank 0, which waits for it, has been asked what it waits in."""
    if rank == 0:
        result[f"blocked: {name}"] = words_while_blocked(act, model, is_read[name])
    else:
        is_read[name].wait(30)
        act()


def run(rank: int, pipe: Connection, is_read: dict[str, Event]) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
        store = dist.TCPStore("127.0.0.1", pipe.recv() if rank else 0, is_master=rank == 0, wait_for_workers=False)
        if rank == 0:
            pipe.send(store.port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        outcome: Any = body(rank, is_read)
        dist.barrier()
    except BaseException:
        outcome = traceback.format_exc()
    pipe.send(outcome)
    os._exit(0)


@pytest.fixture(scope="module")
def seen() -> Result:
    """What rank 0 of two has said, by the name of the model."""
    is_read = {name: _FORK.Event() for name in (*(make.__name__ for make in MODELS), "parameter", "metric")}
    pipes = [_FORK.Pipe() for _ in range(2)]
    ranks = [_FORK.Process(target=run, args=(rank, pipes[rank][1], is_read)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        pipes[1][0].send(pipes[0][0].recv())
        found = pipes[0][0].recv() if pipes[0][0].poll(50) else "no answer"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert isinstance(found, dict), found
    return found


ROOT = "the root FSDP unit (embed, head)"
BLOCKS = "one of 2 FSDP units of this size (blocks.0 … blocks.1)"
BACKWARD = "the reduction of the gradients of"


def test_ddp_buckets_have_the_recorded_sizes(seen: Result) -> None:
    first, second = seen["ddp"]
    assert first == ["DDP's gradient all-reduce of its only bucket (head … embed, 311.1 kB), in backward"]
    # Between the steps it makes its buckets anew, and broadcasts twice.
    assert second == [
        "",
        "",
        "DDP's gradient all-reduce of bucket 1 of 2 (head, wide, 202.5 kB), in backward",
        "DDP's gradient all-reduce of bucket 2 of 2 (blocks.1, blocks.0, embed, 108.7 kB), in backward",
    ]


def test_ddp_buckets_with_find_unused_parameters_are_named(seen: Result) -> None:
    # The last all-reduce of a step is of flags, which parameters were used.
    for step_words in seen["ddp_that_finds_unused"]:
        assert step_words == [
            "DDP's gradient all-reduce of bucket 1 of 3 (wide, head, 67.9 kB), in backward",
            "DDP's gradient all-reduce of bucket 2 of 3 (blocks.1, wide, 134.9 kB), in backward",
            "DDP's gradient all-reduce of bucket 3 of 3 (embed, blocks.0, blocks.1, 108.3 kB), in backward",
            "",
        ]


def test_a_small_model_has_one_bucket(seen: Result) -> None:
    words = "DDP's gradient all-reduce of its only bucket (head … embed, 311.1 kB), in backward"
    assert [step_words[-1] for step_words in seen["ddp_as_it_comes"]] == [words, words]


@pytest.mark.parametrize("model", ["fsdp", "fsdp2"])
def test_every_collective_of_fsdp_is_named(seen: Result, model: str) -> None:
    for step_words in seen[model]:
        assert step_words[:4] == [
            f"the all-gather of {ROOT}",
            *[f"the all-gather of {BLOCKS}"] * 2,
            "the all-gather of FSDP unit wide",
        ]
        assert step_words[-3:] == [*[f"{BACKWARD} {BLOCKS}, in backward"] * 2, f"{BACKWARD} {ROOT}, in backward"]
        assert step_words.count(f"{BACKWARD} FSDP unit wide, in backward") == 1
        assert len(step_words) == 11


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("ddp", "DDP's gradient all-reduce of bucket 1 of 2 (head, wide, 202.5 kB), in backward"),
        ("fsdp", f"the all-gather of {ROOT}, in forward"),
        ("fsdp2", f"the all-gather of {ROOT}, in forward"),
        ("parameter", "the all-gather of parameter weight"),
        ("metric", "torchmetrics' sync of MulticlassAccuracy (accuracy)"),
    ],
)
def test_the_unit_of_a_blocked_rank_is_named(seen: Result, model: str, words: str) -> None:
    """DDP holds its reducer's lock at that moment, so the reducer must not be queried."""
    said, took_s = seen[f"blocked: {model}"]
    assert said == words
    assert took_s < 30


class Broken(nn.Module):
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


def test_an_unreadable_model_is_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlightRecorder, "read", lambda self: ((), (OUTSTANDING,)))
    trainer = TrainerProbe(SimpleNamespace(strategy=SimpleNamespace(model=Broken())))
    probe = RankProbe(rank=0, local_rank=0, tracker=ActionTracker(), trainer=trainer)
    try:
        facts = probe.look(1.0, deadline_s=20)
    finally:
        probe.close()
    assert facts.missing == ("units: RuntimeError: dictionary changed size during iteration",)
    assert facts.versions


def synchronised(name: str, is_synced: bool | None = False) -> nn.Module:
    metric = nn.Module()
    metric.__class__ = type(name, (nn.Module,), {})
    metric._cache, metric._is_synced = {}, is_synced  # type: ignore[assignment]
    return metric


def test_only_units_of_outstanding_collectives_are_listed() -> None:
    model = nn.ModuleList([synchronised("Accuracy"), synchronised("F1", is_synced=True), nn.Linear(2, 2)])
    assert [unit.type for unit in read_units(model, [OUTSTANDING])] == ["Accuracy"]
    assert read_units(model, [replace(OUTSTANDING, completed=True)]) == ()
    assert read_units(model, [replace(OUTSTANDING, is_p2p=True)]) == ()
    assert read_units(None, [OUTSTANDING]) == ()


def flat(elements: int) -> nn.Module:
    """What FSDP leaves on a module that it does not shard (NO_SHARD)."""
    parameter = SimpleNamespace(
        _sharded_size=torch.Size([elements]),
        _unpadded_unsharded_size=torch.Size([elements]),
        _fqns=("weight",),
        element_size=lambda: 4,
    )
    group = SimpleNamespace(group_name="0")
    module = nn.Module()
    module._handle = SimpleNamespace(  # type: ignore[assignment]
        flat_param=parameter, uses_sharded_strategy=False, process_group=group
    )
    return module


def test_only_units_of_the_matching_size_are_listed() -> None:
    (unit,) = read_units(nn.ModuleList([flat(4), flat(5)]), [OUTSTANDING])
    assert (unit.name, unit.elements, unit.shard_elements, unit.size_bytes) == ("0", 4, 0, 16)
    assert unit.parameters == ("0.weight",)


def test_units_are_limited_and_equal_ones_merged() -> None:
    many = nn.ModuleList([synchronised(f"Metric{index}") for index in range(MAX_UNITS + 8)])
    assert len(read_units(many, [OUTSTANDING])) == MAX_UNITS
    (alike,) = read_units(nn.ModuleList([synchronised("Accuracy") for _ in range(3)]), [OUTSTANDING])
    assert (alike.name, alike.last, alike.alike) == ("0", "2", 3)


def test_names_omit_wrappers() -> None:
    assert plain_name("_forward_module._fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.mlp") == "blocks.0.mlp"
